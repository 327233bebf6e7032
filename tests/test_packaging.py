"""The conda recipe and the Dockerfile install what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import spikefuse

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def recipe() -> Any:
    return yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())


def conda(requirement: str) -> str:
    """A requirement of pip as conda writes it."""
    return re.sub(r"^torch\b", "pytorch", re.sub(r"\s*([<>=])", r" \1", requirement, count=1))


def test_requirements_of_the_recipe() -> None:
    found, python = recipe()["requirements"], PROJECT["requires-python"]
    assert found["run"] == [f"python {python}", *map(conda, PROJECT["dependencies"])]
    oldest = f"python {python.removeprefix('>=')}.*"
    assert found["host"] == [oldest, "pip", *map(conda, PYPROJECT["build-system"]["requires"])]


def test_the_recipe_describes_the_package() -> None:
    found = recipe()
    assert found["context"]["version"] == spikefuse.__version__
    assert found["package"]["name"] == PROJECT["name"]
    assert found["about"]["license"] == PROJECT["license"]
    assert found["about"]["summary"] == PROJECT["description"]
    urls = [found["about"][name] for name in ("homepage", "documentation")]
    assert urls == [PROJECT["urls"][name.capitalize()] for name in ("homepage", "documentation")]
    scripts = [f"{name} = {target}" for name, target in PROJECT["scripts"].items()]
    assert found["build"]["python"]["entry_points"] == scripts


def test_the_dockerfile_installs_extras_that_exist() -> None:
    (extras,) = re.findall(r"^ARG EXTRAS=(.+)$", DOCKERFILE, re.M)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    (torch,) = re.findall(r'pip install --no-cache-dir "(torch.*?)"', DOCKERFILE)
    assert torch in PROJECT["dependencies"]
    (python,) = re.findall(r"^FROM python:(\S+)-slim$", DOCKERFILE, re.M)
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
    (entry,) = re.findall(r'^ENTRYPOINT \["(.+)"\]$', DOCKERFILE, re.M)
    assert entry in PROJECT["scripts"]


def test_the_dockerfile_copies_what_the_build_reads() -> None:
    copied = set(" ".join(re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.M)).split())
    hatch = PYPROJECT["tool"]["hatch"]
    readme = hatch["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]
    read = {"pyproject.toml", *PROJECT["license-files"], *(part["path"] for part in readme)}
    assert copied == read | set(hatch["build"]["targets"]["wheel"]["packages"])
    everything, *others = (ROOT / ".dockerignore").read_text().split()
    assert everything == "*"
    assert {name.removeprefix("!") for name in others if name.startswith("!")} == copied
