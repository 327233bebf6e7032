"""Batch norms that share statistics between processes equal those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import spikefuse as sf
from spikefuse.distributed import shard_time, steps_of
from spikefuse.nn.encode import direct
from spikefuse.testing import lay_out, make_input
from tests.distributed.processes import SIZES, Group

T = 8


def make(momentum: float | None = 0.1, affine: bool = True) -> sf.Temporal:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, momentum=momentum, affine=affine)
    if affine:
        nn.init.uniform_(norm.weight)
        nn.init.uniform_(norm.bias)
    return sf.Temporal(
        nn.Sequential(nn.Conv2d(2, 3, 3), norm, sf.LI(0.5), nn.Flatten(), nn.Linear(12, 4),
                      nn.BatchNorm1d(4, momentum=momentum))
    )  # fmt: skip


def train(net: nn.Module, x: Tensor, mine: slice, num_steps: int) -> list[Tensor]:
    """Output, gradients and running statistics after two training calls, and an evaluation."""
    leaf = x[mine].detach().requires_grad_(x.stride(0) > 0)
    for scale in (1.0, 2.0):
        y = net(scale * leaf)
        weights = torch.sin(torch.arange(float(num_steps * y[0].numel())))
        (y * weights.view(num_steps, *y.shape[1:])[mine]).sum().backward()
    grads = [p.grad for p in net.parameters()] + [leaf.grad] * leaf.requires_grad
    return [y.detach(), *net.buffers(), net.eval()(leaf).detach(), *grads]


def shared(axis: DeviceMesh, x: Tensor, statistics: str, *how: Any) -> list[Tensor]:
    net = shard_time(make(*how), axis, statistics=statistics)
    return train(
        copy.deepcopy(net), x, steps_of(len(x), axis.get_local_rank(), axis.size()), len(x)
    )


def assert_equals_one(found: list[list[Tensor]], expected: list[Tensor], x: Tensor) -> None:
    net = make()
    num_buffers = len(list(net.buffers()))
    end = len(expected) if x.stride(0) == 0 else len(expected) - 1
    for i, wanted in enumerate(expected):
        parts = [tensors[i] for tensors in found]
        if i in (0, num_buffers + 1, end):  # one part per rank
            parts = [torch.cat(parts)]
        elif i > num_buffers:  # summed over the steps
            parts = [torch.stack(parts).sum(0)]
        for part in parts:
            scale = max(wanted.abs().max().item(), 1.0)
            torch.testing.assert_close(part, wanted, rtol=2e-5, atol=2e-5 * scale)


@pytest.mark.parametrize("size", [2, SIZES[-1]])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_exact_statistics_equal_one_process(group: Group, size: int, layout: str) -> None:
    x = lay_out(make_input((T, 3, 2, 4, 4)), layout) + 1
    assert_equals_one(group(shared, x, "exact", size=size), train(make(), x, slice(None), T), x)


def test_cumulative_average(group: Group) -> None:
    x = make_input((T, 3, 2, 4, 4))
    expected = train(make(None), x, slice(None), T)
    assert_equals_one(group(shared, x, "exact", None, size=2), expected, x)


def test_constant_input(group: Group) -> None:
    x = direct(make_input((1, 3, 2, 4, 4))[0], T)
    expected = train(make(), x, slice(None), T)
    # With 4 ranks one of them has a single step, which is not constant input.
    assert_equals_one(group(constant, x, size=4), expected, x)


def constant(axis: DeviceMesh, x: Tensor) -> list[Tensor]:
    return shared(axis, x[:1].expand(x.shape), "exact")


def test_statistics_per_shard(group: Group) -> None:
    x = make_input((T, 3, 2, 4, 4)) + torch.arange(8.0).view(T, 1, 1, 1, 1)
    found = group(shared, x, "shard", size=2)
    nets = [make(), make()]
    for net, mine in zip(nets, (slice(0, 4), slice(4, 8)), strict=True):
        net.net[0].requires_grad_(False)
        for scale in (1.0, 2.0):
            net.net[1](net.net[0]((scale * x[mine]).flatten(0, 1)))
    for i, name in enumerate(("running_mean", "running_var")):
        mean = torch.stack([getattr(net.net[1], name) for net in nets]).mean(0)
        for tensors in found:
            torch.testing.assert_close(tensors[1 + i], mean)


def test_state_dict_names_are_preserved(group: Group) -> None:
    assert group(names, size=2)[0] == list(make().state_dict())


def names(axis: DeviceMesh) -> list[str]:
    return list(shard_time(make(), axis).state_dict())
