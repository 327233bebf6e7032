"""Recurrent layers on values whose sums are exact, and checks against the eager loop."""

import torch
from torch import nn

import spikefuse as sf
from spikefuse import reference
from spikefuse.testing import poisoned
from tests.grid import on_grid


class Scaled(sf.Neuron):
    """A neuron whose second output has parameters of its own, around those of the first."""

    v = sf.State()

    def __init__(self, value):
        super().__init__()
        self.gain, self.decay, self.offset = value(3.0), value(0.5), value(0.25)
        self.surrogate = sf.surrogate.Arctan(2.0)

    def step(self, x, v):
        h = self.decay * v + x
        s = self.surrogate(h - 1.0)
        return (s, self.gain * h + self.offset), (h * (1 - s),)


def layer(neuron, features, device="cpu", **options):
    """A layer whose weights are on the grid."""
    made = sf.Recurrent(neuron, features, **options).to(device)
    with torch.no_grad():
        width = made.weight.shape[-1]
        made.weight.copy_(on_grid(made.weight.shape, spread=min(0.5, 2 / width**0.5)))
        if made.bias is not None:
            made.bias.copy_(on_grid(made.bias.shape))
    return made


def inputs_of(neuron, shape, dtype, device):
    return [on_grid(shape, device, seed).to(dtype) for seed in range(len(neuron.input_names))]


def state_of(neuron, shape, device, dtype=torch.float32):
    states = [on_grid(shape, device, 20 + i) for i in range(len(neuron.states))]
    return (*states, (on_grid(shape, device, 30) > 0).float())


def tensors(result):
    return result if isinstance(result, tuple) else (result,)


def check_steps(made, inputs, state, impl, exact=True):
    """Each step from the kernel's own state and spikes equals the reference bit for bit.

    The states between steps are those of calls on parts of the sequence, which must equal one call.

    Args:
        exact: whether what is fed back is on the grid, so that sums do not depend on their order.
    """

    def agree(a, b):
        if exact:
            return torch.equal(a, b)
        # Products in another order may round to the next value of the inputs' dtype.
        tolerance = max(1e-5, torch.finfo(inputs[0].dtype).eps)
        return torch.allclose(a, b, rtol=tolerance, atol=tolerance)

    with torch.no_grad(), poisoned():
        whole, final = made(*inputs, state=state, return_state=True, impl=impl)
    for t in range(len(inputs[0])):
        now = [x[t : t + 1] for x in inputs]
        with torch.no_grad(), poisoned():
            y, after = made(*now, state=state, return_state=True, impl=impl)
            wanted, expected = made(*now, state=state, return_state=True, impl="reference")
        for a, b, c in zip(tensors(y), tensors(wanted), tensors(whole), strict=True):
            assert agree(a, b), f"step {t}: {(a != b).sum()} outputs differ"
            assert torch.equal(a[0], c[t]), f"step {t} differs from that of the whole sequence"
        for a, b in zip(after, expected, strict=True):
            assert agree(a, b), f"step {t}: states differ"
        state = after
    for a, b in zip(final, state, strict=True):
        assert torch.equal(a, b)


def check_gradients(made, inputs, state, impl, tolerance=2e-5):
    """Gradients are those of the eager loop in float64 that fires the kernel's own spikes."""
    xs = [x.detach().requires_grad_() for x in inputs]
    starts = None if state is None else [s.detach().requires_grad_() for s in state]
    leaves = [*xs, *(starts or ()), *made.parameters()]
    with poisoned():
        y, final = made(*xs, state=starts, return_state=True, impl=impl)
    ys = tensors(y)
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(r.shape, generator=generator).to(r.device) for r in (*ys, *final)]

    def gradients(results, leaves):
        pairs = zip(results, weights, strict=True)
        loss = sum((r.double() * w).sum() for r, w in pairs)
        return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    with poisoned():
        found = gradients([*ys, *final], leaves)
    expected, same = float64_gradients(made, xs, starts, ys, weights)
    assert same, "float64 fires other spikes: choose another seed"
    for leaf, a, b in zip(leaves, found, expected, strict=True):
        scale = b.abs().max().clamp(min=1e-3)
        error = ((a.double() - b).abs().max() / scale).item()
        assert a.dtype == leaf.dtype
        assert error <= tolerance, f"a gradient {list(a.shape)} errs by {error:.2g}"


def float64_gradients(made, xs, starts, ys, weights):
    """The gradients of the eager loop in float64, and whether its spikes are `ys`."""
    kind = ys[0].dtype
    doubles = [x.detach().double().requires_grad_() for x in xs]
    states = None if starts is None else [s.detach().double().requires_grad_() for s in starts]
    params = list(made.parameters())
    matrix = made.effective_weight(tuple(xs)).double()
    inputs = tuple(doubles)
    if made.bias is not None:
        inputs = (inputs[0] + made.bias.to(kind).double(), *inputs[1:])
    outputs, final = reference.scan(made.neuron, inputs, states, matrix)
    same = all(((a - b).abs() < 0.5).all() for a, b in zip(ys, outputs, strict=True))
    pairs = zip((*outputs, *final), weights, strict=True)
    loss = sum((r * w).sum() for r, w in pairs)
    leaves = [*doubles, *(states or ()), *params]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return grads, same


def network(norm=False):
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(20)] if norm else []
    layers = [nn.Linear(10, 20), *norms, sf.Recurrent(sf.LIF(0.75, 0.5), 20), nn.Linear(20, 4)]
    return sf.Temporal(nn.Sequential(*layers))
