"""Which scans share an execution, and what an execution allocates and writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.compiler.emit_triton import LONGEST, chunk
from spikefuse.kernels import bits
from spikefuse.kernels.triton_runtime import TritonLaunch
from spikefuse.scan import launch_triton
from spikefuse.scan.execution import (
    REPAIR,
    Execution,
    execution_for,
    execution_of,
)
from spikefuse.scan.kinds import kinds_of
from spikefuse.scan.op import choose
from spikefuse.scan.program import prepare
from spikefuse.scan.records import Arguments, Results, Wanted
from spikefuse.testing import DTYPES, make_input

X = make_input((20, 2, 6))


def execution(
    *inputs: Tensor, neuron: sf.Neuron | None = None, backend: str = "numba"
) -> Execution:
    neuron = sf.LIF() if neuron is None else neuron
    values, statics = neuron.values(), neuron.description().statics
    return execution_of(prepare(neuron, backend, statics, kinds_of(values)).name, inputs)


def test_executions_are_shared_across_values():
    assert execution(X) is execution(2 * X)
    assert execution(X) is execution(X, neuron=sf.LIF(0.25, 2.0))


def test_what_a_compiled_graph_needs_is_unknown_in_its_forward_pass():
    net = sf.Temporal(nn.Sequential(nn.Linear(6, 6), sf.LIF()))
    execution_for.cache_clear()
    torch.compile(net, backend="aot_eager")(X).sum().backward()
    assert not execution(X).is_ahead
    net(X).sum().backward()
    assert execution(X).is_ahead


@pytest.mark.parametrize(
    "other",
    [X[1:], X[:, 1:], X.bfloat16(), X.transpose(1, 2), X[:, :1].expand(20, 2, 6), X.to("meta")],
    ids=["steps", "batch", "dtype", "order", "strides", "device"],
)
def test_executions_differ_by_layout_dtype_and_device(other):
    assert execution(X) is not execution(other)


def test_allocations_of_a_call():
    made = execution(X.bfloat16())
    outputs, finals, saved, bits, binary = made.new_results(Wanted(final=True))
    assert [(t.shape, t.dtype) for t in outputs] == [(X.shape, torch.bfloat16)]
    assert [(t.shape, t.dtype) for t in finals] == [(X.shape[1:], torch.float32)]
    assert [(list(t.shape), t.dtype) for t in saved] == [([1, 12], torch.float32)]
    assert (bits, binary) == ([], (True,))
    assert made.new_results(Wanted(save=False))[1:4] == ([], [], [])
    needs = Arguments([True], [True], [True, False, True])
    grads, starts, (first, none, last), *_ = made.new_gradients(needs)
    assert none is None
    sums = first, last
    assert [(t.shape, t.dtype) for t in grads] == [(X.shape, torch.bfloat16)]
    assert [t.shape for t in starts] == [X.shape[1:]]
    assert [(list(t.shape), t.dtype) for t in sums] == 2 * [([1], torch.float64)]
    by_channel = execution(X, neuron=sf.PLIF(channels=6))
    assert by_channel.new_gradients(needs).params[0].shape == (6,)


def test_a_short_sequence_saves_no_states():
    outputs, finals, saved, *_ = execution(X[:1]).new_results(Wanted(final=True))
    assert (len(outputs), len(finals), saved) == (1, 1, [])


@pytest.mark.parametrize(("decay", "most"), [(0.5, 40), (1.0, 200)])
def test_a_repair_ends_where_the_states_agree(backends, decay, most):
    """A neuron that never fires forgets its first state by its leak, or never."""
    x = torch.full((200, 2, 64), 0.25, device=backends.device)
    name, values, _ = choose(sf.LIF(decay, 1e9), x, Wanted(impl="triton"))
    made = execution_of(name, [x])
    rest, moved = (Arguments([x], start, scalars=values) for start in (None, [4 * x[0]]))
    results = made.forward(rest, made.new_results(Wanted(final=True)))
    outputs, finals, saved, *_ = results
    before = finals[0].clone()
    outputs[0].fill_(7)
    made.forward(moved, results, repair=True)
    num_written = int((outputs[0] == 0).flatten(1).all(1).sum())
    assert (outputs[0][:num_written] == 0).all()
    assert (outputs[0][num_written:] == 7).all()
    assert 8 <= num_written <= most
    assert (num_written == 200) == (decay == 1.0) == (not torch.equal(finals[0], before))

    grads = made.new_gradients(Arguments([True], [True]))
    made.backward(moved, saved, Results([x]), grads)
    grads.inputs[0].fill_(0)
    made.backward(moved, saved, Results((), [x[0]]), grads, REPAIR)
    assert grads.inputs[0][-8:].all()
    assert bool(grads.inputs[0].all()) == (decay == 1.0)


def test_gradients_in_any_layout(backends):
    neuron = sf.PLIF(channels=6, threshold=0.3)
    x = X.to(backends.device).requires_grad_()
    leaves = [x, *neuron.to(backends.device).parameters()]
    gradient = make_input(X.shape, device=backends.device, seed=1)
    orders = [
        gradient,
        gradient.transpose(0, 2).contiguous().transpose(0, 2),
        gradient.repeat(1, 1, 2)[..., :6],
        gradient,
    ]
    for impl in backends.impls:
        results = [torch.autograd.grad(neuron(x, impl=impl), leaves, g) for g in orders]
        for found in results[1:]:
            assert all(map(torch.equal, found, results[0]))
        sums = torch.autograd.grad(neuron(x, impl=impl).sum(), leaves)
        ones = torch.autograd.grad(neuron(x, impl=impl), leaves, torch.ones_like(x))
        assert all(map(torch.equal, sums, ones))


def test_chunk_sizes():
    """A new T compiles at most one of LONGEST kernels."""
    for T in range(1, 200):
        K = chunk(T)
        assert 1 <= K <= LONGEST
        assert -(-T // K) == -(-T // LONGEST), "no more chunks than of the longest"
        assert -T % K < -(-T // K), "less than a step of each chunk is left over"


@pytest.mark.parametrize("many", [1, 1 << 20])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 10, 19])
def test_bits_are_written_with_the_spikes(monkeypatch, backends, dtype, T, many):
    """By several thread blocks, with neurons that are many and that are few."""
    if "triton" not in backends.impls:
        pytest.skip("Triton's kernels write bits")
    monkeypatch.setattr(launch_triton, "MANY", many)
    execution_for.cache_clear()
    neuron = sf.LIF(0.5, 0.3)
    x = make_input((T, 3, 16, 25), device=backends.device, dtype=dtype).transpose(2, 3)
    made = execution(x, neuron=neuron, backend="triton")
    scalars = [neuron.values()[name] for name in made.program.step.params]
    arguments = Arguments([x], scalars=scalars)
    wanted = Wanted(bits=True, save=False), Wanted(save=False)
    (spikes,), _, _, (packed,), _ = made.forward(arguments, made.new_results(wanted[0]))
    (plain,), *_ = made.forward(arguments, made.new_results(wanted[1]))
    assert torch.equal(spikes, plain)
    assert 0 < spikes.mean(dtype=torch.float32) < 1
    assert torch.equal(packed, bits.pack(spikes).bits)


def test_bits_are_not_written_where_steps_share_bytes(backends):
    if "triton" not in backends.impls:
        pytest.skip("Triton's kernels write bits")
    x = make_input((4, 3, 5), device=backends.device)
    assert not execution(x, backend="triton").packs
    assert not execution(make_input((4, 3, 16)), backend="numba").packs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_compiled_ahead_are_those_launched(dtype, monkeypatch):
    pytest.importorskip("triton")
    asked: dict[str, list[Any]] = {"compile_ahead": [], "__call__": []}

    def note(method: str) -> Any:
        def call(launch: TritonLaunch, *groups: Any) -> None:
            kinds = [x.dtype if isinstance(x, Tensor) else x for group in groups for x in group]
            asked[method].append((launch.kernel, launch.integers, launch.options, kinds))

        return call

    for method in asked:
        monkeypatch.setattr(TritonLaunch, method, note(method))
    x = make_input((20, 2, 16), dtype)
    execution_for.cache_clear()
    made = execution(x, backend="triton")
    arguments = Arguments([x], scalars=[0.5] * len(made.program.step.params))
    wanted, needs = Wanted(bits=True), Arguments([True])
    made.device = torch.device("meta")  # a CPU compiles nothing ahead
    assert made.is_new
    made.compile_forward(arguments, wanted)
    made.device = x.device
    results = made.forward(arguments, made.new_results(wanted))
    made.device = torch.device("meta")
    made.compile_backward(arguments, results, needs)
    made.device = x.device
    incoming = Results(results.outputs)
    made.backward(arguments, results.saved, incoming, made.new_gradients(needs))
    unpacking, *ahead = asked["compile_ahead"]
    assert unpacking[3] == [torch.uint8, dtype]
    assert len(ahead) == 2
    assert ahead == asked["__call__"]
    assert not made.is_new


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (6,)])
def test_parameters_in_half_precision(shape, dtype, backends):
    """Numba's kernels read a copy in float32, and Triton's convert what they read."""
    x, neuron = make_input((20, 2, 6), dtype, backends.device), sf.LIF()
    decay = (0.5 + torch.arange(6) / 16)[: 6 if shape else 1].view(shape).to(backends.device)
    for impl in backends.impls:
        found = []
        for kind in (dtype, torch.float32, dtype):
            neuron.decay = nn.Parameter(decay.to(kind))
            leaf = x.clone().requires_grad_()
            y, (v,) = neuron(leaf, return_state=True, impl=impl)
            gradients = torch.autograd.grad((y * x).sum() + v.sum(), [leaf, neuron.decay])
            found.append([y, v, *(g.to(dtype) for g in gradients)])
        assert all(map(torch.equal, found[0] + found[2], found[1] + found[1]))
        arguments = Arguments([x], params=[neuron.decay], scalars=[1.0, 0.0, 4.0])
        values = execution(x, neuron=neuron, backend=impl).values(arguments)
        assert any(value is neuron.decay for value in values) == (impl == "triton")
