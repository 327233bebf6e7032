"""What is printed of a fusion."""

from __future__ import annotations

import torch
from spikefuse.block.deferred import Outcome, outcomes
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.graph.report import Fusion, Place


def test_the_table() -> None:
    norms: dict[str, nn.Module] = {n: nn.BatchNorm2d(2) for n in ("bn1", "layers.1", "bn3", "bn4")}
    neurons: dict[str, nn.Module] = {n: sf.LIF() for n in ("lif1", "lif2")}
    fusion = Fusion(norms, neurons, {"bn4": "it is outside Temporal"})
    assert fusion.fused == (Place("bn1"), Place("layers.1"), Place("bn3"))
    assert str(fusion).splitlines() == [
        "norm      neuron",
        "bn1       -       can be fused",
        "layers.1  -       can be fused",
        "bn3       -       can be fused",
        "bn4       -       not fused: it is outside Temporal",
        "3 of 4 batch norms can be fused with the neuron after them",
    ]
    outcomes[norms["bn1"]] = Outcome(neurons["lif1"])
    outcomes[norms["layers.1"]] = Outcome(neurons["lif2"], residual=True)
    assert fusion.left[0] == Place("bn3", reason="it was not called")
    outcomes[norms["bn3"]] = Outcome(None, reason="its result was read by relu")
    assert fusion.fused == (Place("bn1", "lif1"), Place("layers.1", "lif2", True))
    assert str(fusion).splitlines() == [
        "norm      neuron",
        "bn1       lif1    fused",
        "layers.1  lif2    fused, with a residual",
        "bn3       -       not fused: its result was read by relu",
        "bn4       -       not fused: it is outside Temporal",
        "2 of 4 batch norms fused with the neuron after them",
    ]
    for num, text in ((1, ", 1 max pooling replaced"), (2, ", 2 max poolings replaced")):
        assert Fusion(norms, neurons, fusion.unsupported, num).summary == fusion.summary + text


def test_a_fused_norm_prints_what_it_was_fused_with() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn1, self.bn2, self.bn3 = (nn.BatchNorm1d(4) for _ in range(3))
            self.lif1, self.lif2 = sf.LIF(), sf.LIF()

        def forward(self, x: Tensor) -> Tensor:
            return self.bn3(self.lif2(self.bn2(self.lif1(self.bn1(x))) + x)).relu()

    net = sf.fuse(sf.Temporal(Net()))
    assert "fused with" not in str(net)
    net(torch.rand(3, 2, 4))
    lines = [line.strip() for line in str(net).splitlines()]
    for name, text in {
        "bn1": "fused with LIF",
        "bn2": "fused with a residual and LIF",
        "bn3": "not fused: its result was read by relu",
    }.items():
        (line,) = [line for line in lines if line.startswith(f"({name}): FusedBatchNorm1d(4, ")]
        assert line.endswith(f", {text})")
