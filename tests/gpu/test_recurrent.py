"""Recurrent layers whose heads several programs of a GPU share, and what only a GPU does."""

import gc

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.scan import launch_triton, recurrent
from spikefuse.testing import DTYPES
from tests.grid import on_grid
from tests.nn.recurrent_layers import (
    check_gradients,
    check_steps,
    inputs_of,
    layer,
    network,
    state_of,
)


def blocks(made, dtype):
    return launch_triton._division(made.effective_weight((torch.empty(0, dtype=dtype),)))[-1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("features", "heads"), [(256, 1), (512, 1), (600, 1), (1024, 1), (1040, 2)]
)
def test_programs_that_share_a_head(features, heads, dtype):
    made = layer(sf.ALIF(0.75, 0.75), features, "cuda", heads=heads)
    assert (blocks(made, torch.float32) > 1) is True
    x = on_grid((6, 35, features), "cuda").to(dtype)
    state = state_of(made.neuron, (35, features), "cuda")
    check_steps(made, [x], state, "triton")
    if dtype == torch.float32:
        check_gradients(made, [x], state, "triton")
        check_gradients(made, [x], None, "triton")


def test_more_tasks_than_programs():
    """Groups of programs compute tile after tile, since all of them must run at the same time."""
    # No sum of multiples of 1/64 comes near this threshold.
    made = layer(sf.PLIF(0.75, threshold=1.01, channels=512), 512, "cuda")
    x = on_grid((3, 16 * 40, 512), "cuda")
    check_steps(made, [x], None, "triton")
    check_gradients(made, [x], None, "triton", tolerance=1e-4)


def test_more_programs_than_multiprocessors(monkeypatch):
    """A head that cannot be divided among few multiprocessors gets larger parts."""
    made = layer(sf.LIF(0.75), 512, "cuda")
    x = on_grid((4, 20, 512), "cuda")
    wanted = made(x)
    monkeypatch.setattr(launch_triton, "multiprocessors", lambda device: 4)
    assert blocks(made, torch.float32) == 4
    assert torch.equal(made(x), wanted)
    check_gradients(made, [x], None, "triton")


@pytest.mark.parametrize("features", [64, 512])
def test_weights_that_do_not_fit(features, monkeypatch):
    made = layer(sf.LIF(0.75), features, "cuda")
    x = on_grid((5, 20, features), "cuda")
    monkeypatch.setattr(launch_triton, "RESIDENT_BYTES", 0)
    check_steps(made, [x], None, "triton")
    check_gradients(made, [x], None, "triton")


@pytest.mark.parametrize("features", [128, 512])
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("length", [4, 10])
def test_cuda_graph(features, dtype, length, monkeypatch):
    monkeypatch.setattr(recurrent, "CHUNK_VALUES", length * 32 * features)
    made = layer(sf.LIF(0.75), features, "cuda")
    x = on_grid((10, 32, features), "cuda").to(dtype).requires_grad_()

    def step():
        y = made(x)
        return y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, made.weight])

    wanted = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(3):
        graph.replay()
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b)


def test_long_sequences_do_not_hang():
    """Thousands of meetings of all programs, and two launches one after the other."""
    made = layer(sf.LIF(0.75), 512, "cuda")
    x = on_grid((2000, 128, 512), "cuda").to(torch.bfloat16)
    with torch.no_grad():
        first, second = made(x), made(x)
    assert torch.equal(first, second)


def test_well_conditioned_sequence_equals_the_reference():
    made = layer(sf.LIF(0.75), 300, "cuda")
    (x,) = inputs_of(made.neuron, (50, 33, 300), torch.float32, "cuda")
    assert torch.equal(made(x), made(x, impl="reference"))
    assert 0.01 < made(x).mean() < 0.5


def test_peak_memory(monkeypatch):
    """Outputs and currents are whole sequences. States are not, and the gradient of the input takes
    the memory of the currents."""
    made = layer(sf.LIF(0.75), 256, "cuda")
    x = torch.randn(50, 64, 256, device="cuda", requires_grad=True)
    grad = torch.randn_like(x)
    monkeypatch.setattr(recurrent, "CHUNK_VALUES", 5 * 64 * 256)

    def peak(impl):
        gc.collect()  # else what earlier tests left may be freed meanwhile
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(made(x, impl=impl), [x, made.weight], grad)
        return torch.cuda.max_memory_allocated() - before

    peak("triton"), peak("reference")
    assert peak("triton") < 0.65 * peak("reference")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules that Inductor imports
@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_inductor():
    net, x = network().cuda(), torch.randn(6, 3, 10, device="cuda")
    y = net(x)
    assert torch.allclose(torch.compile(net, fullgraph=True)(x), y, atol=1e-5)


def test_step_recorded_by_graph_step():
    torch.manual_seed(0)
    net = network().cuda()
    copy = network().cuda()
    copy.load_state_dict(net.state_dict())
    optimizers = [torch.optim.SGD(n.parameters(), 0.1) for n in (net, copy)]
    batches = [torch.randn(6, 3, 10, device="cuda") for _ in range(4)]

    def train(n, optimizer):
        def step(x):
            optimizer.zero_grad(set_to_none=False)
            loss = nn.functional.mse_loss(n(x), torch.ones_like(n(x)))
            loss.backward()
            optimizer.step()
            return loss

        return step

    recorded, eager = sf.graph_step(train(net, optimizers[0])), train(copy, optimizers[1])
    for x in batches * 4:
        assert torch.allclose(recorded(x), eager(x), rtol=1e-4, atol=1e-5)
