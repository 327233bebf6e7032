"""Imported by the server of the tests' processes before it forks any: what a first kernel and a
first captured graph import takes each process two seconds."""

import torch._functorch.partitioners
import torch._inductor.codecache  # noqa: F401
from numba.core.registry import cpu_target

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
