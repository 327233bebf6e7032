"""Recomputed segments in networks whose time ranks share equal one process, and the default policy
on the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import spikefuse as sf
from spikefuse import memory, testing
from spikefuse.distributed import carry_state, shard_time, steps_of
from spikefuse.memory import Checkpoint
from spikefuse.testing import lay_out, make_input
from tests.distributed.processes import SIZES, Group, messages_of
from tests.memory.measuring import Peak

T, ONES = 11, (1.0, 1.0)
Make = Callable[[Any], sf.Temporal]


class Mixed(nn.Module):
    """A wide block, one whose residual has its own norm, neurons with and without a norm before
    them, one after a norm in evaluation mode, dropout, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(2, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), sf.LIF(0.5, 0.4)
        )
        self.plain = nn.Sequential(nn.Conv2d(16, 6, 1), sf.PLIF(0.6, channels=6))
        self.left = nn.Sequential(nn.Conv2d(6, 4, 1, bias=False), nn.BatchNorm2d(4, affine=False))
        self.right, self.join = nn.Sequential(nn.Conv2d(16, 4, 1), nn.BatchNorm2d(4)), sf.ALIF()
        self.norm, self.third = nn.BatchNorm2d(4), sf.LIF(0.7, 0.3, reset="soft")
        self.drop, self.fourth = nn.Dropout(0.0), sf.PLIF(0.3, 0.4)
        self.fixed = nn.Sequential(nn.Conv2d(4, 3, 1), nn.BatchNorm2d(3), sf.LIF(0.6, 0.2))
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.join(self.left(self.plain(x)) + self.right(x))
        x = x + self.third(2 * self.norm(x))
        x = self.fixed(self.fourth(self.drop(x)))
        return self.head(x.mean((2, 3)))


def mixed(policy: Any) -> sf.Temporal:
    torch.manual_seed(0)
    return sf.fuse(sf.Temporal(Mixed(), policy))


def train(
    net: sf.Temporal,
    x: Tensor,
    mine: slice,
    impl: str = "auto",
    scales: tuple[float, float] = (1.0, 2.0),
) -> list[list[Tensor]]:
    """After two steps: running statistics; outputs in training and in evaluation and the gradient
    of the input; gradients of the parameters."""
    net.train()
    for name, module in net.named_modules():
        module.training &= "fixed" not in name
    leaf = x[mine].detach().requires_grad_(x.stride(0) > 0)
    for scale in scales:
        y = net(leaf if scale == 1 else scale * leaf, impl=impl)
        weights = torch.sin(torch.arange(float(len(x) * y[0].numel())))
        (y * weights.view(len(x), *y.shape[1:])[mine]).sum().backward()
    with torch.no_grad():
        seen = net.eval()(leaf, impl=impl)
    of_steps = [y.detach(), seen] + ([leaf.grad] if leaf.requires_grad else [])
    return [list(net.buffers()), of_steps, [p.grad for p in net.parameters()]]


def shared(axis: DeviceMesh, make: Make, x: Tensor, policies: list[Any], *how: Any) -> list[Any]:
    """The results of one rank with each policy."""
    chunks, statistics, *impl = how
    mine = steps_of(len(x), axis.get_local_rank(), axis.size())
    nets = [shard_time(make(p), axis, chunks, statistics) for p in policies]
    return [train(net, x, mine, *impl) for net in nets]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float = 3e-5) -> None:
    for part, wanted in zip(found, expected, strict=True):
        scale = max(wanted.abs().max().item(), 1.0)
        torch.testing.assert_close(part, wanted, rtol=tolerance, atol=tolerance * scale)


def assert_equal_one(found: list[list[list[Tensor]]], expected: list[list[Tensor]]) -> None:
    """Compare the results of ranks with those of one process."""
    for buffers, _, _ in found:
        assert_close(buffers, expected[0])
    assert_close([torch.cat(ys) for ys in zip(*(f[1] for f in found), strict=True)], expected[1])
    sums = [torch.stack(gs).sum(0) for gs in zip(*(f[2] for f in found), strict=True)]
    assert_close(sums, expected[2])


