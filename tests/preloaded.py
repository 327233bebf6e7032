"""Imports what a first kernel and a first captured graph need, and fills Numba's registries.

The server of the tests' processes imports it before it forks them: each would take half a second.
"""

import torch._functorch.partitioners
import torch._inductor.codecache  # noqa: F401
from numba.core.registry import cpu_target

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
