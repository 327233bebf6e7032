"""The packages of spikefuse/ and what each may import, read from the source: lazy imports count."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

PACKAGE = Path(__file__).resolve().parents[1] / "spikefuse"
MAX_LINES = 500

# Each package, and what it may import of the others: a package, or one module of it. "spikefuse"
# is the public face, __init__.py; "nn.__init__" and others are the faces of packages.
PACKAGES: dict[str, set[str]] = {
    "_torch": set(),  # which all others may import
    "isolated": set(),
    "neurons": set(),
    "reference": {"neurons"},
    "compiler": {"neurons"},
    "kernels": {"neurons"},
    "scan": {"compiler", "kernels", "neurons"},
    "memory": {"block", "nn", "scan", "kernels", "neurons"},
    "nn": {"scan", "reference", "kernels", "neurons"}
    | {"memory.policies", "memory.spikes", "memory.saved_tensors"},
    "block": {"nn", "scan", "reference", "kernels", "neurons", "memory.policies"},
    "events": {"nn", "scan", "kernels", "neurons"},
    "graph": {"memory", "block", "nn", "scan", "reference", "kernels", "neurons"}
    | {"transforms.tables"},
    "transforms": {"graph", "block", "nn", "reference", "kernels", "neurons", "isolated"}
    | {"events.linear"},
    "distributed": {"transforms", "memory", "block", "events", "nn", "scan", "kernels", "neurons"},
    "inspect": {"memory", "block", "events", "nn", "scan", "compiler", "kernels", "neurons"}
    | {"graph", "transforms.tables"},
    "spikefuse": {"distributed", "inspect", "transforms", "graph", "memory", "nn", "compiler"}
    | {"neurons"},
    "data": {"isolated"},
    "models": {"spikefuse", "block", "events", "nn", "neurons"},
    "train": {"models", "distributed", "inspect", "data", "transforms", "graph", "events", "memory"}
    | {"spikefuse", "nn", "neurons", "isolated"},
    "testing": {"models", "distributed", "data", "block", "nn", "spikefuse", "neurons"},
    "__main__": {"train.cli"},
}

# Modules whose rule is not that of their package.
FILES: dict[str, set[str]] = {
    "memory": {"memory"},
    "memory.policies": set(),
    "memory.spikes": {"kernels", "memory.policies"},
    "memory.saved_tensors": {"kernels", "memory.spikes"},
    "transforms.tables": set(),
    "nn": {"nn", "block", "graph", "events", "transforms", "inspect"},
}

# Inside these packages, a module may import only those that come before it.
ORDER = {
    "scan": [
        "layout",
        "cache",
        "kinds",
        "program",
        "launch_numba",
        "launch_triton",
        "state_passing",
        "records",
        "checks",
        "execution",
        "microbatches",
        "double_backward",
        "per_neuron",
        "op",
        "recurrent",
    ],
    "block": [
        "definition",
        "batch_norm",
        "program",
        "training",
        "functional",
        "block",
    ],
    "events": [
        "lists",
        "candidates",
        "lists_numba",
        "lists_triton",
        "format",
        "transpose_numba",
        "products_numba",
        "products_triton",
        "layer_numba",
        "autograd",
        "choice",
        "linear",
        "rate",
        "stream",
    ],
    "kernels": [
        "file_lock",
        "threads",
        "cache_folder",
        "channels",
        "numba_math",
        "numba_cache",
        "numba_runtime",
        "vectors_numba",
        "busy",
        "numba_host",
        "triton_runtime",
        "triton_math",
        "bits_numba",
        "bits_triton",
        "bits",
        "running",
        "norm_numba",
        "norm_triton",
        "norm",
        "pool_layout",
        "pool_numba",
        "pool_triton",
        "pool",
    ],
}

# Pairs of modules that must not know each other.
STRANGERS = [
    (f"compiler.emit_{a}triton", f"compiler.emit_{b}numba")
    for a in ("", "recurrent_")
    for b in ("", "recurrent_")
]

# External packages, and the packages that may import them.
EXTERNAL = {
    "triton": {"kernels", "scan", "events", "nn", "testing"},
    "numba": {"kernels", "scan", "events", "testing"},
    "lightning": {"train"},
    "tensorboard": {"train"},
    "matplotlib": {"train", "inspect"},
    "tqdm": {"train", "data"},
    "yaml": {"train"},
    "sklearn": {"data"},
    "pooch": {"data"},
    "faery": {"data"},
    "h5py": {"isolated", "data", "transforms"},
    "PIL": {"data"},
    "nir": {"transforms"},
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def module_name(package: Path, file: Path) -> str:
    """Dotted name below the package: 'compiler.trace', 'neurons'; 'spikefuse' for the root."""
    parts = file.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "spikefuse"


def package_of(module: str) -> str:
    return module.split(".")[0]


def imported_names(package: Path, file: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import; `from a import b` gives a.b. What only type
    checkers read does not count."""
    here = ["spikefuse", *file.relative_to(package).parts[:-1]]
    tree = ast.parse(file.read_text(), str(file))
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            base = base + ([node.module] if node.module else [])
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def may_import(module: str, name: str) -> bool:
    top, _, target = name.partition(".")
    if top != "spikefuse":
        return package_of(module) in EXTERNAL.get(top, PACKAGES)
    if "." not in target and target not in PACKAGES:
        target = "spikefuse"  # a name of the public face
    if any(module == a and inside(target, b) for pair in STRANGERS for a, b in (pair, pair[::-1])):
        return False
    package = package_of(module)
    allowed = FILES.get(module, PACKAGES[package] | {package})
    return any(inside(target, name) for name in allowed | {module, "_torch"})


