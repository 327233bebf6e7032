"""Type checkers and editors understand what users write."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import spikefuse as sf

TYPED = Path(__file__).parent / "typed"
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
# PyTorch's own functions, such as backward(), have no annotations.
STRICT = ("--strict", "--allow-untyped-calls", "--disable-error-code", "import-untyped")
# Errors of the package are those of `make lint`.
SILENT = ("--follow-imports", "silent")


def errors(checker: str, *arguments: str | Path) -> list[tuple[str, int]]:
    """The files and lines in which a checker finds errors."""
    done = subprocess.run(
        [sys.executable, "-m", checker, *map(str, arguments)],
        cwd=TYPED.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    pattern = r"^\s*(\S+\.py):(\d+):.* error: "
    found = re.findall(pattern, done.stdout, re.MULTILINE)
    assert bool(found) == bool(done.returncode), done.stdout + done.stderr
    return sorted({(Path(file).name, int(line)) for file, line in found})


def expected() -> list[tuple[str, int]]:
    lines = (TYPED / "bad.py").read_text().splitlines()
    return [("bad.py", i) for i, line in enumerate(lines, 1) if line.endswith("# error")]


def test_mypy() -> None:
    files = TYPED / "good.py", TYPED / "bad.py", *EXAMPLES
    assert errors("mypy", "--no-incremental", *STRICT, *SILENT, *files) == expected()


def test_pyright() -> None:
    pytest.importorskip("pyright", reason="pyright is not installed: pip install 'pyright[nodejs]'")
    python = ("--pythonpath", sys.executable)
    assert errors("pyright", *python, TYPED / "good.py", TYPED / "bad.py") == expected()


SHOWN = ["LIF", "ALIF", "PLIF", "IF", "Temporal", "Recurrent", "fuse", "convert", "load", "to_nir"]
SHOWN += ["models.resnet18", "models.vggsnn", "models.sdt_v2_31m", "from_ann", "quantize", "Online"]
SHOWN += ["data.load", "data.image_folder", "data.event_folder", "data.Recording", "plots.raster"]


@pytest.mark.parametrize("name", SHOWN)
def test_editors(name: str) -> None:
    """Jedi shows the parameters of a call, from the source alone."""
    jedi = pytest.importorskip("jedi", reason="jedi is not installed: pip install jedi")
    code = f"import spikefuse as sf\nsf.{name}("
    (signature, *_) = jedi.Script(code, path=TYPED / "editor.py").get_signatures()
    shown = [p.name for p in signature.params if p.name != "self"]
    assert shown
    assert not {"args", "kwargs", "firing"} & set(shown)


@pytest.mark.parametrize(
    "name", ["data", "models", "plots", "train", "surrogate", "memory", "plasticity"]
)
def test_completions(name: str) -> None:
    jedi = pytest.importorskip("jedi", reason="jedi is not installed: pip install jedi")
    code = f"import spikefuse as sf\nsf.{name}."
    found = {c.name for c in jedi.Script(code, path=TYPED / "editor.py").complete()}
    assert set(getattr(getattr(sf, name), "__all__", [])) <= found
