"""Short-term plasticity of synapses."""

from __future__ import annotations

from torch import Tensor

from spikefuse.neurons.definition import Neuron, State, States
from spikefuse.neurons.parameters import Value, fraction


class ShortTermPlasticity(Neuron):
    """Synapse whose efficacy depends on the last presynaptic spikes: facilitation and depression.

    Equation, per time step, with presynaptic spike `x`, utilization `u`, resources `r`, output
    `y`::

        u = facilitation_decay * u
        u = u + utilization * (1 - u) * x
        y = u * r * x
        r = 1 - recovery_decay * (1 - r + y)

    The resources begin at 1. Put it between spikes and weights, so that all synapses of a neuron
    have the same efficacy.

    Shapes: `x`, `y`: `[T, B, ...]` (float32, bfloat16 or float16); `u`, `r`: `[B, ...]` (float32).

    Source: Tsodyks, Pawelzik and Markram, "Neural Networks with Dynamic Synapses", Neural
    Computation 10, 1998 (its U is `utilization`).

    Example::

        synapse = sf.ShortTermPlasticity(0.5, facilitation_decay=0.0, recovery_decay=0.99)
        net = sf.Temporal(nn.Sequential(synapse, nn.Linear(100, 10), sf.LIF(0.9)))
        spikes = net((torch.rand(50, 32, 100) < 0.1).float())

    Args:
        utilization: share of the resources that the first spike uses, in [0, 1].
        facilitation_decay: factor of the previous utilization, in [0, 1]; 0 for a depressing
            synapse.
        recovery_decay: factor of the missing resources, in [0, 1].

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    u, r = State(), State(1.0)

    def __init__(
        self,
        utilization: Value = 0.5,
        facilitation_decay: Value = 0.95,
        recovery_decay: Value = 0.95,
    ) -> None:
        super().__init__()
        self.utilization = self._option("utilization", utilization, fraction)
        self.facilitation_decay = self._option("facilitation_decay", facilitation_decay, fraction)
        self.recovery_decay = self._option("recovery_decay", recovery_decay, fraction)

    def step(self, x: Tensor, u: Tensor, r: Tensor) -> tuple[Tensor, States]:
        u = self.facilitation_decay * u
        u = u + self.utilization * (1 - u) * x
        y = u * r * x
        self.expose(h=y)
        return y, (u, 1 - self.recovery_decay * (1 - r + y))
