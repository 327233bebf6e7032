"""Integer spikes as binary ones over virtual time steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spikefuse.neurons.definition import FIRST_OUTPUT
from spikefuse.neurons.integer_lif import IntegerLIF
from spikefuse.nn.neuron import call_neuron, scan_neuron
from spikefuse.nn.symbolic import leaf
from spikefuse.scan.records import Arguments, Results, Wanted


class VirtualSteps(nn.Module):
    """An `IntegerLIF` whose inputs and outputs are spread over virtual time steps."""

    def __init__(self, neuron: IntegerLIF, levels: int) -> None:
        super().__init__()
        self.neuron, self.levels = neuron, levels

    @leaf
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = call_neuron(self.neuron, self.scan, Arguments([x]), Wanted())
        return y

    def scan(self, arguments: Arguments[Tensor], wanted: Wanted) -> Results[Tensor]:
        """Run the neuron on the sums of virtual steps, which all have the states after them."""
        (x,) = arguments.inputs  # whose last virtual steps may be missing
        sums = torch.stack([steps.sum(0) for steps in x.split(self.levels)])
        results = scan_neuron(self.neuron, arguments._replace(inputs=[sums]), wanted)
        number = torch.arange(self.levels, device=x.device).view(-1, *(1,) * (x.ndim - 1))
        spread = []
        for name, y in zip(wanted.outputs or (FIRST_OUTPUT,), results.outputs, strict=True):
            steps = y.unsqueeze(1).expand(-1, self.levels, *y.shape[1:])
            if name in ("spikes", FIRST_OUTPUT):
                steps = (steps > number).to(x.dtype)
            spread.append(steps.flatten(0, 1)[: len(x)])
        return results._replace(outputs=spread)
