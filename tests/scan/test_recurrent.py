"""Recurrent scans: what backward replays, in chunks, and the products with the weight."""

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.scan import launch_numba, launch_triton, recurrent
from spikefuse.testing import DTYPES, ROUNDING
from tests.grid import on_grid
from tests.nn.recurrent_layers import Scaled, check_gradients, check_steps, layer, state_of


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_half_precision_gradients(dtype, backends):
    made = layer(sf.LIF(0.75), 32, backends.device)
    x = on_grid((9, 5, 32), backends.device).to(dtype)
    for impl in backends.impls:
        # Gradients of the weight and the input are rounded to the dtype, the chain is not.
        truncated = impl == "triton" and backends.device == "cpu"
        share = 8 if truncated else 4
        check_gradients(made, [x], None, impl, tolerance=share * ROUNDING[dtype])


@pytest.mark.parametrize("value", [float, lambda v: nn.Parameter(torch.tensor(v))])
def test_parameters_of_other_outputs_are_not_replayed(value, backends):
    made = layer(Scaled(value).to(backends.device), 20, backends.device)
    x = on_grid((7, 3, 20), backends.device)
    for impl in backends.impls:
        check_steps(made, [x], None, impl)
        check_gradients(made, [x], None, impl)


def test_starts_from_any_values(backends):
    """What is fed back before the first step need not be what a neuron sends."""
    made = layer(sf.LIF(0.75), 20, backends.device)
    x = on_grid((3, 5, 20), backends.device)
    sent = torch.arange(100).view(5, 20).to(x) / 1024 + 1  # not exact in bfloat16
    for impl in backends.impls:
        check_steps(made, [x], (torch.zeros_like(x[0]), sent), impl)
        check_gradients(made, [x], (torch.zeros_like(x[0]), sent), impl)


def test_backward_in_chunks(backends, monkeypatch):
    """Backward replays long sequences chunk by chunk: the gradients are the same to rounding."""
    made = layer(sf.PLIF(0.75, channels=20), 20, backends.device, heads=2)
    x = on_grid((11, 6, 20), backends.device)
    state = state_of(made.neuron, (6, 20), backends.device)
    for length in (1, 4):
        monkeypatch.setattr(recurrent, "CHUNK_VALUES", length * 6 * 20)
        for impl in backends.impls:
            check_gradients(made, [x], state, impl)
            check_gradients(made, [x], None, impl)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [4, 11])
def test_gradients_take_the_memory_of_currents_once(length, dtype, backends, monkeypatch):
    """The last backward through a graph overwrites what was saved; those before must not."""
    monkeypatch.setattr(recurrent, "CHUNK_VALUES", length * 6 * 20)
    made = layer(sf.ALIF(0.75, 0.75), 20, backends.device)
    x = on_grid((11, 6, 20), backends.device).to(dtype).requires_grad_()
    for impl in backends.impls:
        y = made(x, impl=impl)
        found = []
        for keep in (True, True, False):
            found.append(torch.autograd.grad(y.sum(), [x, made.weight], retain_graph=keep))
        for a, b, c in zip(*found, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)


@pytest.mark.parametrize("most", [0.0, 1.0])
def test_weight_gradients_of_sparse_and_dense_spikes(most, monkeypatch):
    """On a CPU, the weight gradient adds the rows of sparse spikes; a given start need not be 0 or
    1."""
    monkeypatch.setattr(launch_numba, "_SPARSE", most)
    made = layer(sf.LIF(0.75), 20, "cpu", heads=2)
    x = on_grid((9, 6, 20), "cpu")
    *states, spikes = state_of(made.neuron, (6, 20), "cpu")
    for start in (None, (*states, spikes), (*states, 0.5 * spikes)):
        check_gradients(made, [x], start, "numba")
    (grad,) = torch.autograd.grad(made(x).sum(), made.weight)
    assert grad.is_contiguous()  # as Inductor has been told


def test_several_tiles_of_weights(monkeypatch):
    """Triton's other way to multiply, in the interpreter: from memory, tile by tile."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu/test_recurrent.py runs it on a GPU")
    made = layer(sf.PLIF(0.75, channels=40), 40)
    x = on_grid((5, 18, 40))
    monkeypatch.setattr(launch_triton, "_division", lambda weight: (64, 16, 3, 1))
    check_steps(made, [x], None, "triton")
    check_gradients(made, [x], None, "triton")
    monkeypatch.setattr(launch_triton, "RESIDENT_BYTES", 0)
    check_steps(made, [x], None, "triton")
    check_gradients(made, [x], None, "triton")
