"""Tests of the documentation: examples, links and generated regions."""

from __future__ import annotations

import importlib.util
import inspect
import json
import random
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from contextlib import suppress
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import spikefuse as sf
from spikefuse import testing
from spikefuse.train.parser import make_parser
from tests.notebooks import run_notebook

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/**/*.md"))]
NOTEBOOKS = sorted(ROOT.glob("docs/tutorials/**/*.ipynb"))
NOTEBOOK_PAGES = [path.relative_to(ROOT).as_posix() for path in NOTEBOOKS]
SITE = runpy.run_path(str(ROOT / "docs" / "site" / "pages.py"))
REPOSITORY = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["extra"]["repository"]
# What may follow the three backticks. ```python no-run="needs a GPU"``` is compiled, but not run.
FENCE = re.compile(r'(console|)|python( no-run="[^"]+")?')
EXAMPLES = [
    pytest.param(block[2], not block[1], id=f"{page}-{text.count(chr(10), 0, block.start()) + 1}")
    for page in [*PAGES, "CONTRIBUTING.md"]
    for text in [(ROOT / page).read_text()]
    for block in re.finditer(r"^```python(.*)\n((?s:.*?))^```", text, re.M)
]


@pytest.fixture(autouse=True, scope="module")
def blocks_of_any_size() -> None:
    """Examples fuse what a reader's do."""


