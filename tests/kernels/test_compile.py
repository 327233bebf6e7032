"""Hand-written Triton kernels, compiled for a GPU where there is none: the interpreter, which runs
them in the other tests, accepts more than the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compile_triton import compile_kernels

pytest.importorskip("triton")

# module | its kernel | types of its arguments; all of 16 where they are addresses or numbers
KERNELS = r"""
bits_triton | pack_kernel | x=*{dtype} bits=*u8 num=i32 BLOCK=512
bits_triton | unpack_kernel | bits=*u8 x=*{dtype} num=i64 BLOCK=512
norm_triton | statistics_kernel | x=*{dtype} weight=*fp32 mean=*fp32 variance=*fp32 batches=*i64 \
results=*fp32 partial=*fp32 arrived=*i32 momentum=fp32 eps=fp32 outer=i64 channels=i64 \
inner=i64 rows=i64 repeats=i64 HEIGHT=64 WIDTH=32 TILES=4 LAST={last} UNIT=16 SHARES=64
norm_triton | gradient_sums_kernel | scales=*fp32 shifts=*fp32 statistics=*fp32 results=*fp32 \
partial=*fp32 arrived=*i32 number=fp32 outer=i64 channels=i64 inner=i64 rows=i64 \
HEIGHT=64 WIDTH=32 TILES=4 LAST={last} UNIT=16 SHARES=64
pool_triton | forward_kernel | x=*{dtype} y=*{dtype} positions={positions} maps=i64 \
ROWS=14 COLUMNS=14 OUT_ROWS=7 OUT_COLUMNS=7 INNER={inner} HEIGHT=3 WIDTH=3 DOWN=2 RIGHT=2 \
TOP=1 LEFT=1 GROUP=64 UNIT=16 BLOCK=1024 MEAN={mean}
pool_triton | backward_kernel | grad_y=*{dtype} positions={positions} grad_x=*{dtype} maps=i64 \
ROWS=14 COLUMNS=14 OUT_ROWS=7 OUT_COLUMNS=7 INNER={inner} HEIGHT=3 WIDTH=3 DOWN=2 RIGHT=2 \
TOP=1 LEFT=1 GROUP=64 UNIT=16 BLOCK=1024 MEAN={mean}
"""


@pytest.mark.parametrize(("dtype", "last"), [("fp32", 1), ("bf16", 0), ("fp16", 1)])
def test_kernels_compile(dtype: str, last: int, tmp_path: Path) -> None:
    pooling = {"inner": 48, "mean": 0, "positions": "*u8"}  # of maxima
    if not last:
        pooling = {"inner": 1, "mean": 1, "positions": "None"}
    lines = KERNELS.strip().replace("\\\n", "").format(dtype=dtype, last=last, **pooling)
    expected = [f"{line.split(' | ')[1]} 4" for line in lines.splitlines()]
    assert compile_kernels("kernels", lines, tmp_path) == expected
