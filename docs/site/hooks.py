"""Hooks of the site: the changelog, files outside docs/, and formulas as MathML."""

from __future__ import annotations

import base64
import json
import posixpath
import re
import textwrap
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = "changelog.md"
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
LOADED = re.compile(
    r'<(?:script|img|iframe|link rel="(?:stylesheet|icon|preconnect)")[^>]*="https?:[^>]*>'
)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the changelog and the notebooks as pages, and the plots of the benchmarks."""
    for notebook in sorted((ROOT / "docs" / "tutorials").rglob("*.ipynb")):
        folder = notebook.parent.relative_to(ROOT / "docs").as_posix()
        for name, content in converted(notebook).items():
            files.append(File.generated(config, f"{folder}/{name}", content=content))
    text = (ROOT / "CHANGELOG.md").read_text()
    files.append(File.generated(config, CHANGELOG, content=text))
    for plot in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        name = plot.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(plot)))
    return files


def converted(notebook: Path) -> dict[str, str | bytes]:
    """The page of a notebook and its figures, by name of the file."""
    found: dict[str, str | bytes] = {}
    text = []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        text.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        outputs = cell.get("outputs", [])
        printed = "".join("".join(o["text"]) for o in outputs if o["output_type"] == "stream")
        text += [f"```text\n{wrapped(printed.rstrip())}\n```"] if printed else []
        for figure in [o["data"]["image/png"] for o in outputs if "data" in o]:
            name = f"{notebook.stem}-{len(found)}.png"
            found[name] = base64.b64decode(figure)
            text.append(f"![figure]({name})")
    text.append(f'<a href="{notebook.name}" download>Download this page as a notebook</a>')
    return found | {f"{notebook.stem}.md": "\n\n".join(text)}


def wrapped(printed: str) -> str:
    """Break sentences that are wider than the page; tables, which have wide gaps, stay."""
    lines = printed.split("\n")
    return "\n".join(s if "  " in s.strip() else textwrap.fill(s, 92) or s for s in lines)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links between files of the repository, as GitHub shows them, point into the site."""
    name = page.file.src_uri
    folder = "" if name == CHANGELOG else posixpath.join("docs", posixpath.dirname(name))

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[0]))
        inside = re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))
        if files.get_file_from_path(inside) is not None:
            return posixpath.relpath(inside, posixpath.dirname(name) or ".")
        if (ROOT / path).exists():
            return f"{config.extra['repository']}/blob/main/{path}"
        return match[0]  # which mkdocs reports

    markdown = re.sub(r'^```python no-run=".*"$', "```python", markdown, flags=re.MULTILINE)
    blocks = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    blocks[::2] = [LINK.sub(target, text) for text in blocks[::2]]
    return "".join(blocks)


def on_page_content(html: str, **_: Any) -> str:
    """Write formulas as MathML, which browsers render without a script."""
    return FORMULA.sub(_mathml, html)


def on_post_page(output: str, page: Any, **_: Any) -> None:
    """Refuse a page that would load something from another host."""
    if found := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} is not complete offline: {found[0]}")


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    formula = unescape(match[2]).replace("{aligned}", "{align*}")  # which the converter knows
    math = convert(formula, display=display).replace(r"\_", "_")
    if "<mi>&</mi>" in math:
        raise ValueError(f"the converter does not know the environment of {formula}")
    return f'<div class="formula">{math}</div>' if display == "block" else math