@pytest.mark.parametrize(("source", "runs"), EXAMPLES)
def test_examples_run(
    source: str, runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block runs on its own, as a reader who copies it would run it on a CPU."""
    run(source, runs, tmp_path, monkeypatch)


def run(source: str, runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile an example in `tmp_path`, and run it unless `runs` is False."""
    # Errors quote the source line of a neuron, so the block must be a file.
    script = tmp_path / "example.py"
    script.write_text(source)
    code = compile(source, script, "exec")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    # TorchDynamo imports the module whose code it captures.
    module = ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)
    monkeypatch.chdir(tmp_path)
    if runs:
        exec(code, vars(module))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(
    path: Path, own_threads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their cells run in order, without datasets, and the outputs in the file are of one run."""
    monkeypatch.setenv("SPIKEFUSE_DATA", str(tmp_path))
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    run_notebook(path, monkeypatch)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_of_a_notebook_installs_spikefuse(path: Path) -> None:
    first = json.loads(path.read_text())["cells"][0]
    template = SITE["TEMPLATE"].format(repository=REPOSITORY)
    assert ("".join(first["source"]), first["id"]) == (template, SITE["INSTALL"])


def test_the_installing_cell_installs_only_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    cell = SITE["TEMPLATE"].format(repository="https://example.org/code")
    exec(cell, {})
    assert commands == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(cell, {})
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert command[-1] == "spikefuse[train] @ git+https://example.org/code"


def test_pages_of_notebooks_have_buttons() -> None:
    """Colab opens repositories of GitHub only."""
    path, name = NOTEBOOKS[0], f"{NOTEBOOKS[0].stem}.md"
    pages = [
        SITE["converted"](path, f"https://{host}/someone/code")[name]
        for host in ("github.com", "example.org")
    ]
    for page in pages:
        assert re.match(rf'# .*\n\n<a .*href="{path.name}" download', page)
        assert "Installs spikefuse" not in page
    notebook = f"github/someone/code/blob/main/{NOTEBOOK_PAGES[0]}"
    assert f'href="https://colab.research.google.com/{notebook}"' in pages[0]
    assert "colab" not in pages[1]


def test_the_gallery_shows_figures_of_pages_once() -> None:
    """With the heading that each stands under; not what a block of code contains."""
    code = "```python\n# no\n![f](no.png)\n```"
    first = f"# One\n\n![f](1.png)\n\n## What `x` is\n\n{code}\n![f](../2.svg)"
    pages = {"a/one.md": first, "two.md": "# Two\n\n![again](2.svg)", "three.md": "# Three"}
    page = SITE["gallery"](pages)
    assert re.findall(r"^## (.*)$", page, re.M) == ["One"]
    assert re.findall(r"^\[.*", page, re.M) == [
        "[![One](a/1.png){ loading=lazy } One](a/one.md#one)",
        "[![What `x` is](2.svg){ loading=lazy } What `x` is](a/one.md#what-x-is)",
    ]


@pytest.mark.parametrize("page", PAGES)
def test_blocks_have_a_known_language(page: str) -> None:
    """Otherwise a block of Python could escape the test above."""
    opening = re.findall(r"^\s*```(.*)$", read(page), re.M)[::2]
    assert [info for info in opening if not FENCE.fullmatch(info)] == []


@pytest.mark.parametrize("path", [*map(ROOT.joinpath, PAGES), *NOTEBOOKS], ids=lambda p: p.stem)
def test_code_fits_on_the_page(path: Path) -> None:
    """Wider blocks have to be scrolled; docs/site/style.css sets the size of their characters."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        blocks = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    else:
        blocks = re.findall(r"^```.*\n((?s:.*?))^```", path.read_text(), re.M)
    assert [line for block in blocks for line in block.split("\n") if len(line) > 92] == []


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
    text = read(page).replace("\\\n", "")  # commands of several lines
    for arguments in re.findall(r"^\$ (?:.* )?spikefuse (.*)$", text, re.M):
        make_parser().parse_args(shlex.split(arguments, comments=True))
    for command in ("train", "predict", "export"):
        with pytest.raises(SystemExit):
            make_parser().parse_args([command, "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    mentioned = re.findall(r"(?:`|spikefuse train )(--[a-z-]+)", read(page))
    assert set(mentioned) <= known


@pytest.mark.parametrize("page", PAGES)
def test_named_modules_exist(page: str) -> None:
    names = set(re.findall(r"python -m (benchmarks\S*?)[`\s]", read(page)))
    assert [name for name in names if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize(
    "page",
    [*PAGES, *NOTEBOOK_PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"],
)
def test_links_resolve(page: str) -> None:
    """Relative links name existing files, and fragments name headings of Markdown pages."""
    text = text_of(ROOT / page) if page in NOTEBOOK_PAGES else read(page)
    broken = []
    for path, fragment in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", prose(text)):
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (fragment and fragment not in anchors(target.read_text())):
            broken.append(f"{path}#{fragment}" if fragment else path)
    assert broken == []


def test_the_citation_has_the_last_release() -> None:
    released, *_ = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", read("CHANGELOG.md"), re.M)
    assert yaml.safe_load(read("CITATION.cff"))["version"] == released
    version = tuple(map(int, sf.__version__.removesuffix(".dev0").split(".")))
    is_development = sf.__version__.endswith(".dev0")
    assert (version > tuple(map(int, released.split(".")))) == is_development


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.safe_load(read("mkdocs.yml"))["nav"]
    # Made of CHANGELOG.md, of notebooks, and of figures.
    notebooks = {path.relative_to(ROOT / "docs").with_suffix(".md") for path in NOTEBOOKS}
    pages = {"changelog.md", "gallery.md", *(page.as_posix() for page in notebooks)}
    assert set(leaves(nav)) == pages | {
        page.removeprefix("docs/") for page in PAGES if page != "README.md"
    }


def leaves(nav: Any) -> list[str]:
    """The pages of a navigation, which is a list of pages and of dicts from titles to the same."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in leaves(part)]


# The public face: `sf` is the name by which pages call the package.
FACES = [
    "",
    ".nn",
    ".nn.encode",
    ".nn.readouts",
    ".surrogate",
    ".memory",
    ".distributed",
    ".models",
    ".data",
]
FACES += [".train", ".plots", ".plasticity"]
PUBLIC = {
    f"sf{face}.{name}": getattr(module, name)
    for face in FACES
    for module in [attrgetter(face[1:])(sf) if face else sf]
    for name in module.__all__
    if not isinstance(getattr(module, name), ModuleType | str)
} | {f"spikefuse.testing.{name}": getattr(testing, name) for name in testing.__all__}
# Functions and classes; for several models, the function that builds them.
CALLABLES = {
    name: value
    for name, public in PUBLIC.items()
    for value in [inspect.unwrap(public) if callable(public) else public]
    if inspect.isroutine(value) or inspect.isclass(value)
}


def test_the_reference_has_all_public_names() -> None:
    shown = set(map(id, in_reference()))
    assert [name for name, value in CALLABLES.items() if id(value) not in shown] == []
    others = PUBLIC.keys() - CALLABLES.keys()
    assert [name for name in others if f"`{name}`" not in reference()] == []


@pytest.mark.parametrize("name", {id(value): name for name, value in CALLABLES.items()}.values())
def test_parameters_have_descriptions(name: str) -> None:
    """Each parameter has an entry in the docstring, or in one that the entry names."""
    value = CALLABLES[name]
    text = inspect.getdoc(value) or ""
    assert text
    if inspect.isclass(value) and issubclass(value, Exception):
        return
    entries = re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \(.*\))?: ", text, re.M)
    known = {entry for names in entries for entry in names.replace("*", "").split(", ")}
    # Options of `Firing` and what a class passes on to its base.
    known |= {"firing", "unknown", "args", "kwargs"}
    assert [p for p in inspect.signature(value).parameters if p not in known] == []


# Callables whose docstring has an example.
DOCUMENTED = [
    name
    for name in CALLABLES
    if re.fullmatch(r"sf\.((data|memory|models|plots|plasticity)\.)?\w+", name)
]
DOCUMENTED.remove("sf.data.DataError")  # which nobody calls
DOCUMENTED.remove("sf.data.Examples")
DOCUMENTED += ["sf.train.TrainConfig", "sf.train.fit"]
# Examples that are only compiled, and why.
COMPILED = {
    "sf.convert": "needs snnTorch",
    **dict.fromkeys(
        ("sf.data.event_folder", "sf.data.image_folder"), "need a folder of the user's"
    ),
    **dict.fromkeys(("sf.data.ImageFolder", "sf.data.read_file", "sf.data.read_idx"), "need files"),
    "sf.load": "needs the folder of a run",
    "sf.train.fit": "trains for a minute; docs/training.md runs a shorter one",
}


@pytest.mark.parametrize("name", {id(CALLABLES[name]): name for name in DOCUMENTED}.values())
def test_docstring_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each public callable has an example, which runs after the three usual imports."""
    text = inspect.cleandoc(CALLABLES[name].__doc__ or "")  # not one that is inherited
    example = re.search(r"^Example::\n\n((?:(?: {4}.*)?\n)+)", f"{text}\n", re.M)
    assert example, f"the docstring of {name} has no example"
    code = textwrap.dedent(example[1])
    assert max(map(len, code.split("\n"))) <= 92
    imports = "import torch\nimport torch.nn as nn\nimport spikefuse as sf\n\n"
    run(imports + code, name not in COMPILED, tmp_path, monkeypatch)


METHODS = [
    [cell.strip() for cell in row.strip("|").split("|")]
    for row in (ROOT / "docs" / "methods.md").read_text().splitlines()
    if row.count("|") == 6 and not row.startswith(("| method", "|---"))
]


def test_there_are_many_methods() -> None:
    assert len({name for name, *_ in METHODS}) == len(METHODS) >= 30


@pytest.mark.parametrize("row", METHODS, ids=lambda row: row[0])
def test_published_methods(row: list[str]) -> None:
    """The link of a method leads to a block that is run, or to a name whose example is."""
    _, _, where, lines, link = row
    page, fragment = re.fullmatch(r"\[[^]]+\]\(([^#]*)#(.+)\)", link).groups()  # type: ignore[union-attr]
    text, names = read(f"docs/{page or 'methods.md'}"), re.findall(r"`([^`]*)`", where)
    (heading,) = [m for m in re.finditer("^#+ (.*)$", text, re.M) if anchor(m[1]) == fragment]
    before, _, block = text[heading.end() :].partition("\n```python\n")
    if not block or re.search("^#", before, re.M):  # of another section
        assert lines == "1"
        assert set(names) <= set(DOCUMENTED) - COMPILED.keys()
        return
    code = [line for line in block.partition("\n```")[0].splitlines() if line.strip()]
    if lines == "1":
        assert all(name in "\n".join(code) for name in names)
    else:
        code = [line for line in code if not line.startswith(("assert ", "import ", "from ", "#"))]
        assert len(code) == int(lines)


@cache
def reference() -> str:
    return "".join(read(page) for page in PAGES if page.startswith("docs/reference/"))


@cache
def in_reference() -> list[Any]:
    """What the pages of the reference show, by `::: name`."""
    names = re.findall(r"^::: spikefuse\.(\S+)", reference(), re.M)
    assert len(names) == len(set(names))
    return [inspect.unwrap(shown(name)) for name in names]


def shown(name: str) -> Any:
    """What mkdocstrings shows: a module, or else what its package or module calls by this name."""
    module, _, attribute = f"spikefuse.{name}".rpartition(".")
    with suppress(ModuleNotFoundError):
        return importlib.import_module(f"{module}.{attribute}")
    with suppress(ModuleNotFoundError):
        return getattr(importlib.import_module(module), attribute)
    return attrgetter(name)(sf)


def read(page: str) -> str:
    return (ROOT / page).read_text()


def text_of(notebook: Path) -> str:
    """The cells of a notebook that are text."""
    cells = json.loads(notebook.read_text())["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.M)
    return {anchor(heading) for heading in headings}


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_emitted_code_is_up_to_date() -> None:
    page = read("docs/explanation/kernels.md")
    emitted = runpy.run_path(str(ROOT / "docs" / "site" / "emitted.py"))
    assert emitted["filled"](page) == page, "run python docs/site/emitted.py"


def test_figures_are_up_to_date() -> None:
    """They hold a digest of the script and of what it measures, whatever draws them."""
    figures = runpy.run_path(str(ROOT / "docs" / "site" / "figures.py"))
    found = {path.stem: path.read_text() for path in figures["FOLDER"].iterdir()}
    assert found.keys() == figures["FIGURES"].keys()
    current = f"<dc:description>{figures['digest'](figures['measured']())}</dc:description>"
    stale = [name for name, text in found.items() if current not in text]
    assert stale == [], "run python docs/site/figures.py"


def test_behaviour_of_neurons_is_up_to_date() -> None:
    """The page shows every model, drawn by the current script."""
    behaviour = runpy.run_path(str(ROOT / "docs" / "site" / "behaviour.py"))
    assert behaviour["PAGE"].read_text() == behaviour["page"](), "run docs/site/behaviour.py"
    shown = {path.stem: Image.open(path).text for path in behaviour["FOLDER"].iterdir()}
    drawn_by = {"Description": behaviour["digest"]()}
    assert shown == dict.fromkeys(behaviour["MODELS"], drawn_by)


@pytest.mark.parametrize("page", PAGES)
def test_generated_regions_are_closed(page: str) -> None:
    marks = re.findall(r"<!-- generated:(\S+) (begin|end) -->", read(page))
    assert marks[::2] == [(name, "begin") for name, _ in marks[1::2]]
    assert marks[1::2] == [(name, "end") for name, _ in marks[::2]]
