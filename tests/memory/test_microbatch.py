"""Values and gradients in parts of the batch."""

import pytest
import torch

from spikefuse.kernels import bits
from spikefuse.memory.microbatch import Gradient, divided, room, rows, take
from spikefuse.testing import make_input, poisoned

BATCH = 6


def folded(seed=0, steps=3, batch=BATCH):
    """Channels-last `[T*B, C, H, W]`."""
    x = make_input((steps * batch, 4, 5, 2), seed=seed)
    return x.contiguous(memory_format=torch.channels_last)


def split(x, parts):
    """The same values as one tensor for each part."""
    whole = rows(x, BATCH)
    return [
        room(whole, end - first).copy_(whole[:, first:end]).flatten(0, 1) for first, end in parts
    ]


def test_divided():
    assert divided(6, 1) == [(0, 6)]
    assert divided(6, 4) == [(0, 1), (1, 3), (3, 4), (4, 6)]
    assert divided(3, 8) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("kept_in", [1, 2, 4, 8])
@pytest.mark.parametrize("taken_in", [1, 2, 4, 8])
@pytest.mark.parametrize("steps", [1, 3])
def test_take(kept_in, taken_in, steps):
    x = (folded(steps=steps) > 0).float()
    parts = divided(BATCH, kept_in)
    packed = [(p, bits.pack(y)) for p, y in zip(parts, split(x, parts), strict=True)]
    plain = [(p, (y, y._version)) for p, y in zip(parts, split(x, parts), strict=True)]
    wanted = divided(BATCH, taken_in)
    for part, expected in zip(wanted, split(x, wanted), strict=True):
        for held in (packed, plain):
            with poisoned():
                found = take(held, part)
            assert torch.equal(found, expected)
            assert found.stride() == expected.stride()


@pytest.mark.parametrize("used_in", [1, 2, 4, 8])
@pytest.mark.parametrize("given_in", [(1, 1), (2, 8), (8, 2), (4, 4), (8, 8), (1, 4), (4, 1)])
def test_gradient(used_in, given_in):
    """The sum of what two readers give, whose tensors are left as they are."""
    total, parts = Gradient(divided(BATCH, used_in)), divided(BATCH, used_in)
    given = [folded(1), folded(2)]
    assert not total
    with poisoned():
        for x, num in zip(given, given_in, strict=True):
            pieces = divided(BATCH, num)
            tensors = split(x, pieces)
            for part, y in reversed(list(zip(pieces, tensors, strict=True))):
                total.add(part, y)
            assert all(map(torch.equal, tensors, split(x, pieces)))
    assert total
    for part, expected in zip(parts, split(given[0] + given[1], parts), strict=True):
        found = total.get(part)
        assert torch.equal(found, expected)
        assert total.pop(part) is found
    assert not total
    assert {total.get(parts[0]), total.pop(parts[0])} == {None}


def test_whole_values_of_any_shape():
    """Such as those of layers that may do anything with dim 0."""
    total, x = Gradient([(0, BATCH)]), torch.ones(5, 2)
    total.add((0, BATCH), x)
    total.add((0, BATCH), x)
    assert torch.equal(total.pop((0, BATCH)), x + x)
    assert take([((0, BATCH), (x, x._version))], (0, BATCH)) is x
