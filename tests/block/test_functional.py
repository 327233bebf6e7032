"""Blocks as functions: library ops, returned sums, statistics, state passing."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse import reference
from spikefuse.block.definition import Kind, with_batch_norm
from spikefuse.block.functional import Norm, norm_statistics, run_block
from spikefuse.block.program import BlockProgram, prepare_block
from spikefuse.kernels.bits import pack
from spikefuse.kernels.running import Running
from spikefuse.neurons.definition import with_outputs
from spikefuse.scan import op
from spikefuse.scan.program import program
from spikefuse.scan.records import Arguments, Results, Wanted
from spikefuse.testing import DTYPES, make_input
from tests.queues import Queues

SHAPE = (19, 3, 6, 8)


def arguments_of(block: BlockProgram, neuron: sf.Neuron, *inputs: Tensor) -> Arguments[Tensor]:
    values = neuron.values()
    own, floats = [values[n] for n in block.own], [values[n] for n in block.own_floats]
    return Arguments(inputs, params=own, scalars=floats)


def norms_of(inputs: tuple[Tensor, ...], count: int, backend: str, leaves: bool) -> list[Norm]:
    """Norms with weights and biases, which may be leaves, and the statistics of the inputs."""
    norms = []
    for i, x in enumerate(inputs[:count]):
        weight, bias = (make_input((6,), device=x.device, seed=5 + 2 * i + j) for j in range(2))
        weight, bias = (weight + 1).requires_grad_(leaves), (bias / 4).requires_grad_(leaves)
        statistics = norm_statistics(x.detach(), weight, 1e-5, Running(), backend)
        norms.append(Norm(weight, bias, 1e-5, statistics))
    return norms


def normalized(x: Tensor, norm: Norm) -> Tensor:
    """`x` by PyTorch's batch norm."""
    y = nn.functional.batch_norm(x.flatten(0, 1), None, None, norm.weight, norm.bias, True)
    return y.unflatten(0, x.shape[:2])


@pytest.mark.parametrize("neuron", [sf.LIF(), sf.PLIF(channels=6)], ids=lambda n: type(n).__name__)
@pytest.mark.parametrize(("affine", "num_norms"), [(True, 1), (False, 1), (True, 2)])
def test_opcheck(neuron, affine, num_norms):
    inputs = tuple(make_input((20, 2, 6), seed=i).requires_grad_() for i in range(2))
    state = make_input((2, 6), seed=2).requires_grad_()
    block = prepare_block(neuron, "numba", Kind(True, True, num_norms == 2))
    values = neuron.values()
    weights = [torch.rand(6, requires_grad=True) for _ in range(num_norms)] if affine else []
    shift = torch.rand(6, requires_grad=affine)
    statistics = [
        torch.ops.spikefuse.norm_statistics(x.detach(), weight, 1e-5, "numba")[0].detach()
        for x, weight in zip(inputs, weights or [None], strict=False)
    ]
    own = [values[name].detach().requires_grad_() for name in block.own]
    groups = [[*inputs], [state], own, [shift, *statistics, *weights]]
    scalars = [values[name] for name in block.own_floats]
    torch.library.opcheck(
        torch.ops.spikefuse.block.default, (block.name, *groups, scalars, True, True)
    )
    needed = [t.requires_grad for group in groups for t in group]
    groups = [[t.detach() for t in group] for group in groups]
    call = block.name, *groups, scalars
    y, v, *saved = torch.ops.spikefuse.block(*call, True, True)
    for flags in (needed, [False, True, False, *needed[3:]]):
        arguments = *call, saved, [y, v], flags
        torch.library.opcheck(torch.ops.spikefuse.block_backward.default, arguments)