def inside(target: str, name: str) -> bool:
    return f"{target}.".startswith(f"{name}.")


def violations(package: Path) -> list[str]:
    """What stands in the package against the rules, one line each; empty when all is well."""
    found = []
    for file in sorted(package.rglob("*.py")):
        where, module = file.relative_to(package), module_name(package, file)
        lines = file.read_text().count("\n")
        if lines > MAX_LINES:
            found.append(f"{where}: {lines} lines, more than {MAX_LINES}")
        if package_of(module) not in PACKAGES:
            found.append(f"{where}: no such package; there are {', '.join(PACKAGES)}")
            continue
        for line, name in imported_names(package, file):
            if not may_import(module, name):
                found.append(f"{where}:{line}: {module} may not import {name}")
    return found


def test_the_table_points_one_way() -> None:
    allowed = {package: set(names) for package, names in PACKAGES.items()} | FILES
    del allowed["memory"], allowed["nn"]  # the faces of these packages
    allowed |= {"memory.*": PACKAGES["memory"], "nn.*": PACKAGES["nn"]}
    graph = {}
    for module, names in allowed.items():
        graph[module] = {name if name in allowed else package_of(name) for name in names} - {module}
    graphlib.TopologicalSorter(graph).prepare()


def test_spikefuse_keeps_to_the_table() -> None:
    assert sorted(PACKAGE.rglob("*.py")), f"nothing to check in {PACKAGE}"
    assert violations(PACKAGE) == []


def imported_files() -> dict[str, set[str]]:
    """The modules of the package that each module imports; faces of packages do not count."""
    modules = {module_name(PACKAGE, file): file for file in PACKAGE.rglob("*.py")}
    faces = {name for name, file in modules.items() if file.name == "__init__.py"}
    graph = {}
    for module, file in modules.items():
        names = [name.removeprefix("spikefuse.") for _, name in imported_names(PACKAGE, file)]
        found = {n if n in modules else n.rpartition(".")[0] for n in names} & modules.keys()
        graph[module] = found - faces - {module}
    return {module: found for module, found in graph.items() if module not in faces}


def test_no_file_cycles() -> None:
    graphlib.TopologicalSorter(imported_files()).prepare()


@pytest.mark.parametrize("package", ORDER)
def test_the_order_inside_a_package(package: str) -> None:
    order, graph = ORDER[package], imported_files()
    inside = {name.split(".")[1] for name in graph if name.startswith(f"{package}.")}
    assert inside == set(order)
    for i, module in enumerate(order):
        later = {f"{package}.{name}" for name in order[i:]}
        assert not graph[f"{package}.{module}"] & later, f"{module} imports what comes after it"


def test_scans_and_blocks_know_no_processes() -> None:
    """They know an object that passes states, and one that sums and gathers."""
    for package in ("neurons", "compiler", "kernels", "scan", "block", "nn", "graph"):
        for file in (PACKAGE / package).rglob("*.py"):
            names = [name for _, name in imported_names(PACKAGE, file)]
            assert not any(inside(name, "torch.distributed") for name in names), file


def test_the_public_face_only_re_exports() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    for node in tree.body[1:]:
        code = ast.unparse(node)
        assert "*" not in code
        face = (
            "from ",
            "import ",
            "__all__ = ",
            "__version__ = ",
            "if _TYPE_CHECKING:",
            "_MODULES = ",
            "_FUNCTIONS = ",
            "def __getattr__",
            "def __dir__",
            "_os.environ.setdefault(",  # before the first tensor, which an import may make
        )
        assert code.startswith(face), code


