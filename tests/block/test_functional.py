"""Blocks as functions: library ops, returned sums, statistics, state passing."""

from __future__ import annotations

import pytest
import torch

import spikefuse as sf
from spikefuse.block.definition import Kind
from spikefuse.block.program import prepare_block
from spikefuse.testing import make_input


@pytest.mark.parametrize("neuron", [sf.LIF(), sf.PLIF(channels=6)], ids=lambda n: type(n).__name__)
@pytest.mark.parametrize(("affine", "num_norms"), [(True, 1), (False, 1), (True, 2)])
def test_opcheck(neuron, affine, num_norms):
    inputs = tuple(make_input((20, 2, 6), seed=i).requires_grad_() for i in range(2))
    state = make_input((2, 6), seed=2).requires_grad_()
    block = prepare_block(neuron, "numba", Kind(True, True, num_norms == 2))
    values = neuron.describe()[0]
    weights = [torch.rand(6, requires_grad=True) for _ in range(num_norms)] if affine else []
    shift = torch.rand(6, requires_grad=affine)
    statistics = [
        torch.ops.spikefuse.norm_statistics(x.detach(), weight, 1e-5, "numba")[0].detach()
        for x, weight in zip(inputs, weights or [None], strict=False)
    ]
    own = [values[name].detach().requires_grad_() for name in block.own]
    groups = [[*inputs], [state], own, [shift, *statistics, *weights]]
    scalars = [values[name] for name in block.own_floats]
    torch.library.opcheck(
        torch.ops.spikefuse.block.default, (block.name, *groups, scalars, True, True)
    )
    needed = [t.requires_grad for group in groups for t in group]
    groups = [[t.detach() for t in group] for group in groups]
    call = block.name, *groups, scalars
    y, v, *saved = torch.ops.spikefuse.block(*call, True, True)
    for flags in (needed, [False, True, False, *needed[3:]]):
        arguments = *call, saved, [y, v], flags
        torch.library.opcheck(torch.ops.spikefuse.block_backward.default, arguments)
