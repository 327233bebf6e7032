"""The private names of PyTorch that the package uses: each one, and the public way in its place."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

import spikefuse as sf
from spikefuse import _torch
from spikefuse.compiler.adjoint import reverse_step
from spikefuse.compiler.trace import trace_step
from spikefuse.memory import spikes
from spikefuse.neurons.checks import is_plain
from spikefuse.nn import Recurrent, call
from spikefuse.scan import recurrent

NAMES = [
    "utils._python_dispatch.TorchDispatchMode",
    "_C._len_torch_dispatch_stack",
    "_C._autograd._get_current_graph_task_keep_graph",
    "_C._autograd._top_saved_tensors_default_hooks",
    "Tensor._version",
    "Tensor._backward_hooks",
    "autograd.Variable._execution_engine.run_backward",
    "autograd.Variable._execution_engine.queue_callback",
    "nn.Module._replicate_for_data_parallel",
]
ON_GPUS = ["_cuda_clearCublasWorkspaces", "_cuda_endAllocateToPool", "_cuda_releasePool"]
NAMES += [f"_C.{name}" for name in ON_GPUS if torch.version.cuda is not None]


@pytest.mark.parametrize("name", NAMES)
def test_this_version_has(name: str) -> None:
    value = torch
    for part in name.split("."):
        value = getattr(value, part)


def network() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(5, 600), sf.LIF(threshold=0.1), nn.Linear(600, 7), sf.PLIF(threshold=0.1)]
    return sf.Temporal(nn.Sequential(*layers))


def train(net: nn.Module, size: int = 5) -> list[Tensor]:
    """The outputs of a training step, and all gradients."""
    torch.manual_seed(2)
    x = torch.rand(6, 8, size, requires_grad=True)
    y = net(x)
    (y * torch.rand_like(y)).sum().backward()
    return [y.detach(), *(p.grad for p in (x, *net.parameters()))]


def check_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert expected[0].sum() > 0
    assert all(map(torch.equal, found, expected))


def python(code: str, *args: str) -> None:
    folder = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", code, *args], check=True, cwd=folder)


def test_a_version_without_the_functions(tmp_path: Path) -> None:
    """The package can be imported, and gives the same results."""
    path = tmp_path / "results.pt"
    names = [name.removeprefix("_C.") for name in NAMES if name.startswith("_C.")]
    code = f"""
import sys, torch
for name in {names}:
    *path, name = name.split(".")
    owner = torch._C._autograd if path else torch._C
    delattr(owner, name)
import spikefuse
from tests.test_torch import network, train
torch.save(train(network()), sys.argv[1])
"""
    python(code, str(path))
    check_equal(torch.load(path), train(network()))


def test_a_version_without_the_mode_of_the_tracer() -> None:
    code = """
import torch, torch.utils._python_dispatch as module
del module.TorchDispatchMode
import spikefuse as sf
x = torch.ones(2, 3)
sf.LIF()(x, impl="reference")
try:
    sf.LIF()(x)
except NotImplementedError as error:
    assert 'impl="reference"' in str(error)
else:
    raise AssertionError
