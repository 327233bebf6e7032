"""Hooks of the site: the changelog, files outside docs/, and formulas as MathML."""

from __future__ import annotations

import posixpath
import re
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = "changelog.md"
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the changelog as a page, and the plots of the benchmarks."""
    text = (ROOT / "CHANGELOG.md").read_text()
    files.append(File.generated(config, CHANGELOG, content=text))
    for plot in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        name = plot.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links between files of the repository, as GitHub shows them, point into the site."""
    name = page.file.src_uri
    folder = "" if name == CHANGELOG else posixpath.join("docs", posixpath.dirname(name))

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[0]))
        inside = path.removeprefix("docs/")
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


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    return convert(unescape(match[2]), display=display).replace(r"\_", "_")
