"""Fused blocks in networks whose time or batch ranks share equal those of one process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import spikefuse as sf
from spikefuse import memory
from spikefuse.distributed import make_mesh, reduce_gradients, shard_time, steps_of
from spikefuse.nn import Block
from spikefuse.testing import lay_out, make_input
from tests import call_path
from tests.distributed.processes import SIZE, SIZES, Group

T = 11
# Python functions of the package that one warm call of a block may pass, forward and backward, on
# the first and the second rank. See `tests/test_call_path.py`.
PASSED = [(112, 101), (115, 106)]


class Residual(nn.Module):
    """Blocks with and without a residual that has a norm, too, a norm without a neuron, and
    learnable neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), sf.LIF(0.5, 0.4)
        )
        self.alone = nn.BatchNorm2d(4, affine=False)
        self.conv, self.norm = nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.short, self.last = nn.BatchNorm2d(4), sf.PLIF(0.6, channels=4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.last(self.norm(self.conv(x)) + self.short(x)) + 0 * self.alone(x)


def make(policy: memory.Policy | None = None) -> sf.Temporal:
    torch.manual_seed(0)
    return sf.fuse(sf.Temporal(Residual(), policy))


def train(net: sf.Temporal, x: Tensor, mine: slice, impl: str) -> list[Tensor]:
    """Running statistics, outputs in training and in evaluation, and gradients of the input and
    the parameters, after two training calls."""
    leaf = x[mine].detach().requires_grad_()
    for scale in (1.0, 2.0):
        y = net(scale * leaf, impl=impl)
        weights = torch.sin(torch.arange(float(len(x) * y[0].numel())))
        (y * weights.view(len(x), *y.shape[1:])[mine]).sum().backward()
    with torch.no_grad():
        seen = net.eval()(leaf, impl=impl)
    buffers = [b.clone() for b in net.buffers()]
    return [*buffers, y.detach(), seen, leaf.grad, *(p.grad for p in net.parameters())]


def shared(axis: DeviceMesh, x: Tensor, chunks: int, impl: str, *policy: Any) -> list[Tensor]:
    net = shard_time(make(*policy), axis, chunks)
    return train(net, x, steps_of(len(x), axis.get_local_rank(), axis.size()), impl)


def assert_equal_one(
    found: list[list[Tensor]], expected: list[Tensor], make: Callable[[], sf.Temporal] = make
) -> None:
    num_buffers = len(list(make().buffers()))
    for i, wanted in enumerate(expected):
        parts = [tensors[i] for tensors in found]
        if num_buffers <= i < num_buffers + 3:  # one part per rank
            parts = [torch.cat(parts)]
        elif i >= num_buffers:  # summed over the steps
            parts = [torch.stack(parts).sum(0)]
        for part in parts:
            assert_close(part, wanted)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    scale = max(wanted.abs().max().item(), 1.0)
    torch.testing.assert_close(found, wanted, rtol=3e-5, atol=3e-5 * scale)


@pytest.mark.parametrize(
    ("size", "chunks", "layout"),
    [(2, 1, "contiguous"), (3, 2, "channels_last"), (SIZES[-1], 3, "batch_first")],
)
def test_exact_statistics_equal_one_process(
    group: Group, size: int, chunks: int, layout: str
) -> None:
    x = lay_out(make_input((T, 3, 2, 5, 5)), layout) + 0.5
    expected = train(make(), x, slice(None), "numba")
    assert_equal_one(group(shared, x, chunks, "numba", size=size), expected)


def single_values(fused: bool, policy: memory.Policy | None = None) -> sf.Temporal:
    """A network with one value per channel, step and sample."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(6), nn.BatchNorm1d(5)]
    neurons = [sf.LIF(0.5, 0.4), sf.PLIF(0.6, 0.3)]
    if fused:
        layers = [norms[0], neurons[0], nn.Linear(6, 5, bias=False), norms[1], neurons[1]]
        return sf.fuse(sf.Temporal(nn.Sequential(*layers), policy))
    blocks = [Block(n, m) for n, m in zip(norms, neurons, strict=True)]
    return sf.Temporal(nn.Sequential(blocks[0], nn.Linear(6, 5, bias=False), blocks[1]), policy)


def sharing_single_values(axis: DeviceMesh, x: Tensor, *how: Any) -> list[Tensor]:
    net = shard_time(single_values(*how), axis)
    return train(net, x, steps_of(len(x), axis.get_local_rank(), axis.size()), "numba")


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("how", [(True,), (False,), (True, memory.Checkpoint())], ids=repr)
def test_one_value_per_channel_and_rank(group: Group, how: tuple[Any, ...], steps: int) -> None:
    """Statistics exist over all ranks."""
    x = make_input((steps, 1, 6)) + 0.5
    expected = train(single_values(*how), x, slice(None), "numba")
    found = group(sharing_single_values, x, *how, size=2)
    assert_equal_one(found, expected, lambda: single_values(*how))


@pytest.mark.parametrize("policy", [memory.Recompute(), memory.SaveAll()])
def test_states_may_be_recomputed(group: Group, policy: memory.Policy) -> None:
    """Triton's kernels recompute states that Numba's kernels save; each rank has two chunks."""
    x = make_input((34, 2, 2, 4, 4)) + 0.5
    expected = train(make(), x, slice(None), "numba")
    assert_equal_one(group(shared, x, 2, "triton", policy, size=2), expected)


def alone() -> tuple[sf.Temporal, Block]:
    torch.manual_seed(0)
    block = Block(nn.BatchNorm1d(6), sf.ALIF())
    return sf.Temporal(nn.Sequential(nn.Linear(6, 6, bias=False), block)), block


def each(axis: DeviceMesh, x: Tensor) -> list[Any]:
    """Output, final state, running mean and gradients with each rank's own statistics."""
    net, block = alone()
    shard_time(net, axis, 2, statistics="shard")
    mine = x[steps_of(len(x), axis.get_local_rank(), axis.size())]
    y, state = net(mine, return_state=True)
    (y.sum() + sum(s.sum() for s in state["net.1.neuron"])).backward()
    ends = [s.detach() for s in state["net.1.neuron"]]
    return [y.detach(), ends, block.norm.running_mean, [p.grad for p in net.parameters()]]


def test_statistics_per_shard(group: Group) -> None:
    x = make_input((T, 4, 6)) + torch.arange(11.0).view(T, 1, 1)
    found = group(each, x, size=2)
    net, block = alone()
    state, means, loss = None, [], torch.zeros(())
    for (y, ends, _, _), mine in zip(found, (slice(0, 5), slice(5, 11)), strict=True):
        block.norm.reset_running_stats()
        spikes, state = block(net.net[0](x[mine]), state=state, return_state=True)
        assert torch.equal(y, spikes)
        assert all(torch.equal(a, b) for a, b in zip(ends, state, strict=True))
        loss = loss + spikes.sum() + sum(s.sum() for s in state)
        means.append(block.norm.running_mean.clone())
    loss.backward()
    for _, _, mean, _ in found:
        torch.testing.assert_close(mean, torch.stack(means).mean(0))
    for i, p in enumerate(net.parameters()):
        total = sum(grads[i] for *_, grads in found)
        scale = p.grad.abs().max().item()
        torch.testing.assert_close(total, p.grad, rtol=1e-5, atol=1e-5 * scale)


class Normed(nn.Module):
    """Every norm is in a block, because on CPUs `SyncBatchNorm` does not run by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.first = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), sf.LIF(0.5, 0.4)
        self.conv, self.second = nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4, momentum=None)
        self.last, self.head = sf.PLIF(0.6, channels=4), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.norm(self.stem(x)))
        return self.head(self.last(self.second(self.conv(x)) + x).flatten(1))


def on_rows(net: sf.Temporal, x: Tensor, rows: slice, ranks: int) -> list[Tensor]:
    """Output, gradient of the input and running statistics after two training calls on some rows.
    The loss is scaled so that its mean over `ranks` is the sum over all rows."""
    leaf = x[:, rows].detach().requires_grad_()
    for scale in (1.0, 2.0):
        y = net(scale * leaf)
        weights = torch.sin(torch.arange(float(x.shape[1] * y[:, 0].numel())))
        weights = weights.view(len(x), x.shape[1], -1)[:, rows]
        (ranks * (y * weights).sum()).backward()
    return [y.detach(), leaf.grad / ranks, *net.buffers()]


def normed(policy: memory.Policy, group: Any = None, synchronized: bool = False) -> sf.Temporal:
    torch.manual_seed(0)
    net = sf.Temporal(Normed(), policy)
    if synchronized:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net, group)
    net = sf.fuse(net)
    return net


def batch_shared(
    axis: DeviceMesh, x: Tensor, policy: memory.Policy, ranks: int
) -> tuple[list[Tensor], list[Tensor]]:
    mesh = make_mesh(data=ranks, device="cpu")
    data = mesh["data"]
    group = None if ranks == SIZE else data.get_group()  # all processes by default
    net = normed(policy, group, synchronized=True)
    mine = steps_of(x.shape[1], data.get_local_rank(), ranks)
    found = on_rows(net, x, mine, ranks)
    reduce_gradients(net, mesh)
    return found, [p.grad for p in net.parameters()]


@pytest.mark.parametrize("policy", [memory.Recompute(), memory.Checkpoint(2)])
@pytest.mark.parametrize("ranks", [2, SIZE])
def test_synchronized_norms_equal_one_process(
    group: Group, policy: memory.Policy, ranks: int
) -> None:
    """Ranks have batches of different sizes."""
    x = make_input((T, 2 * SIZE + 1, 2, 5, 5)) + 0.5
    net = normed(policy)
    expected = on_rows(net, x, slice(None), 1)
    found = group(batch_shared, x, policy, ranks)[:: SIZE // ranks]
    for i, wanted in enumerate(expected):
        parts = [tensors[i] for tensors, _ in found]
        for part in [torch.cat(parts, 1)] if i < 2 else parts:  # one part per rank
            assert_close(part, wanted)
    for _, grads in found:
        for grad, p in zip(grads, net.parameters(), strict=True):
            assert_close(grad, p.grad)


def blocks(group: Any = None, synchronized: bool = False) -> sf.Temporal:
    torch.manual_seed(0)
    block = Block(nn.BatchNorm2d(4), sf.PLIF(0.6, channels=4))
    net = sf.Temporal(nn.Sequential(nn.Conv2d(2, 4, 3), block, nn.Flatten(), nn.Linear(36, 3)))
    return nn.SyncBatchNorm.convert_sync_batchnorm(net, group) if synchronized else net


def batch_of_blocks(axis: DeviceMesh, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    mesh = make_mesh(data=axis.size(), device="cpu")
    net = blocks(axis.get_group(), synchronized=True)
    rows = steps_of(x.shape[1], axis.get_local_rank(), axis.size())
    found = on_rows(net, x, rows, axis.size())
    reduce_gradients(net, mesh)
    return found, [p.grad for p in net.parameters()]


def test_blocks_of_synchronized_norms_equal_one_process(group: Group) -> None:
    x, net = make_input((T, 2 * SIZE + 1, 2, 5, 5)) + 0.5, blocks()
    expected = on_rows(net, x, slice(None), 1)
    found = group(batch_of_blocks, x, size=SIZE)
    for i, wanted in enumerate(expected):
        parts = [tensors[i] for tensors, _ in found]
        for part in [torch.cat(parts, 1)] if i < 2 else parts:
            assert_close(part, wanted)
    for _, grads in found:
        for grad, p in zip(grads, net.parameters(), strict=True):
            assert_close(grad, p.grad)


def counts(axis: DeviceMesh) -> tuple[int, int]:
    gc.collect()  # garbage of earlier tests calls functions of the package when it is collected
    return call_path.counts(shard_time(call_path.block(), axis))


def test_the_path_of_a_warm_call(group: Group) -> None:
    for (forward, backward), most in zip(group(counts, size=2), PASSED, strict=True):
        assert 0 < forward <= most[0]
        assert 0 < backward <= most[1]
