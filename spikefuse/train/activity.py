"""What the layers on events of a network do in training: their activity, and what restrains it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spikefuse.nn import EventLinear, Events
from spikefuse.train.processes import Processes


class Activity:
    """Watches the layers of `EventLinear` with neurons, from call to call of a network.

    Args:
        net: the network.
        capacity: see `EventLinear`; None: there is no penalty.
    """

    def __init__(self, net: nn.Module, capacity: float | None) -> None:
        found = [(n, m) for n, m in net.named_modules() if isinstance(m, EventLinear)]
        self.capacity = capacity
        self.readers = [module for _, module in found]
        self.last: dict[str, Events] = {}
        self.restart()
        for name, module in found:
            if module.neuron is not None:
                module.register_forward_hook(self._watch(name))

    def _watch(self, name: str) -> Any:
        def note(module: nn.Module, inputs: Any, output: Events) -> None:
            self.last[name] = output

        return note

    def restart(self) -> None:
        """Forget what `count` has counted."""
        # Numbers of spikes stay where they are counted until they are asked for.
        self._fired: dict[str, int | Tensor] = {}
        self._sites: dict[str, int] = {}
        self._dropped = 0
        self._read: int | Tensor = 0

    def count(self) -> None:
        """Add the last call to what `row` tells."""
        for name, events in self.last.items():
            self._fired[name] = self._fired.get(name, 0) + events.fired.sum()
            self._sites[name] = self._sites.get(name, 0) + events.num_rows * events.shape[2]
        for layer in self.readers:
            if layer.activity is not None:
                self._dropped += layer.activity.dropped
                self._read = self._read + layer.activity.spikes

    def row(
        self, processes: Processes | None = None, device: torch.device | None = None
    ) -> dict[str, float]:
        """The rate of each layer since `restart`, and the share of all spikes that were dropped.

        Args:
            processes: of the run, which all have to ask for it; None: this one alone.
            device: of the run.
        """
        if not self._sites:
            return {}
        fired = [int(number) for number in self._fired.values()]
        counts = torch.tensor(
            [*fired, *self._sites.values(), self._dropped, int(self._read)], device=device
        )
        if processes is not None:
            counts = processes.sum(counts)
        *layers, dropped, read = counts.tolist()
        pairs = zip(self._sites, layers, layers[len(fired) :], strict=False)
        rates = {f"activity_{name}": number / max(sites, 1) for name, number, sites in pairs}
        return {**rates, "dropped": dropped / max(read, 1)}

    def penalty(self) -> Tensor | None:
        """$\\sum_l \\max(0, r_l / c - 1/2)^2$ of the last call, with $r_l$ the rate of layer $l$
        and $c$ the capacity; None without one. Its gradient reaches the candidates of each layer.

        Half of the capacity, because the capacity is for every single step of every sample.
        """
        if self.capacity is None:
            return None
        total = None
        for events in self.last.values():
            if events.values is not None:
                rate = events.values.sum() / max(events.num_rows * events.shape[2], 1)
                term = torch.relu(rate / self.capacity - 0.5).square()
                total = term if total is None else total + term
        return total
