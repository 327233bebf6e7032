"""Fused networks under torch.compile with Inductor; a ReLU network shows what is PyTorch's."""

import copy

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.models import MODELS

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of modules that Inductor imports
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Folded(nn.Module):
    """A network without neurons, over all time steps."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def make(model, activation, mode):
    """A network, and one that runs it compiled."""
    torch.manual_seed(0)
    net = MODELS[model](activation, 3, 10, (32, 32)).cuda().to(memory_format=torch.channels_last)
    net = Folded(net) if activation is nn.ReLU else sf.Temporal(net)
    if mode == "fuse":
        return sf.fuse(net, "eager"), sf.fuse(copy.deepcopy(net), "inductor")
    return net, torch.compile(copy.deepcopy(net), fullgraph=True, mode=mode)


# Inductor does not round the results of norms to bfloat16, so that other neurons would fire than in
# an eager network that is not fused.
CASES = [
    *((nn.ReLU, mode, dtype) for mode in ("default", "reduce-overhead")
      for dtype in (torch.float32, torch.bfloat16)),
    *((sf.IF, mode, torch.float32) for mode in ("default", "reduce-overhead")),
    *((sf.IF, "fuse", dtype) for dtype in (torch.float32, torch.bfloat16)),
]  # fmt: skip


@pytest.mark.parametrize(("activation", "mode", "dtype"), CASES)
@pytest.mark.parametrize("model", ["resnet18", "cifar_small"])
def test_training(model, activation, mode, dtype):
    torch.compiler.reset()
    eager, net = make(model, activation, mode)
    x = torch.rand(4, 6, 3, 32, 32, device="cuda")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        losses = []
        for network in (eager, net):
            network.zero_grad()
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                loss = network(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=0.05)
    # Spikes flip where roundings differ, so that gradients agree as a whole only.
    gradients = [torch.cat([p.grad.flatten() for p in n.parameters()]) for n in (eager, net)]
    assert torch.cosine_similarity(*gradients, dim=0) > (0.99 if dtype == torch.float32 else 0.9)
    for p, q in zip(eager.buffers(), net.buffers(), strict=True):
        assert (p.float() - q.float()).norm() <= 0.02 * p.float().norm() + 1e-3


def test_blocks_equal_eager_ones():
    """Without layers that round in another order."""
    torch.compiler.reset()
    block = sf.nn.Block(nn.BatchNorm2d(8), sf.LIF(0.5, 0.5))
    net = sf.Temporal(nn.Sequential(block)).cuda()
    other = copy.deepcopy(net)
    compiled = torch.compile(other, fullgraph=True)
    for batch in (2, 3, 5):
        x = torch.randn(4, batch, 8, 6, 6, device="cuda", requires_grad=True)
        y, z = net(x), compiled(x)
        assert torch.equal(y, z)
        grad = torch.randn_like(y)
        results = [
            torch.autograd.grad(out, [x, *n.parameters()], grad)
            for out, n in ((y, net), (z, other))
        ]
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    for p, q in zip(net.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(p, q)


def test_spikes_are_saved_as_bits():
    """A network that Inductor compiles needs no more memory than an eager one."""
    x, peaks = torch.rand(8, 32, 3, 32, 32, device="cuda"), []
    for net in make("resnet18", sf.IF, "fuse"):
        torch.compiler.reset()
        for _ in range(3):
            net.zero_grad()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16):
                net(x).float().square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        net.zero_grad()
    assert peaks[1] <= 1.05 * peaks[0]
