"""Run notebooks and store their outputs: python docs/site/notebooks.py [FILE...]

Without files, all in docs/tutorials. Their first cell, which installs spikefuse, is written anew.

PYTHONPATH names the folder with the libraries that one of them converts networks of.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
import yaml
from nbclient import NotebookClient
from pages import INSTALL, NOTEBOOKS, ROOT, TEMPLATE

REPOSITORY = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["extra"]["repository"]


def run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    source = TEMPLATE.format(repository=REPOSITORY)
    install = nbformat.v4.new_code_cell(source, id=INSTALL)
    notebook.cells = [install, *(cell for cell in notebook.cells if cell.id != INSTALL)]
    metadata = dict(notebook.metadata)
    NotebookClient(notebook, record_timing=False).execute()
    notebook.metadata = metadata  # without the version of Python
    nbformat.write(notebook, path)


if __name__ == "__main__":
    os.environ["SPIKEFUSE_DATA"] = tempfile.gettempdir()  # outputs are those of generated data
    for path in [Path(name) for name in sys.argv[1:]] or sorted(NOTEBOOKS.rglob("*.ipynb")):
        print(path.name, flush=True)
        run(path)
