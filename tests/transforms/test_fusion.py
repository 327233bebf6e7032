"""What is printed of a fusion."""

from __future__ import annotations

from spikefuse.transforms.fusion import Fusion, Place


def test_the_table() -> None:
    places = (
        Place("bn1", "lif1"),
        Place("layers.1", "lif2", residual="conv"),
        Place("bn3", None, reason="it goes to the output, not to a neuron"),
        Place(None, "lif4", reason="it reads the input, which is no batch norm"),
    )
    fusion = Fusion(places)
    assert fusion.fused == places[:2]
    assert fusion.left == places[2:]
    assert str(fusion).splitlines() == [
        "norm      neuron",
        "bn1       lif1    fused",
        "layers.1  lif2    fused, with 'conv' added",
        "bn3       -       not fused: it goes to the output, not to a neuron",
        "-         lif4    not fused: it reads the input, which is no batch norm",
        "2 of 3 batch norms fused with the neuron after them",
    ]
    for num, text in ((1, ", 1 max pooling replaced"), (2, ", 2 max poolings replaced")):
        assert Fusion(places, num).summary == fusion.summary + text