@pytest.mark.parametrize("outputs", [(), ("spikes", "v")])
@pytest.mark.parametrize("num_norms", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_returned_sums(backends, dtype, num_norms, outputs):
    """The neuron reads the sum in float32, other readers the sum rounded to the dtype of the
    inputs: spikes equal those of a block that returns no sum."""
    residual, count = num_norms > 0, max(num_norms, 1)
    for backend in backends.impls:
        inputs = tuple(
            make_input(SHAPE, dtype, backends.device, seed=i) for i in range(1 + residual)
        )
        neuron = sf.PLIF(0.6, 0.3, channels=6).to(backends.device)
        norms = norms_of(inputs, count, backend, leaves=False)
        kind = Kind(residual, True, num_norms == 2)
        found = []
        for returns_sum in (False, True):
            block = prepare_block(neuron, backend, kind._replace(returns_sum=returns_sum), outputs)
            given = arguments_of(block, neuron, *inputs)
            found.append(run_block(block.name, given, norms, Wanted(True)))
        without, (*rest, total) = found[0].outputs, found[1].outputs
        assert all(map(torch.equal, without, rest))
        assert all(map(torch.equal, found[0].finals, found[1].finals))
        assert found[1].binary == (*found[0].binary, False)
        assert total.dtype == dtype
        values = [v for norm in norms for v in norm.statistics.values[:2]]
        values.insert(2, sum(norm.bias for norm in norms))
        definition = with_batch_norm(
            with_outputs(neuron, outputs), values, kind._replace(by_batch=False, returns_sum=True)
        )
        (*expected, u), _ = reference.scan(definition, tuple(x.float() for x in inputs))
        truncated = backend == "triton" and dtype == torch.bfloat16 and backends.device == "cpu"
        if not truncated:  # as Triton's interpreter does
            assert torch.equal(total, u.to(dtype))
        assert torch.equal(rest[0].float(), expected[0])


@pytest.mark.parametrize("num_norms", [0, 1, 2])
def test_gradients_of_returned_sums(backends, num_norms):
    residual, count = num_norms > 0, max(num_norms, 1)
    for backend in backends.impls:
        inputs = tuple(
            make_input(SHAPE, device=backends.device, seed=i).requires_grad_()
            for i in range(1 + residual)
        )
        neuron = sf.PLIF(0.6, 0.3, channels=6).to(backends.device)
        norms = norms_of(inputs, count, backend, leaves=True)
        block = prepare_block(neuron, backend, Kind(residual, True, num_norms == 2, True))
        y, total = run_block(
            block.name, arguments_of(block, neuron, *inputs), norms, Wanted()
        ).outputs
        u = sum(normalized(x, norm) for x, norm in zip(inputs, norms, strict=False))
        u = u + sum(inputs[count:])
        alike = y == neuron(u, impl="reference")
        assert alike.float().mean() > 0.99
        weights = [make_input(SHAPE, device=backends.device, seed=i) for i in (7, 8)]
        keep = alike.all(0)
        parameters = [p for norm in norms for p in (norm.weight, norm.bias)]
        leaves = [*inputs, *parameters, *neuron.parameters()]
        rows = (y, total), (neuron(u, impl="reference"), u)
        actual, expected = (
            torch.autograd.grad((a * weights[0] * keep + b * weights[1]).sum(), leaves)
            for a, b in rows
        )
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_a_block_for_a_scan_of_which_only_the_program_is_known():
    """A program keeps no tensors of the neuron, nor its hooks."""
    neuron = sf.PLIF(0.6, 0.3, channels=6)
    neuron.register_forward_hook(lambda *_: None)
    x = make_input(SHAPE)
    name, scalars, params = op.choose(neuron, x, Wanted(outputs=("spikes", "v"), impl="numba"))
    definition = program(name).definition
    assert not [*definition.parameters(), *definition.buffers()]
    assert not definition._forward_hooks
    block = prepare_block(definition, "numba", Kind())
    assert block.name == prepare_block(neuron, "numba", Kind(), ("spikes", "v")).name
    own, floats = block.select(name, params, scalars)
    norms = norms_of((x,), 1, "numba", leaves=False)
    found = run_block(block.name, Arguments([x], params=own, scalars=floats), norms, Wanted())
    expected = neuron(normalized(x, norms[0]), outputs=("spikes", "v"))
    torch.testing.assert_close(found.outputs, [*expected])


def test_statistics_of_one_step_that_is_repeated(backends):
    """The running variance is that of T n values: the biased one times T n / (T n - 1)."""
    x = make_input((1, 3, 6, 4), device=backends.device)
    for backend in backends.impls:
        norm = nn.BatchNorm1d(6, momentum=0.3).to(backends.device)
        norm(x.expand(7, -1, -1, -1).flatten(0, 1))
        mean, variance = (torch.full((6,), v, device=backends.device) for v in (0.0, 1.0))
        running = Running(mean, variance, None, 0.3)
        found = norm_statistics(x.expand(7, -1, -1, -1), None, norm.eps, running, backend)
        torch.testing.assert_close(mean, norm.running_mean)
        torch.testing.assert_close(variance, norm.running_var)
        torch.testing.assert_close(found.values[0], x.mean((0, 1, 3)))


def run_one(
    block: BlockProgram, neuron: sf.Neuron, norm: Norm, x: Tensor, passing: Queues | None = None
) -> Results[Tensor]:
    arguments = arguments_of(block, neuron, x)._replace(passing=passing)
    return run_block(block.name, arguments, [norm], Wanted(save=False))


@pytest.mark.parametrize("by_batch", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_blocks_of_two_processes_equal_one(backends, count, by_batch):
    x, at = make_input((37, 6, 6, 4), device=backends.device), 20
    weights = make_input(x.shape, device=backends.device, seed=1)
    for backend in backends.impls:
        neuron = sf.PLIF(0.6, 0.3, channels=6).to(backends.device)
        (norm,) = norms_of((x,), 1, backend, leaves=True)
        assert norm.statistics is not None
        values = norm.statistics.values
        if not by_batch:
            norm = norm._replace(statistics=None, mean=values[0], variance=values[3])
        block = prepare_block(neuron, backend, Kind(by_batch=by_batch))
        leaves = [norm.weight, norm.bias, *neuron.parameters()]
        whole = x.clone().requires_grad_()
        (y,) = run_one(block, neuron, norm, whole).outputs
        expected = torch.autograd.grad((y * weights).sum(), [whole, *leaves])
        forth, back = deque[Tensor](), deque[Tensor]()
        halves = [x[:at].clone().requires_grad_(), x[at:].clone().requires_grad_()]
        outputs = []
        for half, is_first in zip(halves, (True, False), strict=True):
            passing = Queues(is_first, forth, back, count)
            outputs += run_one(block, neuron, norm, half, passing).outputs
        assert torch.equal(torch.cat(outputs), y)
        if by_batch:  # without collectives, the statistics are constants of each half
            continue
        parts = [
            torch.autograd.grad((outputs[i] * weights[part]).sum(), [halves[i], *leaves])
            for i, part in ((1, slice(at, None)), (0, slice(at)))
        ]
        (late, *of_late), (early, *of_early) = parts
        actual = [torch.cat([early, late]), *map(torch.add, of_early, of_late)]
        torch.testing.assert_close(actual, [*expected], rtol=1e-5, atol=1e-4)


def test_bits(backends):
    if "triton" not in backends.impls:
        pytest.skip("Triton's kernels write bits")
    x = make_input((7, 3, 6, 16), device=backends.device)
    norms = norms_of((x,), 1, "triton", leaves=True)
    block = prepare_block(sf.LIF(), "triton", Kind(returns_sum=True))
    arguments = arguments_of(block, sf.LIF(), x.requires_grad_())
    (y, _), _, _, (bits,), binary = run_block(block.name, arguments, norms, Wanted(bits=True))
    assert torch.equal(bits, pack(y).bits)
    assert binary == (True, False)
