"""The eager loop: dtypes, states, gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, stack_module_state, vmap

import spikefuse as sf
from spikefuse import LIF, PLIF, Neuron, State, reference


class Leaky(Neuron):
    """A smooth neuron without spikes: v = d v + x^2, output v tanh(x)."""

    v = State(0.5)

    def __init__(self, decay: float | Tensor = 0.5) -> None:
        super().__init__()
        self.decay = decay

    def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        v = self.decay * v + x * x
        return v * torch.tanh(x), (v,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_arithmetic_is_float32(dtype: torch.dtype) -> None:
    x = torch.linspace(-2, 2, 24).view(4, 2, 3).to(dtype)
    (low,), (v,) = reference.scan(Leaky(0.3), (x,))
    (full,), (expected,) = reference.scan(Leaky(0.3), (x.float(),))
    assert (low.dtype, v.dtype) == (dtype, torch.float32)
    assert torch.equal(low, full.to(dtype))
    assert torch.equal(v, expected)


def test_float64_arithmetic() -> None:
    x = torch.linspace(-2, 2, 24, dtype=torch.float64).view(4, 2, 3)
    (y,), (v,) = reference.scan(Leaky(0.1), (x,))
    assert y.dtype == v.dtype == torch.float64
    state = torch.full((2, 3), 0.5, dtype=torch.float64)
    for step, found in zip(x, y, strict=True):
        state = 0.1 * state + step**2
        assert torch.equal(found, state * step.tanh())
    assert torch.equal(v, state)


@pytest.mark.parametrize(
    ("first", "second", "out"),
    [
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.float16, torch.float16),
        (torch.float32, torch.float64, torch.float64),
    ],
)
def test_inputs_of_different_dtypes(
    first: torch.dtype, second: torch.dtype, out: torch.dtype
) -> None:
    class Sum(Neuron):
        def step(self, x: Tensor, z: Tensor) -> tuple[Tensor, tuple[()]]:
            return x + z, ()

    x = torch.ones(2, 1, dtype=first), torch.ones(2, 1, dtype=second)
    (y,), state = reference.scan(Sum(), x)
    assert y.dtype == out
    assert y.tolist() == [[2.0], [2.0]]
    assert state == ()


def test_starts_from_rest_or_from_a_state() -> None:
    x = torch.zeros(1, 1, 2)
    _, (v,) = reference.scan(Leaky(0.5), (x,))
    assert v.tolist() == [[0.25, 0.25]]
    _, (v,) = reference.scan(Leaky(0.5), (x,), (torch.tensor([[2.0, -4.0]]),))
    assert v.tolist() == [[1.0, -2.0]]


def test_a_state_of_lower_precision_is_promoted() -> None:
    x = torch.zeros(1, 1, 1)
    _, (v,) = reference.scan(Leaky(0.5), (x,), (torch.ones(1, 1, dtype=torch.bfloat16),))
    assert v.dtype == torch.float32


def test_gradients_of_the_smooth_part_by_differences() -> None:
    """Compare all gradients with central differences in float64."""
    x = torch.linspace(-1, 1.5, 12, dtype=torch.float64).view(3, 2, 2)
    v = torch.linspace(0, 1, 4, dtype=torch.float64).view(2, 2)
    decay = torch.tensor([0.3, 0.8], dtype=torch.float64)
    weight = torch.linspace(-1, 2, 12, dtype=torch.float64).view(3, 2, 2)

    def loss(x: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        (y,), (final,) = reference.scan(Leaky(decay), (x,), (v,))
        return (weight * y).sum() + final.square().sum()

    leaves = [t.clone().requires_grad_() for t in (x, v, decay)]
    loss(*leaves).backward()
    for place, leaf in enumerate(leaves):
        assert leaf.grad is not None
        for i in range(leaf.numel()):
            shifted = []
            for step in (1e-5, -1e-5):
                values = [t.detach().clone() for t in leaves]
                values[place].view(-1)[i] += step
                shifted.append(loss(*values).item())
            difference = (shifted[0] - shifted[1]) / 2e-5
            assert leaf.grad.view(-1)[i].item() == pytest.approx(difference, rel=1e-6, abs=1e-8)


def test_a_channel_parameter_belongs_to_dim_2() -> None:
    decay = torch.tensor([0.0, 0.5, 1.0])
    x = torch.ones(2, 4, 3, 5)
    _, (v,) = reference.scan(LIF(decay=decay, threshold=9.0), (x,))
    assert torch.equal(v, torch.tensor([1.0, 1.5, 2.0]).view(3, 1).expand(4, 3, 5))


@pytest.mark.parametrize(("shape", "channels"), [((2, 4, 5), "5"), ((2, 4), "none")])
def test_wrong_number_of_channels(shape: tuple[int, ...], channels: str) -> None:
    with pytest.raises(ValueError, match=rf"'decay' has shape \[3\].*has C = {channels}\)"):
        reference.scan(PLIF(channels=3), (torch.ones(shape),))


def test_several_outputs() -> None:
    class Both(Neuron):
        v = State()

        def step(self, x: Tensor, v: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor]]:
            return (x + v, x - v), (x,)

    x = torch.tensor([[1.0], [2.0]])
    outputs, (v,) = reference.scan(Both(), (x,))
    assert [y.tolist() for y in outputs] == [[[1.0], [3.0]], [[1.0], [1.0]]]
    assert v.tolist() == [2.0]


LEARNED = {
    "PLIF": lambda: sf.PLIF(threshold=0.3),
    "learned surrogate": lambda: sf.LIF(
        threshold=sf.LearnablePositive(0.3),
        surrogate=sf.surrogate.FastSigmoid(sf.LearnablePositive(3.0, 8), cutoff=-0.3),
    ),
    "Recurrent": lambda: sf.Recurrent(sf.LIF(threshold=0.3), 8),
}


# PyTorch compiles decompositions for jacfwd with torch.jit.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", LEARNED)
def test_function_transforms(name):
    torch.manual_seed(0)
    nets = [
        sf.Temporal(nn.Sequential(nn.Linear(6, 8), LEARNED[name](), nn.Linear(8, 3)))
        for _ in range(2)
    ]
    x, call = torch.rand(5, 4, 6), partial(functional_call, nets[0], kwargs={"impl": "reference"})

    def loss(params, x):
        return call(params, (x,)).square().sum()

    def gradients(net, x):
        y = net(x, impl="reference").square().sum()
        return torch.autograd.grad(y, list(net.parameters()))

    params, _ = stack_module_state(nets)
    by_model = vmap(grad(loss), in_dims=(0, None))(params, x)
    for i, net in enumerate(nets):
        torch.testing.assert_close([g[i] for g in by_model.values()], [*gradients(net, x)])
    own = dict(nets[0].named_parameters())
    by_sample = vmap(grad(loss), in_dims=(None, 1))(own, x.unsqueeze(2))
    for i in range(4):
        expected = gradients(nets[0], x[:, i : i + 1])
        torch.testing.assert_close([g[i] for g in by_sample.values()], [*expected])
    forward, reverse = (jac(lambda p: call(p, (x,)).sum(0))(own) for jac in (jacfwd, jacrev))
    torch.testing.assert_close(forward, reverse)
    sums = [
        torch.autograd.functional.jacobian(
            lambda x: nets[0](x, impl="reference").sum(0), x, vectorize=is_vectorized
        )
        for is_vectorized in (False, True)
    ]
    torch.testing.assert_close(*sums)
