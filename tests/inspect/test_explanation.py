"""The tables of a report."""

from __future__ import annotations

import torch

from spikefuse.inspect.explanation import Explanation, Layer, SavedBytes
from spikefuse.memory import Recompute, SaveAll

FUSED = Layer(
    name="net.2",
    module="LIF",
    shape=(37, 2, 3),
    dtypes=(torch.float32,),
    implementation="triton",
    memory=SaveAll(),
    program="LIF-triton-0123",
    chunk=16,
    moved=4440,
    least=2e-3,
    achieved=2.5e-3,
    notes=(),
)
LOOP = Layer(
    name="",
    module="Mine",
    shape=(4, 2),
    dtypes=(torch.float32, torch.bfloat16),
    implementation="reference",
    memory=Recompute(),
    program=None,
    chunk=None,
    moved=0,
    least=None,
    achieved=None,
    notes=("not compiled", "and slow"),
)
SAVED = SavedBytes("net.2", "LIF", 888, 2_640_000_000), SavedBytes("", "Mine", 12_345_678, 999_999)


def test_fraction():
    assert FUSED.fraction == 0.8
    assert LOOP.fraction is None


def test_the_table():
    lines = str(Explanation((FUSED, LOOP), (), ("idle",), 1, 4.29e12)).splitlines()
    cells = [line.split("  ") for line in lines[:3]]
    header, fused, loop = ([cell.strip() for cell in row if cell] for row in cells)
    assert header == [
        *("layer", "module", "input", "dtype", "kernel", "memory", "K"),
        *("least", "achieved", "fraction"),
    ]
    assert fused == [
        *("net.2", "LIF", "[37, 2, 3]", "float32", "LIF-triton-0123", "SaveAll", "16"),
        *("2 ms", "2.5 ms", "80.0%"),
    ]
    assert loop == [
        *("(the model)", "Mine", "2 × [4, 2]", "float32, bfloat16", "reference", "Recompute", "–")
    ]
    assert lines[3:7] == [
        "(the model): not compiled",
        "(the model): and slow",
        "not called: idle",
        "1 other module is ordinary PyTorch",
    ]
    assert "4,290 GB/s" in lines[-1]


def test_the_table_of_saved_bytes():
    lines = str(Explanation((FUSED,), SAVED, (), 1, None)).splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell] for line in lines[2:8]]
    assert cells == [
        [],
        ["layer", "module", "saved", "by eager PyTorch"],
        ["net.2", "LIF", "888 B", "2.64 GB"],
        ["(the model)", "Mine", "12.3 MB", "1 MB"],
        ["total", "12.3 MB", "2.64 GB"],
        [],
    ]


def test_without_times():
    header = str(Explanation((LOOP,), (), (), 2, None)).splitlines()[0]
    assert header.endswith("K")


def test_without_neurons():
    assert str(Explanation((), (), (), 2, None)) == "2 other modules are ordinary PyTorch"


def test_repr_is_the_table():
    explanation = Explanation((FUSED,), SAVED, (), 1, None)
    assert repr(explanation) == str(explanation)
