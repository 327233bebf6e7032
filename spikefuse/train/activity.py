"""The activity of event layers and the firing rates of neurons during training, and penalties."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spikefuse.events.linear import InputActivity
from spikefuse.neurons import Neuron, RateIF
from spikefuse.neurons.definition import FIRST_OUTPUT, SpikingLayer, channel_view
from spikefuse.nn import Block, EventLinear, Events, Feedback, Recurrent
from spikefuse.nn.neuron import fires
from spikefuse.train.processes import Processes

#: Layers that run their neuron without a call of it, and return its spikes.
LAYERS_WITH_A_NEURON = (Block, Recurrent, Feedback)


class RateMonitor:
    """Hold the spikes of neurons, and of layers that return spikes, in the last call of a network
    in training, in which a layer may be called several times.

    Neurons inside an event layer, which are not called, do not count. Nor do those that never fire,
    such as leaky integrators, and calls whose `outputs` have no spikes.
    """

    def __init__(self, net: nn.Module) -> None:
        self.last: dict[str, list[Tensor]] = {}
        self.num_layers = 0
        for name, module in net.named_modules():
            neuron = module.neuron if isinstance(module, LAYERS_WITH_A_NEURON) else module
            is_firing = isinstance(neuron, Neuron) and fires(neuron) is not False
            if is_firing or isinstance(module, SpikingLayer):
                module.register_forward_hook(self._observe(name, neuron), with_kwargs=True)
                self.num_layers += 1
        net.register_forward_pre_hook(self._begin())

    def _begin(self) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            if _is_training(module):
                self.last.clear()

        return hook

    def _observe(self, name: str, neuron: nn.Module) -> Any:
        def hook(module: nn.Module, inputs: Any, options: dict[str, Any], output: Any) -> None:
            spikes = _spikes_in(output, **options)
            if spikes is not None and _is_training(module):
                if isinstance(neuron, RateIF):  # whose spikes have the height of the threshold
                    height = torch.as_tensor(neuron.values()["threshold"]).detach()
                    spikes = spikes / channel_view("threshold", height, spikes.shape)
                self.last.setdefault(name, []).append(spikes)

        return hook

    def penalty(self) -> Tensor | None:
        """Compute $\\frac1L\\sum_l r_l$ for the most recent call, and release its spikes.

        $r_l$ is the firing rate of layer $l$ of $L$: its spikes of either sign per neuron and step,
        of all its calls.
        """
        rates = []
        for calls in self.last.values():
            # Not `abs`, whose gradient at 0 is 0.
            counts = [torch.where(s < 0, -s, s).sum(dtype=torch.float32) for s in calls]
            rates.append(torch.stack(counts).sum() / max(sum(s.numel() for s in calls), 1))
        self.last.clear()
        return torch.stack(rates).mean() if rates else None


class ActivityMonitor:
    """Record the activity of all `EventLinear` layers that have neurons.

    Args:
        capacity: as in `EventLinear`; None disables the penalty.
    """

    def __init__(self, net: nn.Module, capacity: float | None) -> None:
        layers = {n: m for n, m in net.named_modules() if isinstance(m, EventLinear)}
        self.capacity = capacity
        # Of each call in the last call of the network.
        self.last: dict[str, list[Events]] = {}
        self.inputs: list[InputActivity] = []
        self.restart()
        if layers:
            net.register_forward_pre_hook(self._begin())
        for name, layer in layers.items():
            layer.register_forward_hook(self._observe(name))

    # A function, not a method, which copies of the network would copy with this object.
    def _begin(self) -> Any:
        def hook(net: nn.Module, inputs: Any) -> None:
            self.last.clear()
            self.inputs.clear()

        return hook

    def _observe(self, name: str) -> Any:
        def hook(layer: Any, inputs: Any, output: Any) -> None:
            if layer.neuron is not None:
                self.last.setdefault(name, []).append(output)
            if layer.activity is not None and layer.capacity is not None:
                self.inputs.append(layer.activity)

        return hook

    def restart(self) -> None:
        # Numbers of events, and of possible ones, which stay on the device until `row` reads them.
        self._shares: dict[str, tuple[int | Tensor, int | Tensor]] = {}

    def count(self) -> None:
        """Add the most recent call of the network to the statistics."""
        for name, calls in self.last.items():
            for events in calls:
                self._add(f"activity_{name}", events.fired.sum(), _sites(events))
        for read in self.inputs:
            self._add("dropped", read.dropped, read.spikes)

    def _add(self, name: str, part: int | Tensor, whole: int | Tensor) -> None:
        before = self._shares.get(name, (0, 0))
        self._shares[name] = before[0] + part, before[1] + whole

    def row(
        self, processes: Processes | None = None, device: torch.device | None = None
    ) -> dict[str, float]:
        """Return each layer's activity since `restart`, and the fraction of the spikes that layers
        with a capacity have dropped.

        Args:
            processes: sum over these processes, all of which must call this; None for one only.
            device: device on which the processes sum.
        """
        if not self._shares:
            return {}
        shares = [[int(part), int(whole)] for part, whole in self._shares.values()]
        counts = torch.tensor(shares, device=device)
        if processes is not None:
            counts = processes.sum(counts)
        pairs = zip(self._shares, counts.tolist(), strict=True)
        return {name: part / max(whole, 1) for name, (part, whole) in pairs}

    def penalty(self, processes: Processes | None = None) -> Tensor | None:
        """Compute $\\sum_l \\max(0, r_l / c - 1/2)^2$ for the most recent call.

        $r_l$ is the activity of layer $l$ and $c$ the capacity; without one the result is None.
        The target is half the capacity, because the capacity limits every step of every sample.

        Args:
            processes: compute the activity of all of these, each of which must call this method and
                whose gradients must be averaged; None for one only.
        """
        if self.capacity is None:
            return None
        spikes, sites = [], []
        for calls in self.last.values():
            values = [events.values.sum() for events in calls if events.values is not None]
            if values:
                spikes.append(torch.stack(values).sum())
                sites.append(max(sum(map(_sites, calls)), 1))
        if not spikes:
            return None
        # Filled on the device: a copy of a list would wait for it.
        filled = [count.new_full((), n) for count, n in zip(spikes, sites, strict=True)]
        counts = torch.stack([torch.stack(spikes), torch.stack(filled)])
        rates = counts[0] / counts[1]
        if processes is not None:
            spikes_of_all, sites_of_all = processes.sum(counts.detach())
            # The value of all processes, with the gradient of this one.
            rates = spikes_of_all / sites_of_all + (rates - rates.detach())
        return torch.relu(rates / self.capacity - 0.5).square().sum()


def _spikes_in(
    output: Any, outputs: tuple[str, ...] = (), return_state: bool = False, **options: Any
) -> Tensor | None:
    """Return the spikes in the output of a layer that was called with these options, if any."""
    if return_state:
        output = output[0]
    if not outputs:
        return output[0] if isinstance(output, tuple) else output
    named = dict(zip(outputs, output, strict=True))
    return named.get("spikes", named.get(FIRST_OUTPUT))


def _is_training(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


def _sites(events: Events) -> int:
    """The number of possible events."""
    return events.num_rows * events.shape[2]
