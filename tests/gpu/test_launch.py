"""Tests that need a GPU: CUDA graphs, compiled code, huge tensors, memory, two devices."""

import threading

import pytest
import torch
from torch import nn
from triton import knobs

import spikefuse as sf
from spikefuse.compiler.emit_triton import chunk
from spikefuse.kernels import norm_triton, triton_runtime
from spikefuse.scan import execution, launch_triton
from spikefuse.testing import lay_out, make_input


def network():
    torch.manual_seed(0)
    return sf.Temporal(
        nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            sf.PLIF(0.7, channels=8),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * 16, 5),
        )
    ).cuda()


def gradients(net, x, call=None):
    net.zero_grad()
    y = net(x) if call is None else call(x)
    y.float().square().mean().backward()
    return y.detach(), [p.grad.clone() for p in net.parameters()]


def test_a_training_step_replays_from_a_cuda_graph():
    net, x = network(), make_input((6, 4, 2, 8, 8), device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            gradients(net, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, grads = gradients(net, x)
    x.copy_(make_input(x.shape, device="cuda", seed=1))
    graph.replay()
    expected, wanted = gradients(net, x)
    torch.testing.assert_close(y, expected)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("steps", [7, 14])  # chunks that no other test has
@pytest.mark.parametrize("fused", [False, True])
def test_backward_kernels_are_compiled_during_the_forward_pass(fused, steps, monkeypatch):
    class AtOnce:
        def submit(self, function, *arguments):
            function(*arguments)

    monkeypatch.setattr(triton_runtime, "_compilers", AtOnce)
    compiled = []
    this = threading.get_ident()

    def hook(**kwargs):
        if threading.get_ident() == this:  # not what an earlier test left to be compiled
            compiled.append(kwargs["repr"])

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    net = sf.fuse(network()) if fused else network()
    execution.execution_for.cache_clear()
    loss = net(make_input((steps, 4, 2, 8, 8), device="cuda")).square().mean()
    before = [kernel for kernel in compiled if kernel.startswith("backward[")]
    assert len(before) == 1 + fused
    loss.backward()
    assert [kernel for kernel in compiled if kernel.startswith("backward[")] == before


def test_graphs_recorded_when_no_counters_of_reductions_are_left():
    net, x = sf.fuse(network()), make_input((6, 4, 2, 8, 8), device="cuda")
    expected, wanted = gradients(net, x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        gradients(net, x)
    torch.cuda.synchronize()
    counters, _ = norm_triton._counters[x.device]
    norm_triton._counters[x.device] = counters, len(counters)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        y, grads = gradients(net, x)
    for _ in range(3):
        graph.replay()
    results = [(y.clone(), [grad.clone() for grad in grads])]
    net.zero_grad()
    del graph, y, grads
    torch.cuda.empty_cache()
    torch.full((1 << 20,), 3.0, device="cuda")  # where the graph's memory was
    norm_triton._launch.cache_clear()
    with torch.cuda.stream(side):
        results.append(gradients(net, x))
    torch.cuda.synchronize()
    for y, grads in results:
        torch.testing.assert_close(y, expected)
        for a, b in zip(grads, wanted, strict=True):
            torch.testing.assert_close(a, b)


# Advice and deprecations of PyTorch itself.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_torch_compile_of_a_network():
    net, x = network().eval(), make_input((6, 4, 2, 8, 8), device="cuda")
    expected, wanted = gradients(net, x)
    y, grads = gradients(net, x, torch.compile(net, fullgraph=True))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_preserves_half_precision(dtype):
    net, x = network(), make_input((6, 4, 2, 8, 8), device="cuda")
    seen = []
    net.net[2].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cuda", dtype):
        y = net(x)
    y.float().sum().backward()
    assert seen == [dtype]
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_more_than_2_31_elements():
    # Two steps of 2^30 + 48 neurons: offsets pass 2^31 in time and in bytes.
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of free GPU memory")
    size = 2**30 + 48
    x = torch.empty(3, 1, size, device="cuda", dtype=torch.bfloat16).normal_()
    x.requires_grad_()
    y = sf.LIF(0.5, 0.3)(x)
    y.backward(torch.ones((), device="cuda", dtype=torch.bfloat16).expand_as(y))
    for part in (slice(0, 4096), slice(size - 4096, size)):
        few = x.detach()[..., part].clone().requires_grad_()
        z = sf.LIF(0.5, 0.3)(few)
        z.sum().backward()
        assert torch.equal(y[..., part], z)
        assert torch.equal(x.grad[..., part], few.grad)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "batch_first"])
def test_no_layout_is_copied(layout):
    x = lay_out(make_input((8, 4, 16, 32, 32), device="cuda"), layout)
    neuron = sf.LIF()
    with torch.no_grad():
        neuron(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = neuron(x)
    assert torch.cuda.max_memory_allocated() - before == y.numel() * 4


def test_memory_saved_for_backward():
    num_steps, neurons = 64, 1 << 20
    x = torch.randn(num_steps, 1, neurons, device="cuda", requires_grad=True)
    neuron = sf.LIF()
    neuron(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = neuron(x)
    saved = torch.cuda.memory_allocated() - before - y.numel() * 4
    assert saved <= x.numel() * 4 / 8 + 4096
    del y
    assert torch.cuda.memory_allocated() == before


def test_new_steps_sizes_and_values_compile_nothing():
    # What earlier tests have begun to compile does not count.
    triton_runtime._compilers().shutdown()
    triton_runtime._compilers.cache_clear()
    compiled, counts = [], []
    knobs.runtime.jit_post_compile_hook = lambda **kwargs: compiled.append(kwargs["repr"])
    # A forward and a backward kernel for 5 steps, for whole chunks of 5 and of 8, and for chunks of
    # 5 of which the last is shorter.
    sizes = [(5, 640), (10, 640), (10, 1280), (5, 16), (24, 640), (1024, 1280), (1024, 16), (9, 32)]
    try:
        for i, (num_steps, neurons) in enumerate(sizes):
            neuron = sf.ALIF(0.5 + i / 20, 1.0 + i)
            x = torch.randn(num_steps, 1, neurons, device="cuda", requires_grad=True)
            neuron(x).sum().backward()
            counts.append(len(compiled))
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert [chunk(num_steps) for num_steps, _ in sizes] == [5, 5, 5, 5, 8, 8, 8, 5]
    assert counts == [2, 4, 4, 4, 6, 6, 6, 8], compiled


def differentiated(neuron, x):
    y = neuron(x)
    return y, *torch.autograd.grad(y.sum(), x)


def test_repeat_launches_bypass_the_dispatcher(monkeypatch):
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    x = torch.randn(4, 1, 256, device="cuda", requires_grad=True)
    neuron = sf.LIF()
    expected = differentiated(neuron, x)
    for owner, name in (
        (launch_triton, "_integers"),
        (JITFunction, "run"),
        (CompiledKernel, "__getitem__"),
    ):
        monkeypatch.setattr(owner, name, None)
    assert all(map(torch.equal, differentiated(neuron, x), expected))


def test_repeat_launches_bypass_the_launcher_of_triton_3_6(monkeypatch):
    import triton
    from triton.backends.nvidia.driver import CudaLauncher

    if not triton.__version__.startswith("3.6."):
        pytest.skip("the launcher is only known for Triton 3.6")
    x = torch.randn(4, 1, 256, device="cuda", requires_grad=True)
    neuron = sf.LIF()
    expected = differentiated(neuron, x)
    monkeypatch.setattr(CudaLauncher, "__call__", None)
    assert all(map(torch.equal, differentiated(neuron, x), expected))


def test_alignments_of_one_shape():
    neuron, memory = sf.LIF(), torch.randn(4 * 256 + 8, device="cuda")
    for start in (0, 1, 2, 4, 0, 1):
        x = memory[start : start + 4 * 256].view(4, 1, 256).requires_grad_()
        expected = differentiated(neuron, x.detach().clone().requires_grad_())
        assert all(map(torch.equal, differentiated(neuron, x), expected))


def test_repeat_launches_use_the_current_stream():
    neuron, x = sf.LIF(), torch.zeros(4, 1, 256, device="cuda")
    new = torch.full_like(x, 2.0)
    expected = neuron(new)
    neuron(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        x.copy_(new)
        y = neuron(x)
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


def test_profilers_see_repeat_launches():
    x, neuron, seen = torch.randn(4, 1, 256, device="cuda"), sf.LIF(), []
    neuron(x)

    def enter(metadata):
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(enter)
    try:
        neuron(x)
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
    neuron(x)
    assert seen == ["forward"]


def test_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(5, 3, 64)
    results = [sf.LIF()(x.to(f"cuda:{i}")).cpu() for i in range(2)]
    assert torch.equal(*results)
