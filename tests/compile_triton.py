"""Compile Triton kernels for a GPU on a machine without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

CODE = """
import importlib, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for line in sys.stdin:
    module, name, arguments = line.split(" | ")
    kernel = getattr(importlib.import_module(f"spikefuse.{sys.argv[1]}.{module}"), name)
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


def compile_kernels(package: str, lines: str, cache: Path) -> list[str]:
    """Compile kernels for an H100 and report how wide their memory accesses are.

    Args:
        package: of spikefuse, which has the modules.
        lines: one kernel a line, `module | kernel | argument=type ...`. Numbers and None are
            constants; pointers and integers are multiples of 16.
        cache: directory for Triton's cache.

    Returns:
        For each kernel its name and the 32-bit words of its widest access.
    """
    unset = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", CODE, package],
        input=lines,
        env=unset | {"TRITON_CACHE_DIR": str(cache)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()
