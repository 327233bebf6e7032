"""Losses of shared sequences and averaged gradients equal those of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import spikefuse as sf
from spikefuse import distributed
from spikefuse.distributed import (
    carry_state,
    gather_steps,
    make_mesh,
    reduce_gradients,
    shard_time,
    steps_of,
)
from spikefuse.testing import make_input
from tests.distributed.processes import SIZE, Group

T = 7
LABELS = torch.tensor([0, 1, 2, 1])


def make() -> sf.Temporal:
    torch.manual_seed(0)
    return sf.Temporal(nn.Sequential(nn.Linear(6, 5), sf.PLIF(0.6, 0.3), nn.Linear(5, 3)))


def loss_of(reduced: Tensor, kind: str) -> Tensor:
    if kind == "gather_steps":
        return sum(F.cross_entropy(y, LABELS) * (t + 1) for t, y in enumerate(reduced))
    return F.cross_entropy(reduced, LABELS)


ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "mean_over_steps": lambda y: y.mean(0),
    "last_step": lambda y: y[-1],
    "gather_steps": lambda y: y,
}


def shared(axis: DeviceMesh, x: Tensor, kind: str) -> list[Tensor]:
    net = shard_time(make(), axis, 2)
    y = net(x[steps_of(T, axis.get_local_rank(), axis.size())])
    reduced = getattr(distributed, kind)(y, axis)
    loss_of(reduced, kind).backward()
    reduce_gradients(net, axis)
    return [reduced.detach(), *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("kind", ALONE)
def test_every_rank_has_the_output_and_the_gradient(group: Group, kind: str) -> None:
    x, net = make_input((T, 4, 6)), make()
    reduced = ALONE[kind](net(x))
    loss_of(reduced, kind).backward()
    expected = [reduced.detach(), *(p.grad for p in net.parameters())]
    for found in group(shared, x, kind, size=3):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def own_steps(axis: DeviceMesh, x: Tensor) -> list[Tensor]:
    """The mean of the losses of a rank's own steps."""
    net = shard_time(make(), axis)
    y = net(x[steps_of(T, axis.get_local_rank(), axis.size())])
    losses = torch.stack([F.cross_entropy(step, LABELS) for step in y])
    loss = distributed.mean_over_steps(losses, axis)
    loss.backward()
    reduce_gradients(net, axis)
    return [loss.detach(), *(p.grad for p in net.parameters())]


def test_losses_per_step(group: Group) -> None:
    x, net = make_input((T, 4, 6)), make()
    loss = torch.stack([F.cross_entropy(step, LABELS) for step in net(x)]).mean()
    loss.backward()
    expected = [loss.detach(), *(p.grad for p in net.parameters())]
    for found in group(own_steps, x, size=2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def of_a_whole_mesh(axis: DeviceMesh, x: Tensor) -> None:
    mesh = make_mesh(2, None, "cpu")
    calls = (distributed.mean_over_steps, distributed.last_step, gather_steps)
    for call in (*calls, lambda _, mesh: carry_state({}, mesh)):
        with pytest.raises(ValueError, match=r'not one axis of a mesh: pass mesh\["time"\]'):
            call(x, mesh)


def test_a_whole_mesh_raises(group: Group) -> None:
    group(of_a_whole_mesh, make_input((T, 4, 6)))


def data_and_time(axis: DeviceMesh, x: Tensor, ddp: bool) -> list[Tensor]:
    mesh = make_mesh(2, None, "cpu")
    net = shard_time(make(), mesh["time"])
    model = DistributedDataParallel(net) if ddp else net
    half = slice(0, 2) if mesh["data"].get_local_rank() == 0 else slice(2, 4)
    y = model(x[steps_of(T, mesh["time"].get_local_rank(), mesh["time"].size()), half])
    reduced = distributed.mean_over_steps(y, mesh["time"])
    F.cross_entropy(reduced, LABELS[half]).backward()
    if not ddp:
        reduce_gradients(net, mesh)
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("ddp", [False, True])
def test_data_and_time_together(group: Group, ddp: bool) -> None:
    x, net = make_input((T, 4, 6)), make()
    F.cross_entropy(net(x).mean(0), LABELS).backward()
    expected = [p.grad for p in net.parameters()]
    for found in group(data_and_time, x, ddp):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def data_parallel(axis: DeviceMesh, x: Tensor) -> list[Tensor]:
    """Gradients of the second step of a network without shared time."""
    net, rank = make(), axis.get_local_rank()
    model = DistributedDataParallel(net)
    for _ in range(2):
        net.zero_grad()
        model(x[:, rank : rank + 1]).square().mean().backward()
    return [p.grad for p in net.parameters()]


def test_data_parallel_gradients_equal_those_of_one_process(group: Group) -> None:
    x, net = make_input((T, SIZE, 6)), make()
    net(x).square().mean().backward()
    expected = [p.grad for p in net.parameters()]
    for found in group(data_parallel, x):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def streamed(axis: DeviceMesh, x: Tensor) -> Tensor:
    """Two sequences; the second one continues the first."""
    net, state, outputs = shard_time(make(), axis), None, []
    for part in (x[:3], x[3:]):
        mine = steps_of(len(part), axis.get_local_rank(), axis.size())
        y, state = net(part[mine], state=state, return_state=True)
        state = carry_state(state, axis)
        outputs.append(gather_steps(y.detach(), axis))
    return torch.cat(outputs)


def test_state_is_carried_to_the_next_sequence(group: Group) -> None:
    x = make_input((T, 4, 6))
    for found in group(streamed, x, size=3):
        torch.testing.assert_close(found, make()(x).detach())
