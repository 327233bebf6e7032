"""Saving spikes as bits on a GPU: CUDA graphs, streams and memory."""

import pytest
import torch
from torch import nn

from spikefuse.memory import POLICIES
from spikefuse.testing import make_input
from tests.memory.measuring import packings
from tests.memory.networks import Net, conv, step, wrapped

SHAPE = (4, 3, 5, 8, 12)  # T, B, C, H, W


def test_a_cuda_graph_packs_at_each_replay():
    net, x = wrapped(Net, device="cuda"), make_input(SHAPE, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step(net, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), packings() as seen:
        found = step(net, x)
    assert len(seen) == 2
    x.copy_(make_input(SHAPE, device="cuda", seed=1))
    graph.replay()
    for a, b in zip(found, step(net, x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_synchronization():
    net, x = wrapped(Net, device="cuda"), make_input(SHAPE, device="cuda")
    step(net, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with packings() as seen:
            step(net, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(seen) == 2


def test_allocated_memory():
    x = torch.randn(8, 16, 5, 32, 32, device="cuda")
    spikes = 8 * 16 * 64 * 32 * 32
    held = {}
    for name, policy in list(POLICIES.items())[:3]:
        net = wrapped(lambda: conv(nn.Conv2d(64, 4, 1), channels=64), policy, "cuda")
        net(x)  # compiles
        before = torch.cuda.memory_allocated()
        y = net(x)
        held[name] = torch.cuda.memory_allocated() - before
        del y
    assert held["save-all"] - held["recompute"] == spikes * 4 - spikes // 8
    assert held["bits"] == held["recompute"]


def test_each_stream_packs_its_own_bits():
    """A layer on another stream does not read bits that are still being packed."""

    class Parallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.spikes = conv()
            self.left, self.right = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)
            self.side = torch.cuda.Stream()

        def forward(self, x):
            s = self.spikes(x)
            self.side.wait_stream(torch.cuda.current_stream())
            left = self.left(s)
            with torch.cuda.stream(self.side):
                right = self.right(s)
                s.record_stream(self.side)
            torch.cuda.current_stream().wait_stream(self.side)
            return left + right

    x = make_input(SHAPE, device="cuda")
    expected = step(wrapped(Parallel, POLICIES["save-all"], "cuda"), x)
    with packings() as seen:
        found = step(wrapped(Parallel, device="cuda"), x)
    assert len(seen) == 2
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