@pytest.mark.parametrize(
    ("size", "chunks", "parts", "layout"),
    [
        (1, 1, 8, "contiguous"),
        (2, 1, 8, "channels_last"),
        (3, 3, 1, "contiguous"),
        (SIZES[-1], 1, 3, "batch_first"),
    ],
)
def test_equals_one_process(group: Group, size: int, chunks: int, parts: int, layout: str) -> None:
    x = lay_out(make_input((T, 5, 2, 5, 5)), layout) + 0.5
    expected = train(mixed(None), x, slice(None))
    found = group(shared, mixed, x, [Checkpoint(parts)], chunks, "exact", size=size)
    assert_equal_one([one for (one,) in found], expected)


def test_triton_kernels(group: Group) -> None:
    """Triton's kernels recompute states that Numba's kernels save; each rank has two chunks."""
    x = make_input((34, 3, 2, 4, 4)) + 0.5
    expected = train(mixed(None), x, slice(None))
    found = group(shared, mixed, x, [Checkpoint()], 1, "exact", "triton", size=2)
    assert_equal_one([one for (one,) in found], expected)


@pytest.mark.parametrize("statistics", ["exact", "shard"])
def test_equals_the_default_on_the_same_ranks(group: Group, statistics: str) -> None:
    policies = [None, Checkpoint(2)]
    x = make_input((T, 5, 2, 5, 5)) + torch.linspace(0, 1, T).view(T, 1, 1, 1, 1)
    for default, found in group(shared, mixed, x, policies, 1, statistics, size=3):
        assert all(p.any() for p in default[1])
        for expected, part in zip(default, found, strict=True):
            assert all(map(torch.equal, part, expected))


def averaged(policy: Any) -> sf.Temporal:
    """A network with a norm that no neuron reads, in its part before the first neuron."""
    torch.manual_seed(0)
    first = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.AvgPool2d(2), sf.LIF(0.5, 0.2)
    last = nn.Conv2d(4, 3, 1), nn.BatchNorm2d(3), sf.LIF(0.5, 0.2)
    return sf.fuse(sf.Temporal(nn.Sequential(*first, *last), policy))


def constant(axis: DeviceMesh, make: Make, x: Tensor, policy: Any) -> list[list[Tensor]]:
    """Steps that are the same on one rank; pickling would drop the stride of 0."""
    net = shard_time(make(policy), axis)
    mine = steps_of(len(x), axis.get_local_rank(), axis.size())
    step = x[mine.start]
    return train(net, step.expand(x.shape), mine, scales=ONES)


@pytest.mark.parametrize(("make", "size"), [(mixed, 4), (averaged, 4), (averaged, 3)])
def test_constant_input(group: Group, make: Make, size: int) -> None:
    """With 4 ranks one of them has a single step, which is not constant input."""
    x, images = make_input((7, 5, 2, 5, 5)), make_input((size, 5, 2, 5, 5)) + 0.5
    for rank in range(size):
        x[steps_of(7, rank, size)] = images[rank]
    buffers, of_steps, grads = train(make(None), x, slice(None), scales=ONES)
    for policy in (None, Checkpoint()):
        found = group(constant, make, x, policy, size=size)
        assert_equal_one(found, [buffers, of_steps[:2], grads])


