"""Values and gradients in microbatches."""

import pytest
import torch
from spikefuse.memory.microbatch import Gradient, empty_batch, split, take, unfolded

from spikefuse.kernels import bits
from spikefuse.scan.layout import flatten_steps
from spikefuse.testing import make_input, poisoned

BATCH = 6


def folded(device, seed=0, steps=3):
    """Channels-last `[T*B, C, H, W]`."""
    x = make_input((steps * BATCH, 4, 5, 2), device=device, seed=seed)
    return x.contiguous(memory_format=torch.channels_last)


def pieces_of(x, microbatches):
    """The same values as one tensor per microbatch."""
    whole = unfolded(x, BATCH)
    return [
        flatten_steps(empty_batch(whole, end - first).copy_(whole[:, first:end]))
        for first, end in microbatches
    ]


def test_split():
    assert split(6, 1) == [(0, 6)]
    assert split(6, 4) == [(0, 1), (1, 3), (3, 4), (4, 6)]
    assert split(3, 8) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("saved_in", [1, 2, 4, 8])
@pytest.mark.parametrize("read_in", [1, 2, 4, 8])
@pytest.mark.parametrize("steps", [1, 3])
def test_take(device, saved_in, read_in, steps):
    x = (folded(device, steps=steps) > 0).float()
    microbatches = split(BATCH, saved_in)
    packed = [
        (m, bits.pack(y)) for m, y in zip(microbatches, pieces_of(x, microbatches), strict=True)
    ]
    plain = [
        (m, (y, y._version)) for m, y in zip(microbatches, pieces_of(x, microbatches), strict=True)
    ]
    targets = split(BATCH, read_in)
    for microbatch, expected in zip(targets, pieces_of(x, targets), strict=True):
        for saved in (packed, plain):
            with poisoned():
                result = take(saved, microbatch)
            assert torch.equal(result, expected)
            assert result.stride() == expected.stride()


@pytest.mark.parametrize("read_in", [1, 2, 4, 8])
@pytest.mark.parametrize("added_in", [(1, 1), (2, 8), (8, 2), (4, 4), (8, 8), (1, 4), (4, 1)])
def test_gradient(device, read_in, added_in):
    """The sum of the gradients of two readers, whose tensors are not modified."""
    total, microbatches = Gradient(split(BATCH, read_in)), split(BATCH, read_in)
    values = [folded(device, 1), folded(device, 2)]
    assert not total
    with poisoned():
        for x, num in zip(values, added_in, strict=True):
            pieces = split(BATCH, num)
            tensors = pieces_of(x, pieces)
            for microbatch, y in reversed(list(zip(pieces, tensors, strict=True))):
                total.add(microbatch, y)
            assert all(map(torch.equal, tensors, pieces_of(x, pieces)))
    assert total
    for microbatch, expected in zip(
        microbatches, pieces_of(values[0] + values[1], microbatches), strict=True
    ):
        result = total.get(microbatch)
        assert torch.equal(result, expected)
        assert total.pop(microbatch) is result
    assert not total
    assert {total.get(microbatches[0]), total.pop(microbatches[0])} == {None}


def test_whole_values_of_any_shape():
    """For example of layers that change dim 0."""
    total, x = Gradient([(0, BATCH)]), torch.ones(5, 2)
    total.add((0, BATCH), x)
    total.add((0, BATCH), x)
    assert torch.equal(total.pop((0, BATCH)), x + x)
    assert take([((0, BATCH), (x, x._version))], (0, BATCH)) is x
