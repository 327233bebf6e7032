"""The examples in the documentation run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/*.md"))]


def examples(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)])
def test_examples_run(page: str, tmp_path: Path) -> None:
    """The blocks of a page run one after the other, as a reader would type them."""
    # From a file, because a neuron's source is read when an error names its line.
    script = tmp_path / "example.py"
    script.write_text("\n".join(examples(page)))
    exec(compile(script.read_text(), script, "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_generated_regions_are_closed() -> None:
    marks = re.findall(r"<!-- generated:(\S+) (begin|end) -->", (ROOT / "README.md").read_text())
    assert marks[::2] == [(name, "begin") for name, _ in marks[1::2]]
    assert marks[1::2] == [(name, "end") for name, _ in marks[::2]]
