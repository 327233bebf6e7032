"""Compile hand-written Triton kernels for a GPU, without one: the interpreter, which runs them in
other tests, accepts more than the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]

# module | kernel | types of its arguments; addresses and integers are multiples of 16
KERNELS = r"""
kernels.bits_triton | pack_kernel | x=*{dtype} bits=*u8 num=i32 BLOCK=512
kernels.bits_triton | unpack_kernel | bits=*u8 x=*{dtype} num=i64 BLOCK=512
kernels.norm_triton | statistics_kernel | x=*{dtype} weight=*fp32 mean=*fp32 variance=*fp32 \
batches=*i64 \
results=*fp32 partial=*fp32 arrived=*i32 momentum=fp32 eps=fp32 outer=i64 channels=i64 \
inner=i64 rows=i64 repeats=i64 HEIGHT=64 WIDTH=32 TILES=4 LAST={last} UNIT=16 SHARES=64
kernels.norm_triton | gradient_sums_kernel | scales=*fp32 shifts=*fp32 statistics=*fp32 \
results=*fp32 \
partial=*fp32 arrived=*i32 number=fp32 outer=i64 channels=i64 inner=i64 rows=i64 \
HEIGHT=64 WIDTH=32 TILES=4 LAST={last} UNIT=16 SHARES=64
kernels.pool_triton | forward_kernel | x=*{dtype} y=*{dtype} positions=*u8 maps=i64 \
ROWS=14 COLUMNS=14 OUT_ROWS=7 OUT_COLUMNS=7 INNER={inner} HEIGHT=3 WIDTH=3 DOWN=2 RIGHT=2 \
TOP=1 LEFT=1 GROUP=64 UNIT=16 BLOCK=1024
kernels.pool_triton | backward_kernel | grad_y=*{dtype} positions=*u8 grad_x=*{dtype} maps=i64 \
ROWS=14 COLUMNS=14 OUT_ROWS=7 OUT_COLUMNS=7 INNER={inner} HEIGHT=3 WIDTH=3 DOWN=2 RIGHT=2 \
TOP=1 LEFT=1 GROUP=64 UNIT=16 BLOCK=1024
"""

# The last column is the number of 32-bit words that the kernel reads or writes at a time.
EVENT_KERNELS = r"""
events.products_triton | sum_rows | out=*fp32 source=*fp32 bias=*fp32 begins=*i64 counts=*i32 \
indices=*i32 \
width=i32 HAS_BIAS=1 BLOCK=512 | 4
events.products_triton | dots | out=*fp32 weight=*fp32 grad=*fp32 indices=*i32 rows=*i32 width=i32 \
BLOCK=512 | 4
events.lists_triton | count | marks=*fp32 fired=*i32 entries=*i32 width=i32 BLOCK=512 | 4
events.lists_triton | fill | marks=*fp32 offsets=*i64 fired=*i32 indices=*i32 width=i32 \
BLOCK=512 | 4
events.products_triton | sum_listed | out=*fp32 weight=*fp32 bias=*fp32 indices=*i32 count=*i32 \
width=i32 \
HAS_BIAS=1 ROWS=32 BLOCK=64 | 4
events.products_triton | list_sites | spikes=*fp32 indices=*i32 count=*i32 width=i32 BLOCK=16384 | 4
events.lists_triton | describe | rows=*i32 values=None inputs=*i32 offsets=*i64 fired=*i32 \
indices=*i32 none=i32 BLOCK=256 | 1
events.lists_triton | describe | rows=*i64 values=None inputs=None offsets=*i64 fired=*i32 \
indices=*i32 none=i32 BLOCK=256 | 1
events.lists_triton | describe | rows=None values=*fp32 inputs=None offsets=*i64 fired=*i32 \
indices=*i32 none=i32 BLOCK=256 | 1
events.lists_triton | scatter | out=*fp32 values=*fp32 offsets=*i64 fired=*i32 indices=*i32 \
width=i32 BLOCK=256 | 1
events.lists_triton | scatter | out=*bf16 values=*bf16 offsets=*i64 fired=*i32 indices=*i32 \
width=i32 BLOCK=256 | 1
events.lists_triton | scatter | out=*fp16 values=None offsets=*i64 fired=*i32 indices=*i32 \
width=i32 BLOCK=256 | 1
events.lists_triton | place | places=*i64 before=*i64 offsets=*i64 BLOCK=256 | 1
events.lists_triton | merge | whole=*i32 values=*fp32 mine=*i64 indices=*i32 firsts=*i64 \
counts=*i32 starts=*i64 offsets=*i64 fired=*i32 ranks=i32 rows=i32 rank=i32 BLOCK=256 | 1
"""

CODE = """
import importlib, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for line in sys.stdin:
    module, name, arguments = line.split(" | ")
    kernel = getattr(importlib.import_module(f"spikefuse.{module}"), name)
    types = [argument.split("=")[1] for argument in arguments.split()]
    types = dict(zip(kernel.arg_names, types, strict=True))
    fixed = {n: eval(t) for n, t in types.items() if t == "None" or t.isdigit()}
    constants = {(i,): fixed[n] for i, n in enumerate(types) if n in fixed}
    sixteen = [["tt.divisibility", 16]]
    attributes = {(i,): sixteen for i, t in enumerate(types.values()) if t[0] in "*i"}
    types = {n: "constexpr" if n in fixed else t for n, t in types.items()}
    source = ASTSource(kernel, types, constants, attributes)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(name, max(w for w in (1, 2, 4) if w == 1 or f".v{w}.b32" in made.asm["ptx"]))
"""


def compiled(lines: str, cache: Path) -> list[str]:
    """The name of each kernel, and how many 32-bit words it reads or writes at a time."""
    unset = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", CODE],
        input=lines,
        env=unset | {"TRITON_CACHE_DIR": str(cache)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize(("dtype", "last"), [("fp32", 1), ("bf16", 0), ("fp16", 1)])
def test_kernels_compile(dtype: str, last: int, tmp_path: Path) -> None:
    lines = (
        KERNELS.strip().replace("\\\n", "").format(dtype=dtype, last=last, inner=48 if last else 1)
    )
    expected = [f"{line.split(' | ')[1]} 4" for line in lines.splitlines()]
    assert compiled(lines, tmp_path) == expected


def test_kernels_on_events_compile(tmp_path: Path) -> None:
    lines = EVENT_KERNELS.strip().replace("\\\n", "").splitlines()
    kernels, words = zip(*(line.rsplit(" | ", 1) for line in lines), strict=True)
    expected = [f"{k.split(' | ')[1]} {w}" for k, w in zip(kernels, words, strict=True)]
    assert compiled("\n".join(kernels), tmp_path) == expected
