"""Run a notebook as one program, which needs no Jupyter."""

from __future__ import annotations

import json
import linecache
import sys
from pathlib import Path
from types import ModuleType

import pytest


def run_notebook(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
    # TorchDynamo imports the module whose code it captures.
    module = ModuleType("tutorial")
    monkeypatch.setitem(sys.modules, "tutorial", module)
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            source, name = "".join(cell["source"]), f"<{path.stem}, {cell['id']}>"
            # As in Jupyter: errors of a network or a neuron quote its source lines.
            linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
            exec(compile(source, name, "exec"), vars(module))
