"""Hooks of the site: generated pages, files outside docs/, and formulas as MathML."""

from __future__ import annotations

import posixpath
import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from pages import NOTEBOOKS, ROOT, converted, gallery

CHANGELOG = "changelog.md"
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
LOADED = re.compile(
    r'<(?:script|img|iframe|link rel="(?:stylesheet|icon|preconnect)")[^>]*="https?:[^>]*>'
)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add notebooks, the gallery and the changelog as pages, and the plots of the benchmarks."""
    pages = {}
    for notebook in sorted(NOTEBOOKS.rglob("*.ipynb")):
        folder = notebook.parent.relative_to(ROOT / "docs").as_posix()
        for name, content in converted(notebook, config.extra["repository"]).items():
            path = f"{folder}/{name}"
            files.append(File.generated(config, path, content=content))
            if isinstance(content, str):
                pages[path] = content
    docs = ROOT / "docs"
    pages |= {p.relative_to(docs).as_posix(): p.read_text() for p in sorted(docs.rglob("*.md"))}
    files.append(File.generated(config, "gallery.md", content=gallery(pages)))
    text = (ROOT / "CHANGELOG.md").read_text()
    files.append(File.generated(config, CHANGELOG, content=text))
    for plot in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        name = plot.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links between files of the repository, as GitHub shows them, point into the site."""
    if page.parent is None:  # the sidebar would repeat its tab
        page.meta.setdefault("hide", ["navigation"])
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
