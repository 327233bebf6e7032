"""Memory policies: what a network saves of its forward pass for backward."""

from spikefuse.memory import saved_tensors as saved_tensors  # sets former names
from spikefuse.memory.policies import POLICIES, Auto, Bits, Checkpoint, Policy, Recompute, SaveAll

__all__ = ["POLICIES", "Auto", "Bits", "Checkpoint", "Policy", "Recompute", "SaveAll"]
