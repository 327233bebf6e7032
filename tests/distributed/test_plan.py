"""Plans against their equations, and against measured steps.

CPUs have no CUDA graphs: steps are timed as they are here.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import spikefuse as sf
from spikefuse.distributed import Plan, plan, shard_time, steps_of
from spikefuse.distributed.plan import ScanCost
from spikefuse.scan.execution import Execution
from spikefuse.testing import make_input
from tests.distributed.processes import Group

LAYER = ScanCost(scan=0.8, per_chunk=0.0, state_bytes=1000)


def measured(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "num_ranks": 4, "batch": 16, "fixed": 0.0, "scaled": 1.0, "layers": [LAYER],
        "latency": 0.01, "bandwidth": 1e5,
    }  # fmt: skip
    return Plan(**{**values, **changes})


def timed(run: Callable[[], object], repetitions: int = 5) -> float:
    seconds = []
    for _ in range(2 + repetitions):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])


def on_cpu(measure: Callable[[Callable[[], object]], float] = timed) -> Any:
    return mock.patch.multiple("spikefuse.distributed.plan", DEVICE="cpu", _measure=measure)


def test_equation_5() -> None:
    found = measured()
    assert found.exchange == pytest.approx(0.04)
    assert found.best_by_paper == pytest.approx(5.0)
    assert found.speedup_by_paper(1) == 1
    # T_s = 1, T_c = 0.04: 4 / (12 * 0.04 + 1)
    assert found.speedup_by_paper(4) == pytest.approx(4 / 1.48)


def test_sequential_scans_gain_only_by_chunks() -> None:
    found = measured(layers=[ScanCost(1.0, 0.0, 0)], latency=0.0)
    assert found.seconds(4, 1) == pytest.approx(1.0)
    assert found.seconds(4, 16) == pytest.approx(0.25 + 3 / 64)


def test_lags_overlap_unless_norms_synchronize_the_ranks() -> None:
    layers = [LAYER, ScanCost(0.4, 0.0, 1000)]
    free, held = measured(layers=layers), measured(layers=layers, barriers=2, barrier=0.01)
    assert free.seconds(2, 2) == pytest.approx(0.5 + 0.2 + 0.02 + 0.01)
    assert held.seconds(2, 2) == pytest.approx(0.5 + 0.2 + 0.1 + 2 * 0.03 + 0.02)


def test_chunks_have_a_cost() -> None:
    free, dear = measured(latency=0.0), measured(latency=0.0, layers=[ScanCost(0.8, 0.02, 0)])
    assert free.options[-1].chunks == 16
    assert dear.options[-1].chunks < 16


def test_speculative_ranks_lag_by_a_repair() -> None:
    early = ScanCost(0.8, 0.02, 1000, repair=0.03)
    found = measured(layers=[early, early])
    lag = 0.03 + 2 * (0.01 + 0.01)
    assert found.seconds(4, 1) == pytest.approx(0.25 + 3 * lag + 2 * 0.03)
    halves = 0.03 + 2 * (0.01 + 0.005)
    assert found.seconds(4, 2) == pytest.approx(0.25 + 3 * halves + 2 * (0.02 + 2 * 0.03))
    assert (found.options[-1].chunks, found.options[-1].speculate) == (1, True)
    waiting = 0.25 + 3 * (0.8 / 64 + 0.02 + 0.02125) + 15 * 2 * 0.02
    assert found.seconds(4, 16, speculate=False) == pytest.approx(waiting)
    late = measured(layers=[ScanCost(0.08, 0.0, 1000, repair=0.2)])
    assert not late.options[-1].speculate


def test_speculation_is_recommended_only_where_kernels_support_it() -> None:
    assert [option.speculate for option in measured().options] == [False] * 3
    early = measured(layers=[ScanCost(0.8, 0.0, 1000, repair=0.001)]).options
    assert [(option.time, option.speculate) for option in early if option.time == 1] == [(1, False)]
    assert all(option.speculate for option in early if option.time > 1)


def test_report() -> None:
    found = measured()
    assert found.best is min(found.options, key=lambda option: option.seconds)
    assert str(found).count("<- best") == 1
    assert len(str(found).splitlines()) == 2 + len(found.options)


def repair(axis: DeviceMesh, backend: str) -> float:
    """The cost of a repair by the kernels of one backend."""
    x = make_input((16, 2, 4))
    with (
        mock.patch("spikefuse.nn.neuron.backend_of", return_value=backend),
        mock.patch("spikefuse.distributed.plan.CHUNKS", 1),
        on_cpu(partial(timed, repetitions=1)),
    ):
        (layer,) = plan(sf.Temporal(sf.LIF()), x, axis).layers
    return layer.repair


def test_repairs_are_measured_where_kernels_support_them(group: Group) -> None:
    assert all(0 <= found < math.inf for found in group(repair, "triton", size=2))
    assert group(repair, "numba", size=2) == [math.inf, math.inf]


def slow(method, seconds: float):
    """A kernel whose time is proportional to neurons and steps, and so long that the time of the
    Python around it does not count, on a slow machine either."""

    def wrapper(call: Execution, *args, **more):
        time.sleep(seconds * call.layout.num_steps * call.layout.num_neurons)
        return method(call, *args, **more)

    return wrapper


class Slow(nn.Module):
    """A layer without state, which takes time in its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(1.5e-3 * len(x))
        return 2 * x