class Single:
    """Makes a network with one layer of a neuron model; can be pickled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, policy: Any) -> sf.Temporal:
        torch.manual_seed(0)
        neuron = getattr(sf, self.name)()
        return sf.Temporal(nn.Sequential(nn.Linear(6, 8), neuron, nn.Linear(8, 3)), policy)


# States that start at rest and elsewhere, two states and a counter, and learnable parameters.
@pytest.mark.parametrize("name", ["RefractoryLIF", "Izhikevich"])
def test_models(group: Group, name: str) -> None:
    make, x = Single(name), 3 * make_input((T, 5, 6))
    found = group(shared, make, x, [Checkpoint(8)], 1, "exact", size=2)
    assert_equal_one([one for (one,) in found], train(make(None), x, slice(None)))


class Inside(nn.Module):
    """A neuron inside a layer of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), sf.LIF(0.5, 0.2))
        self.layer = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, activation=sf.PLIF(0.5, 0.2), batch_first=True
        )
        self.last = sf.LIF(0.5, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x)))


def inside(policy: Any) -> sf.Temporal:
    torch.manual_seed(0)
    return sf.Temporal(Inside(), policy)


@pytest.mark.parametrize("chunks", [1, 3])
def test_neurons_inside_layers_of_torch(group: Group, chunks: int) -> None:
    x = make_input((T, 5, 3, 8))
    found = group(shared, inside, x, [Checkpoint()], chunks, "exact", size=2)
    assert_equal_one([one for (one,) in found], train(inside(None), x, slice(None)))


class Scale(nn.Module):
    """The result has the memory layout of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.neuron = nn.Parameter(torch.linspace(1, 3, 4)), sf.PLIF(0.5, channels=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron(self.weight * x)


def scale(policy: Any) -> sf.Temporal:
    return sf.Temporal(Scale(), policy)


def test_batch_innermost_in_memory(group: Group) -> None:
    """States are sent sample by sample, whatever the memory layout of a step."""
    x = make_input((4, T, 32)).permute(1, 2, 0)
    found = group(shared, scale, x, [Checkpoint(1)], 1, "exact", size=2)
    assert_equal_one([one for (one,) in found], train(scale(None), x, slice(None)))


def poisoned(axis: DeviceMesh, x: Tensor) -> Any:
    with testing.poisoned():
        return shared(axis, mixed, x, [Checkpoint()], 1, "exact")


def test_no_uninitialized_memory_is_read(group: Group) -> None:
    for (found,) in group(poisoned, make_input((T, 5, 2, 5, 5)) + 0.5, size=2):
        assert all(t.isfinite().all() for tensors in found for t in tensors)


def half(axis: DeviceMesh, x: Tensor) -> list[Any]:
    with torch.autocast("cpu", torch.bfloat16):
        return shared(axis, mixed, x, [None, Checkpoint(1)], 1, "exact")


def test_autocast(group: Group) -> None:
    for default, found in group(half, make_input((T, 5, 2, 5, 5)) + 0.5, size=2):
        for a, b in zip(found, default, strict=True):
            assert all(map(torch.equal, a, b))


class Heads(nn.Module):
    """One value is returned and read by other layers too; another one gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), sf.PLIF(0.5, 0.2))
        self.frozen = nn.Sequential(nn.Linear(6, 8), sf.LIF(0.5, 0.2)).requires_grad_(False)
        self.left, self.right = (nn.Sequential(nn.Linear(8, 4), sf.LIF(0.5, 0.2)) for _ in "ab")

    def forward(self, x: Tensor) -> Any:
        y = self.first(x) + self.frozen(x)
        return {"sum": y, "left": self.left(y), "right": self.right(y)}


def heads(policy: Any) -> sf.Temporal:
    torch.manual_seed(0)
    return sf.Temporal(Heads(), policy)


def of_one_head(net: sf.Temporal, x: Tensor) -> list[Any]:
    y = net(x)
    (y["sum"].sum() + y["left"].square().sum()).backward()
    return [y["right"].detach(), *(p.grad for p in net.parameters())]


def headed(axis: DeviceMesh, x: Tensor) -> list[Any]:
    mine = steps_of(len(x), axis.get_local_rank(), axis.size())
    return of_one_head(shard_time(heads(Checkpoint()), axis), x[mine])


