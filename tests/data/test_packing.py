"""Packing is exact for every number of bits and values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spikefuse.data.packing import BITS, pack, unpack


@given(bits=st.sampled_from(BITS), values=st.integers(1, 40), seed=st.integers(0, 99))
def test_unpack_undoes_pack(bits: int, values: int, seed: int) -> None:
    written = np.random.default_rng(seed).integers(0, 2**bits, (2, 3, values), np.uint8)
    packed = pack(written, bits)
    assert packed.dtype == np.uint8
    assert packed.shape == (2, 3, -(-values * bits // 8))
    read = unpack(torch.from_numpy(packed), bits, (values,))
    assert read.dtype == torch.uint8
    np.testing.assert_array_equal(read.numpy(), written)


@pytest.mark.parametrize(("bits", "expected"), [(1, [0b1101]), (2, [0b01000101]), (4, [1, 17])])
def test_the_first_value_is_in_the_lowest_bits(bits: int, expected: list[int]) -> None:
    values = {1: [1, 0, 1, 1], 2: [1, 1, 0, 1], 4: [1, 0, 1, 1]}[bits]
    assert pack(np.array(values, np.uint8), bits).tolist() == expected


def test_unpack_takes_any_layout() -> None:
    packed = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    swapped = unpack(packed.transpose(0, 1), 4, (2, 4))
    assert torch.equal(swapped, unpack(packed, 4, (2, 4)).transpose(0, 1))
