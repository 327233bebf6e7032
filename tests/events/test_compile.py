"""The kernels for event lists compile for a GPU: the interpreter accepts more than the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compile_triton import compile_kernels

pytest.importorskip("triton")

# module | kernel | types of its arguments | 32-bit words of its widest access; lists are read one
# entry at a time
KERNELS = r"""
products_triton | sum_rows | out=*fp32 source=*fp32 bias=*fp32 begins=*i64 counts=*i32 \
indices=*i32 width=i32 HAS_BIAS=1 BLOCK=512 | 4
products_triton | dots | out=*fp32 weight=*fp32 grad=*fp32 indices=*i32 rows=*i32 width=i32 \
BLOCK=512 | 4
lists_triton | count | marks=*fp32 fired=*i32 entries=*i32 width=i32 BLOCK=512 | 4
lists_triton | fill | marks=*fp32 offsets=*i64 fired=*i32 indices=*i32 width=i32 BLOCK=512 | 4
products_triton | sum_listed | out=*fp32 weight=*fp32 bias=*fp32 indices=*i32 count=*i32 width=i32 \
HAS_BIAS=1 ROWS=32 BLOCK=64 | 4
products_triton | list_sites | spikes=*fp32 indices=*i32 count=*i32 width=i32 BLOCK=16384 | 4
lists_triton | describe | rows=*i32 values=None inputs=*i32 offsets=*i64 fired=*i32 \
indices=*i32 none=i32 BLOCK=256 | 1
lists_triton | describe | rows=None values=*fp32 inputs=None offsets=*i64 fired=*i32 \
indices=*i32 none=i32 BLOCK=256 | 1
lists_triton | scatter | out=*fp32 values=*fp32 offsets=*i64 fired=*i32 indices=*i32 \
width=i32 BLOCK=256 | 1
lists_triton | scatter | out=*bf16 values=*bf16 offsets=*i64 fired=*i32 indices=*i32 \
width=i32 BLOCK=256 | 1
lists_triton | scatter | out=*fp16 values=None offsets=*i64 fired=*i32 indices=*i32 \
width=i32 BLOCK=256 | 1
"""


def test_kernels_compile(tmp_path: Path) -> None:
    lines = KERNELS.strip().replace("\\\n", "").splitlines()
    kernels, words = zip(*(line.rsplit(" | ", 1) for line in lines), strict=True)
    expected = [f"{k.split(' | ')[1]} {w}" for k, w in zip(kernels, words, strict=True)]
    assert compile_kernels("events", "\n".join(kernels), tmp_path) == expected