def predicted_and_measured(axis: DeviceMesh) -> list[tuple[float, float]]:
    def make() -> sf.Temporal:
        return sf.Temporal(nn.Sequential(*(m for _ in range(3) for m in (Slow(), sf.LIF()))))

    x = make_input((16, 8, 4))
    found = []
    with (
        mock.patch.object(Execution, "forward", slow(Execution.forward, 6e-4)),
        mock.patch.object(Execution, "backward", slow(Execution.backward, 3e-4)),
    ):
        with on_cpu(partial(timed, repetitions=1)):
            prediction = plan(make(), x, axis)
        for chunks in (1, 4):
            net = shard_time(make(), axis, chunks)
            times = []  # of which a busy machine may lengthen all but the shortest
            for _ in range(3):
                part = x[steps_of(16, axis.get_local_rank(), axis.size())].requires_grad_()
                torch.distributed.barrier(axis.get_group())
                start = time.perf_counter()
                net(part).sum().backward()
                torch.distributed.barrier(axis.get_group())
                times.append(time.perf_counter() - start)
            found.append((prediction.seconds(axis.size(), chunks), min(times)))
    return found


def test_predictions_match_measurements(group: Group) -> None:
    shortest = [(math.inf, math.inf)] * 2
    for attempts_left in (5, 4, 3, 2, 1, 0):  # a busy machine lengthens some times
        rows = group(predicted_and_measured, size=4)[0]
        pairs = zip(shortest, rows, strict=True)
        shortest = [(min(a, c), min(b, d)) for (a, b), (c, d) in pairs]
        wrong = [row for row in shortest if row[0] != pytest.approx(row[1], rel=0.15)]
        assert not wrong or attempts_left, wrong
        if not wrong:
            break


def planned(axis: DeviceMesh) -> list[tuple[Plan, list[str]]]:
    """Plans of a network with a residual, unfused and fused, and its neurons' attributes after."""
    x, found = make_input((8, 4, 3)), []
    for fuse in (lambda net: net, sf.fuse):
        net = fuse(sf.Temporal(Residual()))
        with on_cpu():
            made = plan(net, x, axis)
        found.append((made, [name for m in net.neurons().values() for name in vars(m)]))
        y = shard_time(net, axis)(x[steps_of(8, axis.get_local_rank(), axis.size())])
        assert y.shape == (8 // axis.size(), 4, 5)
    assert len(net.fusion.fused) == 1
    return found


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear, self.norm = sf.ALIF(), nn.Linear(3, 5), nn.BatchNorm1d(5)
        self.short, self.last = nn.Linear(3, 5), sf.LIF()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.norm(self.linear(x)) + self.short(x))


def test_a_fused_network_has_the_same_layers(group: Group) -> None:
    for answer in group(planned, size=2):
        for made, left in answer:
            # Two states of 4 x 3, and one of 4 x 5.
            assert [layer.state_bytes for layer in made.layers] == [4 * 2 * 12, 4 * 20]
            assert all(layer.scan > 0 for layer in made.layers)
            assert made.barriers == 1
            assert "call" not in left


def refused(axis: DeviceMesh) -> None:
    x = make_input((4, 2, 3))
    with pytest.raises(ValueError, match="sharded already"):
        plan(shard_time(sf.Temporal(sf.LIF()), axis), x, axis)
    with pytest.raises(ValueError, match="example is on cpu: CUDA graphs need a CUDA GPU"):
        plan(sf.Temporal(sf.LIF()), x, axis)
    with pytest.raises(ValueError, match="a plan needs two ranks, and a step for each"):
        plan(sf.Temporal(sf.LIF()), x[:1], axis)


def test_invalid_plans_raise(group: Group) -> None:
    group(refused, size=2)


def held(axis: DeviceMesh) -> bool:
    """Whether a plan keeps its example alive."""
    x = make_input((4, 2, 6))
    there = weakref.ref(x)
    with on_cpu():
        made = plan(sf.Temporal(nn.Sequential(nn.Linear(6, 6), sf.LIF())), x, axis)
    del x
    return made.whole > 0 and there() is not None


def test_a_plan_references_no_tensors(group: Group) -> None:
    assert group(held, size=2) == [False, False]
