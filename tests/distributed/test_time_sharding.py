"""Networks whose time several processes share equal the network in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import spikefuse as sf
from spikefuse import memory, testing
from spikefuse.distributed import shard_time, steps_of
from spikefuse.nn import EventLinear
from spikefuse.testing import lay_out, make_input
from tests.distributed.processes import SIZES, Group, messages_of

Make = Callable[[], sf.Temporal]
T = 11


def linear(neuron: Callable[[], nn.Module] = sf.LIF) -> sf.Temporal:
    torch.manual_seed(0)
    return sf.Temporal(nn.Sequential(nn.Linear(6, 5), neuron(), nn.Linear(5, 4), neuron()))


def plif() -> sf.Temporal:
    return linear(lambda: sf.PLIF(0.6, 0.3))


class Branches(nn.Module):
    """Parallel neurons and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1)
        self.first, self.left, self.right = sf.LIF(0.5, 0.3), sf.ALIF(), sf.PLIF(0.6, channels=8)
        self.join, self.last = nn.Conv2d(8, 8, 1), sf.LIF(0.9, 0.2, reset="soft")

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x))
        return self.last(self.join(self.left(2 * x) + self.right(3 * x)) + x)


def branches() -> sf.Temporal:
    torch.manual_seed(0)
    return sf.Temporal(Branches())


def weights_of(y: Tensor) -> Tensor:
    return torch.sin(torch.arange(float(y.numel()))).view(y.shape)


