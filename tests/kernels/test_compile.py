"""Hand-written Triton kernels, compiled for a GPU where there is none: the interpreter, which runs
them in the other tests, accepts more than the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]

# module | its kernel | types of its arguments; all of 16 where they are addresses or numbers
KERNELS = """
bits_triton | pack_kernel | x=*{dtype} bits=*u8 num=i32 BLOCK=512
bits_triton | unpack_kernel | bits=*u8 x=*{dtype} num=i64 BLOCK=512
"""

CODE = """
import importlib, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for line in sys.stdin:
    module, name, arguments = line.split(" | ")
    kernel = getattr(importlib.import_module(f"spikefuse.kernels.{module}"), name)
    types = dict(argument.split("=") for argument in arguments.split())
    constants = {(i,): int(t) for i, t in enumerate(types.values()) if t.isdigit()}
    sixteen = [["tt.divisibility", 16]]
    attributes = {(i,): sixteen for i in range(len(types)) if (i,) not in constants}
    types = {n: "constexpr" if t.isdigit() else t for n, t in types.items()}
    source = ASTSource(kernel, types, constants, attributes)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(name, max(w for w in (1, 2, 4) if w == 1 or f".v{w}.b32" in made.asm["ptx"]))
"""


def compiled(lines: str, cache: Path) -> list[str]:
    """Each kernel's name, and the 32-bit words that it reads or writes at a time."""
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


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_kernels_compile(dtype: str, tmp_path: Path) -> None:
    lines = KERNELS.strip().format(dtype=dtype)
    expected = [f"{line.split(' | ')[1]} 4" for line in lines.splitlines()]
    assert compiled(lines, tmp_path) == expected