# file | source | the import that may not be
PLANTED = """
neurons/lif.py | from spikefuse.nn import Temporal | spikefuse.nn.Temporal
neurons/lif.py | from ..nn import Temporal | spikefuse.nn.Temporal
neurons/__init__.py | from ..nn import x | spikefuse.nn.x
neurons/lif.py | from .. import nn | spikefuse.nn
nn/block.py | from spikefuse import LIF | spikefuse.LIF
nn/block.py | from spikefuse.block.block import Block | spikefuse.block.block.Block
nn/block.py | import spikefuse | spikefuse
nn/block.py | def f(): import spikefuse.models | spikefuse.models
nn/block.py | import importlib; importlib.import_module("spikefuse.train") | spikefuse.train
nn/block.py | from spikefuse.utils import f | spikefuse.utils.f
reference.py | import spikefuse.compiler | spikefuse.compiler
compiler/trace.py | from spikefuse import reference | spikefuse.reference
compiler/emit_triton.py | from . import emit_numba | spikefuse.compiler.emit_numba
compiler/emit_numba.py | from .emit_triton import f | spikefuse.compiler.emit_triton.f
data/digits.py | from spikefuse.models import f | spikefuse.models.f
models/net.py | import lightning.pytorch as pl | lightning.pytorch
testing.py | import spikefuse.train | spikefuse.train
__main__.py | from spikefuse.train.config import f | spikefuse.train.config.f
"""

# file | source that is fine there
FINE = """
nn/a.py | from ..scan import op; from spikefuse.neurons.lif import LIF; import torch.nn
nn/a.py | from .b import f; from spikefuse import reference
scan/program.py | def f(): import triton; from ..compiler import emit_triton, emit_numba
models/net.py | import spikefuse as sf; from spikefuse import LIF
train/cli.py | from spikefuse.data import f; from spikefuse.models import net; import lightning
__main__.py | from spikefuse.train.cli import main
__init__.py | from .nn import Temporal; from .neurons import LIF, surrogate
"""


def check_planted(tmp_path: Path, file: str, source: str) -> list[str]:
    package = tmp_path / "spikefuse"
    (package / file).parent.mkdir(parents=True)
    (package / file).write_text(source)
    return violations(package)


@pytest.mark.parametrize("row", PLANTED.strip().splitlines())
def test_the_checker_finds(tmp_path: Path, row: str) -> None:
    file, source, name = row.split(" | ")
    (found,) = check_planted(tmp_path, file, source)
    assert found.startswith(f"{file}:1: ")
    assert found.endswith(f" may not import {name}")


@pytest.mark.parametrize("row", FINE.strip().splitlines())
def test_the_checker_accepts(tmp_path: Path, row: str) -> None:
    assert check_planted(tmp_path, *row.split(" | ")) == []


@pytest.mark.parametrize("file", ["utils/misc.py", "helpers.py"])
def test_the_checker_knows_the_packages(tmp_path: Path, file: str) -> None:
    (found,) = check_planted(tmp_path, file, "import torch")
    assert found.startswith(f"{file}: no such package")


def test_the_checker_counts_lines(tmp_path: Path) -> None:
    assert check_planted(tmp_path / "at", "nn/a.py", "x = 1\n" * MAX_LINES) == []
    (found,) = check_planted(tmp_path / "over", "nn/a.py", "x = 1\n" * (MAX_LINES + 1))
    assert found == "nn/a.py: 501 lines, more than 500"


def test_no_two_classes_share_a_name() -> None:
    found: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module_name(PACKAGE, file))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


METHODS = {name for name in dir(torch.nn.Module()) if is_private(name)}
#: Private attributes and methods of what users and PyTorch pass to each other.
PRIVATE = METHODS | {"_orig_mod"}
PRIVATE |= {n for kind in (torch.Tensor, torch.UntypedStorage) for n in dir(kind) if is_private(n)}


