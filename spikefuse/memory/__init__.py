"""Memory policies: what a network saves of its forward pass for backward."""

from spikefuse.memory.policies import POLICIES, Bits, Checkpoint, Policy, Recompute, SaveAll

__all__ = ["POLICIES", "Bits", "Checkpoint", "Policy", "Recompute", "SaveAll"]
