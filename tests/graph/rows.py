"""How many rows the layers of a fused network compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import spikefuse as sf
from spikefuse.graph import captured, operations
from spikefuse.graph.backend import apply_passes

CONVOLUTIONS = (torch.conv2d, operations.conv2d)
LINEAR = (F.linear,)
NORMS = (F.batch_norm, operations.batch_norm, operations.norm_statistics)


class Recorder(fx.Interpreter):
    """Runs a graph and records the rows that calls of some functions compute."""

    def __init__(self, gm: fx.GraphModule, layers: tuple[Any, ...], rows: list[int]) -> None:
        super().__init__(gm)
        self.layers, self.rows = layers, rows

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in self.layers:
            self.rows.append((*args, *kwargs.values())[0].shape[0])
        return super().call_function(target, args, kwargs)


def recording(layers: tuple[Any, ...], rows: list[int]) -> Callable[..., Any]:
    """A function in place of `compile_graph`."""

    def compile_graph(gm: fx.GraphModule, inputs: Any, report: Any, *_: Any) -> Any:
        apply_passes(gm, report)
        return Recorder(gm, layers, rows).run

    return compile_graph


def rows_seen(net: nn.Module, x: Tensor, layers: tuple[Any, ...] = CONVOLUTIONS) -> list[int]:
    """The rows that layers compute in a call of the fused network."""
    rows: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "compile_graph", recording(layers, rows))
        fused = sf.fuse(net)
        fused(x)
    assert not [note for r in fused.fusion.reports for note in r.notes]
    return rows
