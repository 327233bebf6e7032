"""Small integers packed into bytes with NumPy, and unpacked with PyTorch on any device.

Shape legend: V values of a frame, S = ceil(V bits / 8) bytes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BITS = (1, 2, 4, 8)


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack the last dimension, `8 / bits` values per byte, the first in the lowest bits.

    Args:
        values: uint8 `[..., V]`, each at most `2**bits - 1`.
        bits: bits per value: 1, 2, 4 or 8.

    Returns:
        uint8 `[..., S]`.
    """
    if bits == 8:
        return values
    planes = (values[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(planes.reshape(*values.shape[:-1], -1), axis=-1, bitorder="little")


def unpack(packed: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """Invert `pack`, on the device of `packed`.

    Args:
        packed: uint8 `[..., S]`.
        bits: bits per value.
        shape: shape of the V values.

    Returns:
        uint8 `[..., *shape]`.
    """
    if bits < 8:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        packed = ((packed.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)
    count = int(np.prod(shape))
    return packed[..., :count].unflatten(-1, shape)