"""
    python(code)


def test_the_reference_is_what_kernels_compute() -> None:
    x = torch.rand(6, 8, 5)
    assert torch.equal(sf.LIF()(x), sf.LIF()(x, impl="reference"))


def test_calls_by_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _torch.num_dispatch_modes() == 0
    expected = train(network())
    for module in ("neurons", "scan"):
        monkeypatch.setattr(f"spikefuse.{module}.checks.num_dispatch_modes", _torch.one)
    assert not is_plain((torch.ones(2),))
    check_equal(train(network()), expected)


@pytest.mark.parametrize("retain", [True, False])
def test_whether_a_graph_is_kept(retain: bool) -> None:
    seen, x = [], torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(_torch.keeps_graph()))
    y.backward(retain_graph=retain)
    assert seen == [retain]


def test_graphs_that_may_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Recurrent(sf.LIF(threshold=0.1), 32)
    other = copy.deepcopy(net)
    expected = train(net, 32)
    monkeypatch.setattr(recurrent, "keeps_graph", _torch.yes)
    check_equal(train(other, 32), expected)


def identity(x: Tensor) -> Tensor:
    return x


def test_active_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    for look in (_torch.top_saved_tensors_hooks, _torch.any_saved_tensors_hooks):
        assert look(False) is None
        with saved_tensors_hooks(identity, identity):
            assert look(False) is not None
        assert look(False) is None
    with saved_tensors_hooks(identity, identity):
        assert _torch.top_saved_tensors_hooks(False) == (identity, identity)
    expected = train(network())
    monkeypatch.setattr(call, "top_saved_tensors_hooks", _torch.any_saved_tensors_hooks)
    with call.inside(None, packs_spikes=True):
        assert call.active.spikes is not None
    with saved_tensors_hooks(identity, identity), call.inside(None, packs_spikes=True):
        assert call.active.spikes is None
    check_equal(train(network()), expected)


def test_hooks_that_are_disabled() -> None:
    net = network()
    expected = train(net)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        check_equal(train(network()), expected)


def changed(x: Tensor) -> Iterator[Tensor]:
    """A tensor after each of several changes in place."""
    for _ in range(3):
        yield x.add_(1)
    yield x.view(-1)[:1].mul_(3)


@pytest.mark.parametrize("version", [_torch.version, _torch.hashed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_versions(version, dtype: torch.dtype) -> None:
    x = torch.zeros(3, 4).to(dtype)
    assert version(x) == version(x.detach())
    if dtype is torch.bool:
        before = version(x)
        x[0, 0] = True
        assert version(x) != before
        return
    seen = [version(x), *(version(x) for _ in changed(x))]
    assert len(set(seen)) == 5


@pytest.mark.parametrize("hooks", [_torch.backward_hooks, _torch.nothing])
def test_hooks_of_tensors(hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "backward_hooks", hooks)
    known, x = hooks is not _torch.nothing, torch.ones(3, requires_grad=True)
    assert not hooks(x)
    x.register_hook(lambda grad: 2 * grad)
    assert bool(hooks(x)) is known
    with _torch.without_hooks([x, torch.ones(3)]):
        (grad,) = torch.autograd.grad(x.sum(), x)
    assert grad[0] == (1 if known else 2)
    x.sum().backward()
    assert x.grad[0] == 2


@pytest.mark.parametrize("version", [_torch.version, _torch.hashed])
def test_a_change_before_backward(version, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spikes, "version", version)
    check_equal(train(network()), train(network()))
    net = sf.Temporal(nn.Sequential(nn.Linear(5, 600), nn.Tanh(), sf.LIF()))
    kept = []
    net.net[1].register_forward_hook(lambda module, inputs, y: kept.append(y))
    y = net(torch.rand(6, 8, 5))
    with torch.no_grad():
        kept[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo

    made, find = [], torch._dynamo.lookup_backend

    def lookup(name: str):
        made.append(name)
        return find("eager" if name == "inductor" else name)

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lookup)
    expected = train(sf.fuse(network(), mode="inductor"))
    assert made.count("inductor") == 1
    monkeypatch.delattr(torch._dynamo, "lookup_backend")
    check_equal(train(sf.fuse(network(), mode="inductor")), expected)


def test_constant_results() -> None:
    def function() -> int:
        return 1

    def other() -> int:
        return 1

    assert vars(_torch.constant_result(function))
    assert vars(function) == vars(torch.compiler.assume_constant_result(other))


def test_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    neurons = [sf.LIF(), sf.PLIF(), sf.LIF(reset="soft", detach_reset=True)]
    expected = [reverse_step(neuron, trace_step(neuron)) for neuron in neurons]
    monkeypatch.setattr(_torch, "_engine", None)
    assert [reverse_step(neuron, trace_step(neuron)) for neuron in neurons] == expected


def test_the_end_of_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def run() -> None:
        x = torch.ones(1, requires_grad=True)
        y = x * 2
        x.register_hook(lambda _: seen.append("x"))
        y.register_hook(lambda _: _torch.at_end_of_backward(lambda: seen.append("end")))
        y.backward()

    run()
    assert seen == ["x", "end"]
    monkeypatch.setattr(_torch, "_engine", None)
    run()
    assert seen == ["x", "end", "end", "x"]


def test_data_parallel_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="DistributedDataParallel"):
        sf.LIF()._replicate_for_data_parallel()
    assert nn.Linear(1, 1)._replicate_for_data_parallel()


def test_captures_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    monkeypatch.setattr(_torch, "_end_allocation", lambda *given: ended.append(given))
    monkeypatch.setattr(_torch, "_release_pool", _torch.nothing)
    _torch.end_capture(0, (1, 2))
    assert ended == [(0, (1, 2))]


# Attributes of modules, by public ways


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(1, 1)
        self.nested = nn.Sequential(nn.ReLU())
        self.absent = None
        self.register_module("empty", None)


def test_children() -> None:
    net = Layers()
    assert {k: m for k, m in net._modules.items() if m is not None} == _torch.children_of(net)
    assert list(_torch.children_of(net)) == ["first", "second", "nested"]


def test_dicts_of_modules() -> None:
    names = ["_parameters", "_buffers", "_modules"]
    assert list(_torch.registries()) == names
    net = Layers()
    copied = copy.copy(net)
    _torch.separate(copied)
    copied.first = nn.ReLU()
    copied.register_forward_hook(print)
    assert net.first is net.second
    assert _torch.hooks_of([net]) == ([], [])
    assert len(_torch.hooks_of([net, copied])[0]) == 1


def test_hooks_of_modules() -> None:
    net = nn.Linear(1, 1)
    handles = [net.register_forward_hook(print), net.register_forward_pre_hook(print)]
    handles += [net.register_full_backward_hook(print), net.register_full_backward_pre_hook(print)]
    ids = [handle.id for handle in handles]
    assert [*map(sorted, _torch.hooks_of([net]))] == [ids[:2], ids[2:]]
    assert not _torch.has_global_hooks()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert _torch.has_global_hooks()
    handle.remove()
    assert not _torch.has_global_hooks()


def test_hooks_of_a_user() -> None:
    net = nn.utils.spectral_norm(nn.Linear(2, 2))  # type: ignore[no-untyped-call]
    net.register_forward_pre_hook(spikes.unpack)

    class First(prune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
            return default_mask.index_fill(0, torch.tensor([0]), 0)

    First.apply(net, "bias")  # type: ignore[no-untyped-call]
    assert len(_torch.hooks_of([net])[0]) == 3
    assert _torch.user_hooks(net) == []
    net.register_forward_hook(print)
    net.register_forward_pre_hook(functools.partial(print))
    net.register_forward_hook((1).__eq__)  # has no `__module__`
    assert len(_torch.user_hooks(net)) == 3


class Same(nn.Linear):
    """All are equal."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = nn.Linear.__hash__


