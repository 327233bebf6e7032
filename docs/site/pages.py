"""Pages made of notebooks, and a gallery of all figures. Needs neither MkDocs nor Jupyter."""

from __future__ import annotations

import base64
import json
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "docs" / "tutorials"
INSTALL = "install"  # the identifier of the first cell of every notebook
GITHUB = "https://github.com/"
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING_OR_FIGURE = re.compile(r"^(#+) (.*)|!\[[^]]*\]\(([^)]*)\)", re.MULTILINE)
GALLERY = """\
---
search: { exclude: true }
---

# Gallery

All figures of this site. Each leads to the section that makes or explains it.
"""
TEMPLATE = """\
# Installs spikefuse if it is missing, as on Colab.
import subprocess
import sys
from importlib.util import find_spec

if find_spec("spikefuse") is None:
    package = "spikefuse[train] @ git+{repository}"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)"""


def converted(notebook: Path, repository: str) -> dict[str, str | bytes]:
    """The page of a notebook and its figures, by name of the file."""
    found: dict[str, str | bytes] = {}
    text = []
    for cell in cells(notebook):
        source = "".join(cell["source"])
        text.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = "".join("".join(o["text"]) for o in outputs(cell) if o["output_type"] == "stream")
        text += [f"```text\n{wrapped(printed.rstrip())}\n```"] if printed else []
        for figure in figures(cell):
            name = f"{notebook.stem}-{len(found)}.png"
            found[name] = base64.b64decode(figure)
            text.append(f"![figure]({name})")
    title, _, text[0] = text[0].partition("\n\n")
    page = "\n\n".join([title, links(notebook, repository), *text])
    return found | {f"{notebook.stem}.md": page}


def cells(notebook: Path) -> Iterator[dict[str, Any]]:
    """The cells of a notebook, without the one that installs spikefuse."""
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["id"] != INSTALL:
            yield cell


def outputs(cell: dict[str, Any]) -> list[dict[str, Any]]:
    return cell.get("outputs", [])


def figures(cell: dict[str, Any]) -> list[str]:
    """The figures that a cell has drawn, in base64."""
    return [o["data"]["image/png"] for o in outputs(cell) if "data" in o]


def wrapped(printed: str) -> str:
    """Break sentences that are wider than the page; tables, which have wide gaps, stay."""
    lines = printed.split("\n")
    return "\n".join(s if "  " in s.strip() else textwrap.fill(s, 92) or s for s in lines)


def links(notebook: Path, repository: str) -> str:
    """The buttons of a page. Colab opens notebooks of repositories on GitHub only."""
    buttons = {f'href="{notebook.name}" download': "Download the notebook"}
    if repository.startswith(GITHUB):
        path = f"{repository.removeprefix(GITHUB)}/blob/main/{notebook.relative_to(ROOT)}"
        url = f"https://colab.research.google.com/github/{path}"
        buttons = {f'href="{url}"': "Open in Colab"} | buttons
    return " ".join(f'<a class="md-button" {a}>{text}</a>' for a, text in buttons.items())


def gallery(pages: dict[str, str]) -> str:
    """A page that shows the figures of other pages, given by their path and text, once each."""
    text, shown = [GALLERY], set()
    for path, page in pages.items():
        found = []
        for heading, figure in headed_figures(page):
            figure = posixpath.normpath(posixpath.join(posixpath.dirname(path), figure))
            if figure not in shown:
                target = f"{path}#{slug(heading)}"
                found.append(f"[![{heading}]({figure}){{ loading=lazy }} {heading}]({target})")
            shown.add(figure)
        if found:
            title = re.search("^# (.*)", page, re.MULTILINE)[1]
            text += [f"## {title}", '<div class="gallery" markdown>', *found, "</div>"]
    return "\n\n".join(text)


def headed_figures(page: str) -> Iterator[tuple[str, str]]:
    """The figures of a page, each with the heading that it stands under."""
    heading = ""
    for level, title, figure in HEADING_OR_FIGURE.findall(BLOCK.sub("", page)):
        heading = title if level else heading
        if figure:
            yield heading, figure


def slug(heading: str) -> str:
    """The anchor that MkDocs gives a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
