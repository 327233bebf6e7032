"""Settings, hooks and modes of fused norms, and when a fused norm acts like that of torch.nn."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.graph import fuse_norms
from spikefuse.graph.report import Place
from tests.graph.norm_networks import FUSED, Net, compare, network


# Each pair of settings, not each three of them.
@pytest.mark.parametrize(
    ("momentum", "affine", "track"),
    [
        (momentum, affine, affine == (momentum is None))
        for momentum in (None, 0.0, 0.3)
        for affine in (True, False)
    ],
)
def test_settings_of_a_norm(momentum: float | None, affine: bool, track: bool) -> None:
    net = Net(FUSED["read again"][0])
    net.bn = nn.BatchNorm1d(6, momentum=momentum, affine=affine, track_running_stats=track)
    fused = compare(sf.Temporal(net), torch.randn(4, 3, 6))
    assert Place("net.bn", "net.lif") in fused.fusion.fused


HOOKS = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]


# Each pair, not each three of them.
@pytest.mark.parametrize(
    ("kind", "layer", "before"),
    [
        (kind, layer, (i + j) % 2 == 0)
        for i, kind in enumerate(HOOKS)
        for j, layer in enumerate(("bn", "lif", "same", ""))
    ],
)
def test_hooks_run(kind: str, layer: str, before: bool) -> None:
    net, seen = sf.Temporal(Net(FUSED["identities"][0])), list[Tensor]()
    fused, x = None if before else sf.fuse(net), torch.randn(4, 3, 6, requires_grad=True)

    def hook(module: nn.Module, *given: tuple[Tensor, ...]) -> None:
        seen.extend(t for value in given for t in (value if isinstance(value, tuple) else (value,)))

    getattr((fused or net).net.get_submodule(layer), f"register_{kind}")(hook)
    fused = fused or sf.fuse(net)
    fused(x).sum().backward()
    expected, seen, x.grad = seen, [], None
    plain = sf.Temporal(Net(FUSED["identities"][0]))
    getattr(plain.net.get_submodule(layer), f"register_{kind}")(hook)
    plain(x).sum().backward()
    assert len(expected) == len(seen) > 0
    for a, b in zip(expected, seen, strict=True):
        torch.testing.assert_close(a + 0, b, rtol=1e-4, atol=1e-4)


def test_inference_mode() -> None:
    net, x = sf.Temporal(Net(FUSED["residual"][0])).eval(), torch.randn(4, 3, 6)
    fused = sf.fuse(net)
    with torch.inference_mode():
        assert torch.equal(fused(x), net(x))
    assert len(fused.fusion.fused) == 1


def test_functional_call() -> None:
    net, x = sf.Temporal(Net(FUSED["residual"][0])), torch.randn(4, 3, 6)
    fused = sf.fuse(copy.deepcopy(net))
    given = {name: torch.rand_like(p) for name, p in net.named_parameters()}
    actual, expected = (torch.func.functional_call(m, given, (x,)) for m in (fused, net))
    torch.testing.assert_close(actual, expected)


def test_replicas() -> None:
    """As nn.DataParallel makes them: parameters and buffers are plain attributes."""

    def replicated(module: nn.Module) -> nn.Module:
        if isinstance(module, sf.Neuron):
            return module
        made = module._replicate_for_data_parallel()
        for name, child in module._modules.items():
            made._modules[name] = replicated(child)
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                setattr(made, name, None if tensor is None else tensor.clone())
        return made

    net, x = network(), torch.randn(4, 3, 6)
    with torch.no_grad():
        replica = replicated(sf.fuse(copy.deepcopy(net)))
        assert torch.equal(replica(x), net(x))
    torch.testing.assert_close(replica.net.bn.running_var, net.net.bn.running_var)


def test_small_inputs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_norms, "MIN_VALUES", 4 * 3 * 6)
    net = sf.fuse(sf.Temporal(nn.Sequential(nn.BatchNorm1d(6), sf.LIF())))

    def reason(batch: int) -> str:
        net(torch.randn(4, batch, 6))
        return "".join(place.reason for place in net.fusion.left)

    assert reason(2) == "its input has 48 values: on a CPU, fusing helps from 72"
    assert not reason(3)
    net.eval()
    assert reason(2)
    assert not reason(3)


def test_synchronized_norms() -> None:
    net = nn.SyncBatchNorm.convert_sync_batchnorm(network()).eval()
    fused, x = sf.fuse(net), torch.randn(4, 3, 6)
    assert isinstance(fused.net.bn, nn.SyncBatchNorm)
    assert torch.equal(fused(x), net(x))
    assert len(fused.fusion.fused) == 1
