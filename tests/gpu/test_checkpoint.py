"""Recomputation on a GPU: memory, CUDA graphs and synchronization."""

import pytest
import torch

import spikefuse as sf
from spikefuse.memory import Checkpoint, Recompute
from spikefuse.models import MODELS
from spikefuse.testing import make_input
from tests.memory.networks import Mixed, fused, train

SHAPE = (4, 6, 3, 8, 8)  # T, B, C, H, W


def requested(what: str) -> int:
    """The bytes of tensors, without what `max_memory_allocated` counts beyond them: the rest of a
    block, up to 1 MiB, which depends on what earlier tests have left."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_peak_of_a_model(monkeypatch, cast):
    """Of cifar_large: four tensors of the size of the first layer's output, bits and weights."""
    # As networks are trained: other algorithms need much memory of their own.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    x = make_input((10, 16, 3, 32, 32), device="cuda")
    largest = 10 * 16 * 128 * 32 * 32 * (4 if cast is None else 2)
    peaks = {}
    for policy in (Recompute(), Checkpoint()):
        net = fused(lambda: MODELS["cifar_large"](sf.LIF, 3, 10, (32, 32)), policy, "cuda")
        net.to(memory_format=torch.channels_last)
        train(net, x, cast)
        # Room for a second gradient of each weight, which lives until backward is over.
        weights = sum(p.nbytes for p in net.parameters())
        before = requested("current")
        torch.cuda.reset_peak_memory_stats()
        train(net, x, cast)
        peaks[policy] = requested("peak") - before - weights
    assert peaks[Checkpoint()] < 4.5 * largest
    # In float32, one segment takes nearly as much as all convolution results.
    assert peaks[Checkpoint()] < (0.95 if cast is None else 0.75) * peaks[Recompute()]


def test_a_cuda_graph(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    net, x = fused(Mixed, Checkpoint(2), "cuda"), make_input(SHAPE, device="cuda")
    leaf = x.clone().requires_grad_()

    def run():
        return torch.autograd.grad(net(leaf).square().sum(), [leaf, *net.parameters()])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    with torch.no_grad():
        leaf.copy_(make_input(SHAPE, device="cuda", seed=1))
    graph.replay()
    for a, b in zip(found, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_waiting_for_the_gpu():
    net, x = fused(Mixed, Checkpoint(2), "cuda"), make_input(SHAPE, device="cuda")
    leaf = x.clone().requires_grad_()
    net(leaf).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        net(leaf).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