def one_process(make: Make, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and gradients of the input and the parameters, in one process."""
    net, x = make(), x.detach().clone().requires_grad_()
    y = net(x)
    (y * weights_of(y)).sum().backward()
    return y.detach(), [x.grad, *(p.grad for p in net.parameters())]


def shared(
    axis: DeviceMesh, make: Make, x: Tensor, chunks: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The same for this process's steps."""
    net = shard_time(make(), axis, chunks)
    mine = steps_of(len(x), axis.get_local_rank(), axis.size())
    part = x[mine].detach().requires_grad_()
    y = net(part)
    whole = y.new_empty(len(x), *y.shape[1:])
    (y * weights_of(whole)[mine]).sum().backward()
    return y.detach(), part.grad, [p.grad for p in net.parameters()]


def assert_shared_equals_one(
    group: Group, size: int, make: Make, x: Tensor, chunks: int, tolerance: float = 1e-5
) -> None:
    expected, gradients = one_process(make, x)
    assert expected.any()
    found = group(shared, make, x, chunks, size=size)
    assert torch.equal(torch.cat([y for y, _, _ in found]), expected)
    whole = torch.cat([g for _, g, _ in found])
    sums = [torch.stack(gs).sum(0) for gs in zip(*(gs for _, _, gs in found), strict=True)]
    for actual, wanted in zip([whole, *sums], gradients, strict=True):
        scale = wanted.abs().max().item()
        torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(
    ("size", "chunks"), [(1, 3), *((size, 1 + size // 2 % 2) for size in SIZES), (4, 3)]
)
def test_any_number_of_ranks(group: Group, size: int, chunks: int) -> None:
    assert_shared_equals_one(group, size, plif, make_input((T, 4, 6)), chunks)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "batch_first"])
def test_branches_in_any_layout(group: Group, layout: str) -> None:
    x = lay_out(make_input((T, 5, 2, 4, 4)), layout)
    assert_shared_equals_one(group, 3, branches, x, 2)


def speculating(
    axis: DeviceMesh, x: Tensor, speculate: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The same as `shared`, with Triton's kernels."""
    net = shard_time(branches(), axis, 2, speculate=speculate)
    mine = steps_of(len(x), axis.get_local_rank(), axis.size())
    part = x[mine].detach().requires_grad_()
    y = net(part, impl="triton")
    (y * weights_of(y.new_empty(len(x), *y.shape[1:]))[mine]).sum().backward()
    return y.detach(), part.grad, [p.grad for p in net.parameters()]


@pytest.mark.parametrize(("size", "speculate"), [(2, True), (SIZES[-1], True), (2, False)])
def test_speculative_scans_equal_one_process(group: Group, size: int, speculate: bool) -> None:
    x = make_input((30, 3, 2, 4, 4))
    expected, gradients = one_process(branches, x)
    found = group(speculating, x, speculate, size=size)
    assert torch.equal(torch.cat([y for y, _, _ in found]), expected)
    sums = [torch.stack(gs).sum(0) for gs in zip(*(gs for _, _, gs in found), strict=True)]
    whole = torch.cat([g for _, g, _ in found])
    for actual, wanted in zip([whole, *sums], gradients, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


class Scale(nn.Module):
    """A learnable layer whose result does not depend on the number of rows, bit for bit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(4, 12, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Single:
    """Makes a network with one layer of a neuron model; can be pickled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> sf.Temporal:
        return sf.Temporal(nn.Sequential(Scale(), getattr(sf, self.name)()))


# One state and two, that start at rest and elsewhere, and a counter; learnable parameters.
MODELS = "ALIF", "RefractoryLIF", "GatedLIF", "Izhikevich", "TwoCompartmentLIF"


@pytest.mark.parametrize("name", MODELS)
def test_models(group: Group, name: str) -> None:
    assert_shared_equals_one(group, 2, Single(name), make_input((5, 3, 6)), 2)


def states(axis: DeviceMesh, x: Tensor, start: dict[str, tuple[Tensor, ...]]) -> Any:
    """Final states of each rank, and the gradients of the initial states."""
    net, rank = shard_time(plif(), axis, 2), axis.get_local_rank()
    if rank == 0:
        start = {name: tuple(s.requires_grad_() for s in ss) for name, ss in start.items()}
    mine = x[steps_of(len(x), rank, axis.size())]
    y, final = net(mine, state=start if rank == 0 else None, return_state=True)
    ends = [s for ss in final.values() for s in ss]
    # The loss includes states inside the sequence.
    torch.stack([e.square().sum() for e in (y, *ends)]).sum().backward()
    grads = [s.grad for ss in start.values() for s in ss] if rank == 0 else []
    return [e.detach() for e in ends], grads


def test_states(group: Group) -> None:
    x, start = (
        make_input((T, 4, 6)),
        {"net.1": (make_input((4, 5)),), "net.3": (make_input((4, 4)),)},
    )
    found = group(states, x, start, size=3)
    net, state = plif(), {n: tuple(s.requires_grad_() for s in ss) for n, ss in start.items()}
    begins, losses = state, []
    for rank in range(3):
        y, state = net(x[steps_of(T, rank, 3)], state=state, return_state=True)
        ends = [s for ss in state.values() for s in ss]
        losses += [e.square().sum() for e in (y, *ends)]
        assert all(torch.equal(a, b) for a, b in zip(found[rank][0], ends, strict=True))
    torch.stack(losses).sum().backward()
    grads = [s.grad for ss in begins.values() for s in ss]
    torch.testing.assert_close(found[0][1], grads, rtol=1e-5, atol=1e-5)


def recorded(axis: DeviceMesh, x: Tensor, impl: str) -> list[Tensor]:
    net = shard_time(plif(), axis, 2, speculate=impl == "triton")
    mine = x[steps_of(len(x), axis.get_local_rank(), axis.size())]
    with sf.record(net, states=("spikes", "v")) as record:
        net(mine, impl=impl)
    return [*record.of("spikes").values(), *record.of("v").values()]


@pytest.mark.parametrize("impl", ["numba", "triton"])
def test_each_process_records_its_steps(group: Group, impl: str) -> None:
    net, x = plif(), make_input((T, 4, 6))
    with sf.record(net, states=("spikes", "v")) as record:
        net(x)
    expected = [*record.of("spikes").values(), *record.of("v").values()]
    found = group(recorded, x, impl, size=3)
    for parts, whole in zip(zip(*found, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole)
        assert whole.any()


def bfloat16(axis: DeviceMesh, x: Tensor) -> Tensor:
    neuron = shard_time(sf.Temporal(sf.LIF(0.5, 0.3)), axis, 2)
    return neuron(x[steps_of(len(x), axis.get_local_rank(), axis.size())])


def test_bfloat16_and_no_gradients(group: Group) -> None:
    x = make_input((T, 4, 6)).bfloat16()
    expected = sf.LIF(0.5, 0.3)(x)
    assert torch.equal(torch.cat(group(bfloat16, x)), expected)


def poisoned(axis: DeviceMesh, x: Tensor) -> Any:
    with testing.poisoned():
        return shared(axis, plif, x, 3)


def test_no_uninitialized_memory_is_read(group: Group) -> None:
    for y, grad, grads in group(poisoned, make_input((T, 5, 6)), size=2):
        assert all(t.isfinite().all() for t in (y, grad, *grads))


def on_events() -> EventLinear:
    return EventLinear(5, 4, sf.LIF(surrogate=sf.surrogate.FastSigmoid(cutoff=-0.1)))


def refused(axis: DeviceMesh) -> list[str]:
    rank, x, net = axis.get_local_rank(), make_input((4, 3, 6)), shard_time(plif(), axis)
    state = {"net.1": (torch.zeros(3, 5),), "net.3": (torch.zeros(3, 4),)}
    late = shard_time(sf.Temporal(nn.Sequential(nn.Linear(6, 5), sf.LIF())), axis)
    late.net.append(on_events())
    cases: list[Callable[[], Any]] = [
        lambda: shard_time(nn.Linear(2, 2), axis),  # type: ignore[type-var]
        lambda: shard_time(net, axis),
        lambda: shard_time(plif(), axis, 0),
        lambda: shard_time(plif(), axis, statistics="none"),
        lambda: shard_time(plif(), axis, timeout=-1),
        lambda: shard_time(plif(), axis, timeout=float("inf")),
        lambda: shard_time(plif(), "time"),  # type: ignore[arg-type]
        lambda: net(x, impl="reference"),
        lambda: net(x, state=state) if rank else shard_time(plif(), axis, -1),
        lambda: shard_time(sf.Temporal(nn.Sequential(sf.LIF(), on_events())), axis),
        lambda: late(x),
    ]
    return messages_of(cases)


def test_invalid_calls_raise(group: Group) -> None:
    found = group(refused, size=2)[1]
    expected = (
        "Linear contains no Temporal",
        "sharded already",
        "chunks is 0",
        "statistics is 'none'",
        "timeout is -1: expected a positive number of seconds",
        "timeout is inf",
        'pass mesh["time"]',
        'impl is "reference"',
        "state is given to a rank that does not hold the first step",
        "EventLinear can't share their time",
        "EventLinear can't share their time",
    )
    for message, part in zip(found, expected, strict=True):
        assert part in message


POLICIES = memory.SaveAll(), memory.Bits()


def by_policies(axis: DeviceMesh, x: Tensor) -> list[Any]:
    """Outputs and gradients with each policy, in the second call."""
    return [shared_by(axis, x, policy) for policy in (None, *POLICIES)]


def shared_by(axis: DeviceMesh, x: Tensor, policy: Any) -> list[Tensor]:
    torch.manual_seed(0)
    layers = nn.Linear(6, 512), sf.LIF(0.5, 0.1), nn.Linear(512, 4), sf.LIF(0.5, 0.1)
    net = shard_time(sf.Temporal(nn.Sequential(*layers), policy), axis, 2)
    for _ in range(2):
        net.zero_grad()
        y = net(x[steps_of(len(x), axis.get_local_rank(), axis.size())])
        y.square().sum().backward()
    return [y.detach(), *(p.grad for p in net.parameters())]


def test_memory_policies_agree(group: Group) -> None:
    x = make_input((8, 4, 6))
    for plain, *others in group(by_policies, x, size=2):
        assert plain[0].any()
        for found in others:
            assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def checkpointed(axis: DeviceMesh, x: Tensor) -> list[Tensor]:
    """Gradients with the whole network checkpointed; checkpointing one layer raises an error."""
    net = shard_time(plif(), axis, 2)
    mine = steps_of(len(x), axis.get_local_rank(), axis.size())
    part = x[mine].clone().requires_grad_()
    y = checkpoint(net, part, use_reentrant=False)
    (y * weights_of(y.new_empty(len(x), *y.shape[1:]))[mine]).sum().backward()
    neuron = shard_time(sf.Temporal(CheckpointedNeuron()), axis)
    with pytest.raises(RuntimeError, match=r"use spikefuse\.checkpoint"):
        neuron(part).sum().backward()
    return [p.grad for p in net.parameters()]


class CheckpointedNeuron(nn.Module):
    """A neuron that `torch.utils.checkpoint` recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.neuron = sf.LIF()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.neuron, x, use_reentrant=False)


def test_checkpoints(group: Group) -> None:
    x = make_input((T, 4, 6))
    expected = one_process(plif, x)[1][1:]
    sums = [torch.stack(gs).sum(0) for gs in zip(*group(checkpointed, x, size=3), strict=True)]
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-5)
