"""Tests of the documentation: examples, links and generated regions."""

from __future__ import annotations

import importlib.util
import random
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from spikefuse.train.cli import make_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/**/*.md"))]
# What may follow the three backticks. ```python no-run="needs a GPU"``` is compiled, but not run.
FENCE = re.compile(r'(console|)|python( no-run="[^"]+")?')
EXAMPLES = [
    pytest.param(block[2], not block[1], id=f"{page}-{text.count(chr(10), 0, block.start()) + 1}")
    for page in PAGES
    for text in [(ROOT / page).read_text()]
    for block in re.finditer(r"^```python(.*)\n((?s:.*?))^```", text, re.M)
]


@pytest.mark.parametrize(("source", "runs"), EXAMPLES)
def test_examples_run(
    source: str, runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block runs on its own, as a reader who copies it would run it on a CPU."""
    # Errors quote the source line of a neuron, so the block must be a file.
    script = tmp_path / "example.py"
    script.write_text(source)
    code = compile(source, script, "exec")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    if runs:
        exec(code, {"__name__": "example"})


@pytest.mark.parametrize("page", PAGES)
def test_blocks_have_a_known_language(page: str) -> None:
    """Otherwise a block of Python could escape the test above."""
    opening = re.findall(r"^\s*```(.*)$", read(page), re.M)[::2]
    assert [info for info in opening if not FENCE.fullmatch(info)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/how-to/")])
def test_how_to_pages_are_short(page: str) -> None:
    """A how-to page does one task, in a block that asserts its claim."""
    text = read(page)
    assert text.count("\n") < 50
    assert len(re.findall(r"^```python$", text, re.M)) == 1
    assert "\nassert " in text


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands of the trainer in blocks parse, and options in the text are options of it."""
    for arguments in re.findall(r"^\$ (?:.* )?spikefuse (.*)$", read(page), re.M):
        make_parser().parse_args(shlex.split(arguments, comments=True))
    for command in ("train", "predict"):
        with pytest.raises(SystemExit):
            make_parser().parse_args([command, "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    mentioned = re.findall(r"(?:`|spikefuse train )(--[a-z-]+)", read(page))
    assert set(mentioned) <= known


@pytest.mark.parametrize("page", PAGES)
def test_named_modules_exist(page: str) -> None:
    names = set(re.findall(r"python -m (benchmarks\S*?)[`\s]", read(page)))
    assert [name for name in names if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_resolve(page: str) -> None:
    """Relative links name existing files, and fragments name headings of Markdown pages."""
    broken = []
    for path, fragment in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", prose(read(page))):
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (fragment and fragment not in anchors(target.read_text())):
            broken.append(f"{path}#{fragment}" if fragment else path)
    assert broken == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md"])
def test_every_page_is_listed(page: str) -> None:
    assert f"]({page})" in read("README.md")


def read(page: str) -> str:
    return (ROOT / page).read_text()


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_generated_regions_are_closed(page: str) -> None:
    marks = re.findall(r"<!-- generated:(\S+) (begin|end) -->", read(page))
    assert marks[::2] == [(name, "begin") for name, _ in marks[1::2]]
    assert marks[1::2] == [(name, "end") for name, _ in marks[::2]]