def listed_network() -> nn.Module:
    parts = nn.ModuleDict({"a": nn.Sequential(Same(1, 1)), "b": nn.Sequential()})
    return nn.ModuleList([nn.Sequential(nn.ReLU(), sf.LIF(), Same(1, 1)), parts, nn.Linear(1, 1)])


CHANGES = {
    "assigned": lambda net: net[0].__setitem__(1, sf.LIF()),
    "by an equal one": lambda net: setattr(net[1]["a"], "0", Same(1, 1)),
    "added": lambda net: net[2].add_module("more", nn.ReLU()),
    "inserted": lambda net: net[0].insert(1, nn.ReLU()),
    "removed": lambda net: delattr(net[0], "0"),
    "popped": lambda net: net[1].pop("a"),
    "moved to its neighbor": lambda net: net[1]["b"].add_module("0", net[1]["a"].pop(0)),
    "swapped": lambda net: net[0]._modules.update({"0": net[0][1], "1": net[0][0]}),
    "renamed": lambda net: net[1].add_module("c", net[1].pop("b")),
    "in another order": lambda net: net._modules.update({"0": net._modules.pop("0")}),
    "set to None": lambda net: setattr(net[1], "a", None),
    "in a dict of its own": lambda net: vars(net[2]).update(_modules={"x": nn.ReLU()}),
    "of another class": lambda net: setattr(net[2], "__class__", Same),
    "parametrized": lambda net: register_parametrization(net[2], "weight", nn.Identity()),
    "scripted": lambda net: setattr(net[2], "s", torch.jit.script(nn.ReLU())),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_have_changed(change: str) -> None:
    net, modules = listed_network(), _torch.Modules((sf.LIF, Same), "net")

    def is_right() -> bool:
        found, named = modules.of(net)
        pairs = [*net.named_modules(prefix="net")]
        assert all(m is right for m, (_, right) in zip(found, pairs, strict=True))
        kinds = [(name, id(m)) for name, m in pairs if isinstance(m, sf.LIF | Same)]
        return [(name, id(m)) for name, m in named] == kinds

    assert is_right()
    before = modules.of(net)[0]
    assert modules.of(net)[0] is before
    CHANGES[change](net)
    assert is_right()
    assert modules.of(net)[0] is not before
    known = modules.of(net)[0]
    assert modules.of(net)[0] is known


def test_modules_of_copies_and_of_other_networks() -> None:
    net, modules = listed_network(), _torch.Modules((sf.LIF,))
    modules.of(net)
    copied, same = copy.deepcopy((net, modules))
    for other in (copied, net):
        assert same.of(other)[0] == [*other.modules()]
        assert same.of(other)[0][0] is other
        assert same.of(other)[1][0][1] is other[0][1]


def test_tensors_of_modules() -> None:
    net = nn.ModuleList([nn.BatchNorm1d(2), nn.Linear(1, 1, bias=False), nn.ReLU()])
    expected = {id(x) for x in (*net.parameters(), *net.buffers())}
    found = _torch.tensors_of(net.modules())
    assert len(found) == len(expected) == 6
    assert {*map(id, found)} == expected


def test_importing_dynamo() -> None:
    code = """
import torch
from spikefuse._torch import dynamo_is_imported
assert not dynamo_is_imported()
torch.compiler.list_backends()
assert dynamo_is_imported()
"""
    python(code)