def test_several_outputs_and_frozen_layers(group: Group) -> None:
    x = make_input((T, 5, 6))
    right, *grads = of_one_head(heads(None), x)
    found = group(headed, x, size=3)
    assert torch.equal(torch.cat([f[0] for f in found]), right)
    for i, expected in enumerate(grads):
        mine = [f[1 + i] for f in found]
        if expected is None:
            assert mine == [None] * 3
        else:
            assert_close([torch.stack(mine).sum(0)], [expected])


def deep(policy: Any) -> sf.Temporal:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (3, *[32] * 9):
        layers += [nn.Conv2d(width, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), sf.LIF()]
    return sf.fuse(sf.Temporal(nn.Sequential(*layers), policy))


def peaks(axis: DeviceMesh, x: Tensor) -> list[int]:
    found = []
    mine = x[steps_of(len(x), axis.get_local_rank(), axis.size())]
    for policy in (memory.Recompute(), Checkpoint()):
        net = shard_time(deep(policy), axis)
        net(mine).sum().backward()
        with Peak([mine, *net.parameters(), *net.buffers()]) as peak:
            net(mine).sum().backward()
        found.append(peak.peak)
    return found


def test_memory_of_a_rank(group: Group) -> None:
    for default, found in group(peaks, make_input((16, 16, 3, 8, 8)), size=2):
        assert found < 0.5 * default


def continued(axis: DeviceMesh, x: Tensor) -> list[Any]:
    """Two parts of a sequence, with the states after the first, with and without segments."""
    found = []
    for policy in (None, Checkpoint()):
        net = shard_time(mixed(policy), axis)
        half = x[: len(x) // 2], x[len(x) // 2 :]
        mine = [part[steps_of(len(part), axis.get_local_rank(), axis.size())] for part in half]
        _, state = net(mine[0], return_state=True)
        state = carry_state(state, axis)
        y, last = net(mine[1], state=state, return_state=True)
        (y.sum() + sum(v.sum() for states in last.values() for v in states)).backward()
        found.append([y.detach(), *(p.grad for p in net.parameters())])
    return found


def test_states(group: Group) -> None:
    for default, found in group(continued, make_input((8, 3, 2, 5, 5)) + 0.5, size=2):
        assert all(map(torch.equal, default, found))


class Parts(nn.Module):
    """A part that the network itself recomputes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.function = nn.Sequential(nn.Linear(6, 8), sf.PLIF(0.5, 0.2)), function
        self.part = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), sf.PLIF(0.5, 0.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.part, self.first(x))


def direct(function: Callable[..., Any], x: Tensor) -> Tensor:
    return function(x)


def by_parts(axis: DeviceMesh, x: Tensor, statistics: str) -> list[Any]:
    found = []
    for function in (direct, sf.checkpoint):
        torch.manual_seed(0)
        net = shard_time(sf.Temporal(Parts(function)), axis, 2, statistics)
        mine = steps_of(len(x), axis.get_local_rank(), axis.size())
        found.append(train(net, x, mine))
    return found


@pytest.mark.parametrize("statistics", ["exact", "shard"])
def test_parts_of_a_network(group: Group, statistics: str) -> None:
    """`spikefuse.checkpoint` in a network that is not captured."""
    for plain, found in group(by_parts, make_input((T, 5, 6)), statistics, size=2):
        for expected, a in zip(plain, found, strict=True):
            assert all(map(torch.equal, a, expected))


def different(axis: DeviceMesh) -> list[str]:
    net = sf.Temporal(nn.Linear(6, 5), Checkpoint(1 + axis.get_local_rank()))
    return messages_of([lambda: shard_time(net, axis)(make_input((4, 3, 6)))])


def test_ranks_with_different_policies_raise(group: Group) -> None:
    expected = (
        "rank 1: 4 steps of [T, 3, 6] float32 in memory order [1, 2], Linear in training with "
        "gradients, Checkpoint(chunks=2)"
    )
    for (message,) in group(different, size=2):
        assert expected in message
