"""Run notebooks and store their outputs: python docs/site/notebooks.py [FILE...]

Without files, all in docs/tutorials.

PYTHONPATH names the folder with the libraries that one of them converts networks of.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "tutorials"


def run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    NotebookClient(notebook, record_timing=False).execute()
    notebook.metadata = metadata  # without the version of Python
    nbformat.write(notebook, path)


if __name__ == "__main__":
    os.environ["SPIKEFUSE_DATA"] = tempfile.gettempdir()  # outputs are those of generated data
    for path in [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.rglob("*.ipynb")):
        print(path.name, flush=True)
        run(path)
