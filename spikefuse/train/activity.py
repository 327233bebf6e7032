"""The activity of event layers and the firing rates of neurons during training, and penalties."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spikefuse.neurons import LI, Neuron
from spikefuse.nn import Block, EventLinear, Events, Recurrent
from spikefuse.train.processes import Processes


class RateMonitor:
    """Hold the spikes of neurons, recurrent layers and blocks in the last call in training.

    Neurons inside an event layer, which are not called, do not count. Nor do leaky integrators,
    which never fire.
    """

    def __init__(self, net: nn.Module) -> None:
        self.last: dict[str, Tensor] = {}
        self.num_layers = 0
        for name, module in net.named_modules():
            if isinstance(module, Neuron | Block | Recurrent) and not isinstance(module, LI):
                module.register_forward_hook(self._observe(name))
                self.num_layers += 1

    def _observe(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if module.training and torch.is_grad_enabled():
                self.last[name] = output[0] if isinstance(output, tuple) else output

        return hook

    def penalty(self) -> Tensor | None:
        """Compute $\\frac1L\\sum_l r_l$ for the most recent call, and release its spikes.

        $r_l$ is the firing rate of layer $l$ of $L$: its spikes of either sign per neuron and step.
        """
        # Not `abs`, whose gradient at 0 is 0.
        counts = [torch.where(s < 0, -s, s) for s in self.last.values()]
        rates = [count.mean(dtype=torch.float32) for count in counts]
        self.last.clear()
        return torch.stack(rates).mean() if rates else None


class ActivityMonitor:
    """Record the activity of all `EventLinear` layers that have neurons.

    Args:
        capacity: as in `EventLinear`; None disables the penalty.
    """

    def __init__(self, net: nn.Module, capacity: float | None) -> None:
        layers = {n: m for n, m in net.named_modules() if isinstance(m, EventLinear)}
        self.capacity, self.layers = capacity, list(layers.values())
        self.last: dict[str, Events] = {}
        self.restart()
        for name, layer in layers.items():
            if layer.neuron is not None:
                layer.register_forward_hook(self._observe(name))

    def _observe(self, name: str) -> Any:
        return lambda layer, inputs, output: self.last.update({name: output})

    def restart(self) -> None:
        # Counts of spikes remain on the device until `row` reads them.
        self._fired: dict[str, int | Tensor] = {}
        self._sites: dict[str, int] = {}
        self._dropped = 0
        self._read: int | Tensor = 0

    def count(self) -> None:
        """Add the most recent call of the network to the statistics."""
        for name, events in self.last.items():
            self._fired[name] = self._fired.get(name, 0) + events.fired.sum()
            self._sites[name] = self._sites.get(name, 0) + events.num_rows * events.shape[2]
        for layer in self.layers:
            if layer.activity is not None:
                self._dropped += layer.activity.dropped
                self._read = self._read + layer.activity.spikes

    def row(
        self, processes: Processes | None = None, device: torch.device | None = None
    ) -> dict[str, float]:
        """Return each layer's activity and the fraction of dropped spikes since `restart`.

        Args:
            processes: sum over these processes, all of which must call this; None for one only.
            device: device on which the processes sum.
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
        """Compute $\\sum_l \\max(0, r_l / c - 1/2)^2$ for the most recent call.

        $r_l$ is the activity of layer $l$ and $c$ the capacity; without one the result is None.
        The target is half the capacity, because the capacity limits every step of every sample.
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
