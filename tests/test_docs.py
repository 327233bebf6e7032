"""Tests of the documentation: examples, links and generated regions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/*.md"))]
EXAMPLES = [
    pytest.param(block[1], id=f"{page}-{text.count(chr(10), 0, block.start()) + 1}")
    for page in PAGES
    for text in [(ROOT / page).read_text()]
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)
]


@pytest.mark.parametrize("source", EXAMPLES)
def test_examples_run(source: str, tmp_path: Path) -> None:
    """Each block runs on its own, as a reader who copies it would run it."""
    # Errors quote the source line of a neuron, so the block must be a file.
    script = tmp_path / "example.py"
    script.write_text(source)
    exec(compile(source, script, "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_resolve(page: str) -> None:
    """Relative links name existing files, and fragments name headings of Markdown pages."""
    broken = []
    for path, fragment in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", read(page)):
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (fragment and fragment not in anchors(target.read_text())):
            broken.append(f"{path}#{fragment}" if fragment else path)
    assert broken == []


def read(page: str) -> str:
    return (ROOT / page).read_text()


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_generated_regions_are_closed(page: str) -> None:
    marks = re.findall(r"<!-- generated:(\S+) (begin|end) -->", read(page))
    assert marks[::2] == [(name, "begin") for name, _ in marks[1::2]]
    assert marks[1::2] == [(name, "end") for name, _ in marks[::2]]
