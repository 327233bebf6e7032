"""Memory policies: what a network saves of its forward pass for backward."""

from spikefuse.memory.policies import POLICIES, Auto, Bits, Checkpoint, Policy, Recompute, SaveAll

__all__ = ["POLICIES", "Auto", "Bits", "Checkpoint", "Policy", "Recompute", "SaveAll"]
