"""Delays that are learned: one for each channel, or one for each synapse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spikefuse.neurons.checks import is_integer
from spikefuse.nn.over_time import OnSequences


class _Delays(OnSequences):
    """Base of layers with learned delays from 0 to `max_delay` steps."""

    def __init__(self, shape: tuple[int, ...], max_delay: int) -> None:
        super().__init__()
        if not all(is_integer(size, 1) for size in (max_delay, *shape)):
            raise ValueError(
                f"max_delay is {max_delay!r}, for delays of shape {list(shape)}: expected integers "
                "of at least 1"
            )
        self.history = self.max_delay = int(max_delay)
        self.delay = nn.Parameter(torch.rand(shape) * self.max_delay)

    def delays(self) -> Tensor:
        """Return the delays in steps, within `[0, max_delay]`, rounded in evaluation mode."""
        fixed = self.delay.detach()
        # Plus 0, with the gradient of the delay, so that one beyond a bound can return. A gradient
        # masked by its sign would not add up over several calls.
        delays = fixed.clamp(0, self.max_delay) + (self.delay - fixed)
        return delays if self.training else delays.round()


class Delay(_Delays):
    """Delay each channel by a number of time steps that is learned (axonal delays).

    Equation, for the delay `d` of a channel, between 0 and `max_delay`, with `k = floor(d)`::

        y[t] = (1 - (d - k)) x[t - k] + (d - k) x[t - k - 1]

    The input before the first step is 0. In evaluation mode, delays are rounded to integers, as
    hardware has them, and get no gradients: the layer is an exact delay line. `Temporal` and
    `Stream` carry the last `max_delay` steps of the input as its state, `[B, max_delay, C, ...]`.

    Shapes: `x`, `y`: `[T, B, C, ...]` (inside `Temporal` `[T*B, C, ...]`), of any dtype of floating
    point; `delay`, a parameter: `[channels]`, in steps, initialized uniformly. A delay outside of
    `[0, max_delay]` counts as the bound, and has the gradient of a delay there.

    Example::

        net = sf.Temporal(nn.Sequential(
            nn.Linear(100, 50), sf.LIF(), sf.Delay(50, max_delay=8), nn.Linear(50, 10), sf.LIF()))
        y = net(torch.rand(20, 4, 100))

    Args:
        channels: C, or 1 for one delay of all channels.
        max_delay: the largest delay, in steps.

    Raises:
        ValueError: an argument is not an integer of at least 1, or the input has other channels;
            the time of the network is shared.

    Source: Shrestha and Orchard, "SLAYER: Spike Layer Error Reassignment in Time", NeurIPS 2018
    (axonal delays); the interpolation is that of Queant et al., "DelRec: learning delays in
    recurrent spiking neural networks", 2025.
    """

    def __init__(self, channels: int, max_delay: int) -> None:
        super().__init__((channels,), max_delay)
        self.channels = channels

    def extra_repr(self) -> str:
        return f"{self.channels}, max_delay={self.max_delay}"

    def over_time(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if x.ndim < 3 or self.channels not in (1, x.shape[2]):
            raise ValueError(
                f"Delay: a step of the input has shape {list(x.shape[1:])}: expected "
                f"[B, {self.channels}, ...]"
            )
        d = self.delays().view(-1, *(1,) * (x.ndim - 3))
        whole = d.detach().floor().clamp(max=self.max_delay - 1)
        between = torch.lerp(x[1:], x[:-1], (d - whole).to(x.dtype))
        steps = torch.arange(self.max_delay - 1, len(x) - 1, device=x.device)
        index = steps.view(-1, *(1,) * (x.ndim - 1)) - whole.long()
        return between.gather(0, index.expand(-1, *x.shape[1:]))


class DelayedLinear(_Delays):
    """A linear layer whose synapses each have a weight and a delay, both learned.

    Equation, for the weight `w` and the delay `d` of each synapse from `j` to `i`::

        y[t, i] = bias[i] + sum_j sum_k w[i, j] g[i, j, k] x[t - k, j],   k = 0, ..., max_delay

    In training, `g[i, j]` is a bump around `d[i, j]` whose sum is 1: `"gaussian"`, proportional to
    `exp(-(k - d)^2 / (2 sigma^2))`, or `"triangular"`, to `max(0, 1 - |k - d| / (1 + sigma))`, the
    linear interpolation if sigma is 0. A wide bump gives a delay gradients from many steps. Make it
    narrower as training proceeds, `layer.sigma.fill_(...)`, the Gaussian down to about 0.5: in
    evaluation mode, delays are rounded to integers and get no gradients, and each synapse is an
    exact delay line.

    It runs as one convolution over time. The input before the first step is 0. `Temporal` and
    `Stream` carry the last `max_delay` steps of the input as its state, `[B, max_delay,
    in_features]`.

    Shapes: `x`, `y`: `[T, B, in_features]`, `[T, B, out_features]` (in `Temporal` `[T*B, ...]`),
    of the dtype of the weights; the parameters `weight` and `delay`: `[out_features, in_features]`,
    `bias`: `[out_features]`; `sigma`, a buffer: a number of steps. Weights begin as those of
    `nn.Linear`, delays uniformly distributed. A delay outside of `[0, max_delay]` counts as the
    bound, and has the gradient of a delay there.

    Example::

        layer = sf.DelayedLinear(140, 256, max_delay=24)
        net = sf.Temporal(nn.Sequential(layer, sf.LIF(), nn.Linear(256, 20)))
        logits = net(torch.rand(100, 4, 140)).mean(0)
        layer.sigma.mul_(0.95)  # after each epoch

    Args:
        in_features, out_features, bias: see `nn.Linear`.
        max_delay: the largest delay, in steps.
        kernel: `"gaussian"` or `"triangular"`.
        sigma: the width of the bump before training; `max_delay / 2` by default.

    Raises:
        ValueError: an argument is out of range, or the input has another shape; the time of the
            network is shared.

    Source: Hammouamri, Khalfaoui-Hassani and Masquelier, "Learning Delays in Spiking Neural
    Networks using Dilated Convolutions with Learnable Spacings", ICLR 2024.
    """

    sigma: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        max_delay: int,
        bias: bool = True,
        kernel: str = "gaussian",
        sigma: float | None = None,
    ) -> None:
        super().__init__((out_features, in_features), max_delay)
        sigma = max_delay / 2 if sigma is None else float(sigma)
        is_known = kernel in ("gaussian", "triangular")
        if not is_known or sigma < 0 or (sigma == 0 and kernel == "gaussian"):
            raise ValueError(
                f"kernel is {kernel!r}, sigma {sigma}: expected 'gaussian' and a positive number "
                "of steps, or 'triangular', whose sigma may be 0"
            )
        self.in_features, self.out_features, self.kernel = in_features, out_features, kernel
        linear = nn.Linear(in_features, out_features, bias)
        self.weight, self.bias = linear.weight, linear.bias
        self.register_buffer("sigma", torch.tensor(sigma))

    def extra_repr(self) -> str:
        options = f"bias={self.bias is not None}, kernel={self.kernel!r}"
        return f"{self.in_features}, {self.out_features}, max_delay={self.max_delay}, {options}"

    def taps(self) -> Tensor:
        """Return the weights `[out_features, in_features, max_delay + 1]` of the steps that an
        output sees, the earliest first."""
        # Half precision has no integers beyond 256, or 2048: several lags would be one delay.
        dtype = torch.promote_types(self.delay.dtype, torch.float32)
        lags = torch.arange(self.max_delay, -1, -1, dtype=dtype, device=self.delay.device)
        distance = lags - self.delays().to(dtype).unsqueeze(-1)
        if not self.training:
            bump: Tensor = distance == 0
        elif self.kernel == "gaussian":
            bump = (distance / self.sigma).square().mul(-0.5).softmax(-1)
        else:
            bump = (1 - distance.abs() / (1 + self.sigma)).clamp(min=0)
            bump = bump / bump.sum(-1, keepdim=True)
        return self.weight.unsqueeze(-1) * bump.to(self.weight.dtype)

    def over_time(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if x.ndim != 3 or x.shape[2] != self.in_features:
            raise ValueError(
                f"DelayedLinear: a step of the input has shape {list(x.shape[1:])}: expected "
                f"[B, {self.in_features}]"
            )
        if not x.shape[1]:  # a convolution takes no empty image
            return F.linear(x[self.max_delay :], self.taps().sum(-1), self.bias)
        # Time and batch as the dims of an image whose memory is channels-last: nothing is copied.
        image, taps = x.permute(2, 0, 1).unsqueeze(0), self.taps().unsqueeze(-1)
        return F.conv2d(image, taps, self.bias).squeeze(0).permute(1, 2, 0)