def private_names(file: Path) -> list[str]:
    """The private names of PyTorch in a file; operators are known by their names."""
    tree, found = ast.parse(file.read_text()), []
    roots, own = {"torch"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            roots |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            roots |= {a.asname for a in node.names if a.asname and a.name.startswith("torch.")}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(ast.unparse(node))
        elif isinstance(node, ast.FunctionDef):
            own.add(f"self.{node.name}")
    for line, name in imported_names(file.parent, file):
        if name.startswith("torch.") and any(map(is_private, name.split("."))):
            found.append((line, name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            name = ast.unparse(node)
            is_known = name.startswith("torch.ops.") or name in own
            if not is_known and (name.partition(".")[0] in roots or node.attr in PRIVATE):
                found.append((node.lineno, name))
        elif isinstance(node, ast.FunctionDef) and node.name in METHODS:
            found.append((node.lineno, node.name))
        elif isinstance(node, ast.Constant) and node.value in PRIVATE:
            found.append((node.lineno, node.value))
        elif isinstance(node, ast.keyword) and node.arg in PRIVATE:
            found.append((node.lineno, node.arg))
    return [f"{file.name}:{line}: {name}" for line, name in found]


def test_one_file_uses_private_names_of_pytorch() -> None:
    files = set(PACKAGE.rglob("*.py")) - {PACKAGE / "_torch.py"}
    assert [found for file in sorted(files) for found in private_names(file)] == []
    assert private_names(PACKAGE / "_torch.py")


@pytest.mark.parametrize(
    "source",
    [
        "import torch; torch._C.f()",
        "import torch; torch._foreach_add_(x, 1)",
        "from torch.utils import _pytree",
        "import torch.utils._pytree as tree",
        "from torch.autograd import Variable; Variable._execution_engine",
        "net._modules",
        "vars(net)['_modules']",
        "vars(net).update(_modules={})",
        "x._version",
        "class Layer(nn.Module):\n    def _apply(self, f): ...",
    ],
)
def test_the_checker_finds_private_names(source: str, tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(source)
    assert len(private_names(file)) == 1


def test_files_that_ask_whether_torch_compile_traces() -> None:
    """Each is one place where eager and traced calls differ."""
    found = [f for f in sorted(PACKAGE.rglob("*.py")) if "is_traced()" in f.read_text()]
    names = {module_name(PACKAGE, file) for file in found}
    assert names == {
        *("neurons.checks", "neurons.spike", "neurons.surrogate", "nn.checkpoint", "nn.temporal"),
        *("scan.checks", "scan.op", "scan.per_neuron"),
    }


def test_no_test_file_is_imported() -> None:
    """What several files of tests/ share is in modules without tests."""
    tests, found = Path(__file__).parent, []
    for file in sorted(tests.rglob("*.py")):
        for line, name in imported_names(tests, file):
            if ".test_" in f".{name}":
                found.append(f"{file.relative_to(tests)}:{line}: {name}")
    assert found == []


def python(code: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=PACKAGE.parent)


def test_import_needs_no_optional_package() -> None:
    optional = ["triton", "lightning", "sklearn", "matplotlib", "tensorboard", "pooch", "tqdm"]
    optional += ["tonic", "h5py", "PIL", "nir"]
    blocked = f"import sys; sys.modules.update(dict.fromkeys({optional}))"
    python(f"{blocked}; import spikefuse, spikefuse.data")


def test_import_is_lazy() -> None:
    heavy = {"numba", "triton", "lightning", "sklearn", "matplotlib", "tonic", "h5py", "PIL", "nir"}
    loaded = f"loaded = {heavy} & set(sys.modules); assert not loaded, loaded"
    all_packages = "import spikefuse as sf; sf.data, sf.models, sf.train, sf.load"
    python(f"import sys, spikefuse, spikefuse.data; {loaded}; {all_packages}; {loaded}")


# What `import spikefuse` does not load, since most programs do not need it.
LATE = {"data", "inspect", "isolated", "models", "testing", "train", "transforms"}
# Beyond ours, which take time: the first three import decimal, the next compilers.
SLOW = {"statistics", "fractions", "decimal", "sympy", "torch._dynamo", "torch._inductor"}


def test_import_loads_what_most_programs_need() -> None:
    """The time of an import depends on the machine, so that modules are bounded instead."""
    code = f"""
import sys, torch
before = {{*sys.modules}}
import spikefuse
loaded = {{*sys.modules}} - before
assert not {SLOW} & loaded, loaded
others = {{name.partition(".")[0] for name in loaded}} - sys.stdlib_module_names
assert others <= {{"spikefuse", "torch", "_remote_module_non_scriptable"}}, others
late = {{name for name in loaded if (*name.split("."), "")[1] in {LATE}}}
assert late <= {{"spikefuse.transforms", "spikefuse.transforms.tables"}}, late
"""
    python(code)


def test_packages_are_imported_when_they_are_used() -> None:
    code = """
import sys, spikefuse as sf
packages = {"data", "models", "train"}
assert not {f"spikefuse.{name}" for name in packages} & sys.modules.keys()
assert {*packages, "load", "LIF"} <= set(dir(sf))
assert sf.data.load and sf.models.MODELS and sf.train.TrainConfig and callable(sf.load)
try:
    sf.modles
except AttributeError as error:
    assert str(error) == "module 'spikefuse' has no attribute 'modles'"
else:
    raise AssertionError
"""
    python(code)
