"""Replace integer spikes by binary ones over virtual time steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spikefuse._torch import children_of
from spikefuse.neurons.checks import check_tensor
from spikefuse.neurons.integer_lif import IntegerLIF
from spikefuse.nn.temporal import Temporal
from spikefuse.nn.virtual_steps import VirtualSteps
from spikefuse.transforms.copies import copied

_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
_LINEAR = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def unroll_integer_spikes(net: Temporal, x: Tensor) -> nn.Module:
    """Return a network for inference with the outputs of `net`, but binary spikes.

    Each time step becomes `levels` virtual ones, and an integer spike k of `IntegerLIF` a spike in
    each of the first k. A neuron sums its inputs over the virtual steps. Layers in between see
    binary spikes only; a share `1 / levels` of their biases is added in each virtual step.

    This holds if all layers between neurons are linear: convolutions, `nn.Linear`, batch norms in
    evaluation mode, average pooling, residual sums; or a max pooling that directly follows the
    neuron. The outputs for `x`, in double precision, show whether it does.

    Source: Luo et al., "Integer-Valued Training and Spike-Driven Inference Spiking Neural Network
    for High-performance and Energy-efficient Object Detection", ECCV 2024.

    Example::

        layers = nn.Linear(64, 32), sf.IntegerLIF(levels=4), nn.Linear(32, 10)
        net, x = sf.Temporal(nn.Sequential(*layers)), torch.rand(2, 8, 64)
        binary = sf.unroll_integer_spikes(net, x)
        torch.testing.assert_close(binary(x), net(x))

    Args:
        net: a network whose neurons are all `IntegerLIF`, and whose output is a tensor. It is
            copied, in evaluation mode.
        x: inputs `[T, B, ...]` with which the outputs are compared.

    Returns:
        A module with the inputs and outputs of `net`, whose `net` is a `Temporal` over `T * levels`
        steps.

    Raises:
        TypeError: `net` is not a `Temporal`, is `batch_first`, or has other neurons or none.
        ValueError: the outputs for `x` differ.
    """
    if not isinstance(net, Temporal) or net.batch_first:
        raise TypeError(f"net is {net!r}: expected a Temporal without batch_first")
    check_tensor("x", x, " [T, B, ...]")
    levels = 0
    for name, neuron in net.neurons().items():
        if not isinstance(neuron, IntegerLIF):
            raise TypeError(f"'{name}' is a {type(neuron).__name__}: expected IntegerLIF only")
        levels = max(levels, int(torch.as_tensor(neuron.levels).max()))
    if not levels:
        raise TypeError("net has no IntegerLIF")
    result = _Unrolled(copied(net).eval(), levels)
    _check(net, result, x)
    return result


class _Unrolled(nn.Module):
    """A network over virtual time steps, the first of which has the input."""

    def __init__(self, net: Temporal, levels: int) -> None:
        super().__init__()
        self.net, self.levels = net, levels
        for module in list(net.modules()):
            for name, child in children_of(module).items():
                if isinstance(child, IntegerLIF):
                    setattr(module, name, VirtualSteps(child, levels))
            shares = [module.bias] if isinstance(module, (*_LINEAR, *_BATCH_NORMS)) else []
            if isinstance(module, _BATCH_NORMS):
                shares.append(module.running_mean)
            for tensor in shares:
                if tensor is not None:
                    tensor.detach().div_(levels)

    def forward(self, x: Tensor, impl: str = "auto") -> Tensor:
        steps = x.new_zeros(len(x), self.levels, *x.shape[1:])
        steps[:, 0] = x
        y: Tensor = self.net(steps.flatten(0, 1), impl=impl)
        return y.unflatten(0, (len(x), self.levels)).sum(1)


@torch.no_grad()
def _check(net: Temporal, result: _Unrolled, x: Tensor) -> None:
    """Raise a ValueError unless both networks have the same outputs. Double precision, so that
    rounding does not move a potential across a threshold."""
    x = x.double()
    expected = copied(net).eval().double()(x, impl="reference")
    found = copied(result).double()(x, impl="reference")
    error, scale = (found - expected).abs().max().item(), expected.abs().max().item()
    if not error <= 1e-6 * scale:
        raise ValueError(
            f"the outputs for x differ by {error:.3g} with binary spikes: layers between neurons "
            "must be linear; activations, attention and layer norms are not, nor are sums with "
            "parameters of your own modules"
        )
