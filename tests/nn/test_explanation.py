"""How an explanation reads."""

from __future__ import annotations

import torch

from spikefuse.nn.explanation import Explanation, Layer

FUSED = Layer(
    name="net.2",
    module="LIF",
    shape=(37, 2, 3),
    dtypes=(torch.float32,),
    implementation="triton",
    program="LIF-triton-0123",
    chunk=16,
    kept_inputs=888,
    kept_states=72_000,
    loop_states=2_640_000_000,
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
    program=None,
    chunk=None,
    kept_inputs=0,
    kept_states=12_345_678,
    loop_states=12_345_678,
    moved=0,
    least=None,
    achieved=None,
    notes=("not compiled", "and slow"),
)


def test_fraction():
    assert FUSED.fraction == 0.8
    assert LOOP.fraction is None


def test_the_table():
    lines = str(Explanation((FUSED, LOOP), ("idle",), 1, 4.29e12)).splitlines()
    cells = [line.split("  ") for line in lines[:3]]
    header, fused, loop = ([cell.strip() for cell in row if cell] for row in cells)
    assert header == [
        *("layer", "module", "input", "dtype", "kernel", "K", "kept: inputs", "states"),
        *("(eager loop)", "least", "achieved", "fraction"),
    ]
    assert fused == [
        *("net.2", "LIF", "[37, 2, 3]", "float32", "LIF-triton-0123", "16", "888 B", "72 kB"),
        *("2.64 GB", "2 ms", "2.5 ms", "80.0%"),
    ]
    assert loop == [
        *("(the model)", "Mine", "2 × [4, 2]", "float32, bfloat16", "reference", "–", "0 B"),
        *("12.3 MB", "12.3 MB"),
    ]
    assert lines[3:7] == [
        "(the model): not compiled",
        "(the model): and slow",
        "not called: idle",
        "1 other module is ordinary PyTorch",
    ]
    assert "4,290 GB/s" in lines[-1]


def test_without_times():
    header = str(Explanation((LOOP,), (), 2, None)).splitlines()[0]
    assert header.endswith("(eager loop)")


def test_without_neurons():
    assert str(Explanation((), (), 2, None)) == "2 other modules are ordinary PyTorch"


def test_a_prompt_shows_the_table():
    explanation = Explanation((FUSED,), (), 1, None)
    assert repr(explanation) == str(explanation)
