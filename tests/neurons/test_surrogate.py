"""Surrogates: spikes, derivatives, primals, cutoffs, learned parameters, kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.neurons import surrogate
from spikefuse.neurons.surrogate import (
    Arctan,
    Custom,
    Erf,
    FastSigmoid,
    Gaussian,
    MultiGaussian,
    PiecewiseQuadratic,
    Rectangle,
    Sigmoid,
    StraightThrough,
    Surrogate,
    Triangle,
)
from spikefuse.testing import Backends, assert_matches_reference, make_input, run

# Every surrogate with its parameters by name: those that can be learned, and the others.
LEARNED: dict[type[Surrogate], dict[str, float]] = {
    Sigmoid: {"width": 3.0},
    Arctan: {"width": 2.5},
    FastSigmoid: {"width": 4.0, "height": 0.8},
    PiecewiseQuadratic: {"width": 0.7},
    Triangle: {"width": 1.3, "height": 0.6},
    Rectangle: {"left": -0.6, "right": 0.8, "height": 0.9},
    Gaussian: {"width": 0.6},
    Erf: {"width": 1.7},
    StraightThrough: {},
    MultiGaussian: {"width": 0.4, "spread": 3.0},
}
FIXED: dict[type[Surrogate], dict[str, float]] = {
    Gaussian: {"scale": 0.5},
    MultiGaussian: {"share": 0.2, "scale": 0.7},
}
KINDS = list(LEARNED)
WITH_WIDTH = [kind for kind in KINDS if "width" in LEARNED[kind]]
ALL = [kind() for kind in KINDS]
IDS = [kind.__name__ for kind in KINDS]
# None of these is a kink of a surrogate.
POINTS = torch.linspace(-2.03, 2.01, 57, dtype=torch.float64)


def make(kind: type[Surrogate], cutoff: Any = None, **values: Any) -> Surrogate:
    return kind(**{**LEARNED[kind], **FIXED.get(kind, {}), **values}, cutoff=cutoff)


def gradient(spike: Surrogate, *u: float) -> list[float]:
    """Return the gradient by autograd, in float64."""
    x = torch.tensor(u, dtype=torch.float64, requires_grad=True)
    spike(x).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


@pytest.mark.parametrize("spike", ALL, ids=IDS)
def test_fires_at_zero_and_above(spike: Surrogate) -> None:
    tiny = torch.finfo(torch.float32).smallest_normal
    u = torch.tensor([-1.0, -tiny, -0.0, 0.0, tiny, 1.0, math.inf, -math.inf, math.nan])
    assert spike(u).tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("spike", ALL, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_keeps_dtype(spike: Surrogate, dtype: torch.dtype) -> None:
    u = torch.tensor([-0.25, 0.25], dtype=dtype, requires_grad=True)
    s = spike(u)
    s.sum().backward()
    assert s.dtype == dtype
    assert u.grad is not None
    assert u.grad.dtype == dtype


@pytest.mark.parametrize(
    ("spike", "u", "expected"),
    [
        (Sigmoid(4.0), 0.0, 1.0),
        (Sigmoid(2.0), math.log(3) / 2, 2 * 0.75 * 0.25),
        (Sigmoid(2.0), -math.log(3) / 2, 2 * 0.75 * 0.25),
        (Arctan(2.0), 0.0, 1.0),
        (Arctan(2.0), 1 / math.pi, 0.5),
        (Arctan(4.0), -1 / math.pi, 2 / 5),
        (FastSigmoid(10.0), 0.0, 1.0),
        (FastSigmoid(10.0), 0.1, 0.25),
        (FastSigmoid(2.0, 3.0), -1.5, 3 / 16),
        (PiecewiseQuadratic(2.0), 0.0, 2.0),
        (PiecewiseQuadratic(2.0), -0.25, 1.0),
        (PiecewiseQuadratic(2.0), 0.75, 0.0),
        (Rectangle(-0.25, 0.5, 2.0), 0.0, 2.0),
        (Rectangle(-0.25, 0.5, 2.0), -0.25, 0.0),
        (Rectangle(-0.25, 0.5, 2.0), 0.5, 0.0),
        (Rectangle(-0.25, 0.5, 2.0), 0.49, 2.0),
        (Triangle(2.0, 0.3), 0.0, 0.3),
        (Triangle(2.0, 0.3), -1.0, 0.15),
        (Triangle(2.0, 0.3), 2.5, 0.0),
        (Gaussian(0.5, 3.0), 0.0, 6 / math.sqrt(2 * math.pi)),
        (Gaussian(2.0), -2.0, 0.5 * math.exp(-0.5) / math.sqrt(2 * math.pi)),
        (Erf(2.0), 0.0, 2 / math.sqrt(math.pi)),
        (Erf(2.0), 0.5, 2 * math.exp(-1) / math.sqrt(math.pi)),
        (StraightThrough(), -7.0, 1.0),
        (
            MultiGaussian(1.0, share=0.25, spread=2.0, scale=3.0),
            1.0,
            (3.75 * math.exp(-0.5) - 0.375 * (1 + math.exp(-0.5))) / math.sqrt(2 * math.pi),
        ),
    ],
)
def test_derivative_by_hand(spike: Surrogate, u: float, expected: float) -> None:
    assert gradient(spike, u) == [pytest.approx(expected, rel=1e-12)]


@pytest.mark.parametrize(
    ("spike", "area"),
    [
        (Sigmoid(4.0), 1.0),
        (Sigmoid(0.5), 1.0),
        (Arctan(2.0), 1.0),
        (Arctan(5.0), 1.0),
        (FastSigmoid(10.0), 2 / 10),
        (PiecewiseQuadratic(3.0), 1.0),
        (Rectangle(-0.5, 1.0, 2.0), 3.0),
        (Triangle(0.5, 3.0), 1.5),
        (Gaussian(0.3), 1.0),
        (Erf(0.7), 1.0),
        (MultiGaussian(0.3, share=0.1, spread=2.0), 0.9),
    ],
)
def test_area(spike: Surrogate, area: float) -> None:
    # Substitute u = tan z, with z in (-pi/2, pi/2); the midpoint rule excludes the ends.
    n = 200_000
    z = (torch.arange(n, dtype=torch.float64) + 0.5) / n * math.pi - math.pi / 2
    integral = (spike.derivative(z.tan()) / z.cos() ** 2).sum() * math.pi / n
    assert integral.item() == pytest.approx(area, rel=1e-4)


# The equations of other libraries, and the equivalent surrogates here.
SAME: dict[str, tuple[Surrogate, Callable[[Tensor], Tensor]]] = {
    "SpikingJelly Sigmoid": (Sigmoid(3.0), lambda u: 3 * (3 * u).sigmoid() * (-3 * u).sigmoid()),
    "SpikingJelly ATan": (Arctan(3.0), lambda u: 1.5 / (1 + (1.5 * math.pi * u) ** 2)),
    "SpikingJelly SoftSign": (FastSigmoid(3.0, 1.5), lambda u: 1 / (6 * (1 / 3 + u.abs()) ** 2)),
    "SpikingJelly SuperSpike": (FastSigmoid(1.0, 3.0), lambda u: 3 / (1 + u.abs()) ** 2),
    "SpikingJelly PiecewiseQuadratic": (
        PiecewiseQuadratic(3.0),
        lambda u: torch.where(3 * u.abs() <= 1, 3 - 9 * u.abs(), 0.0),
    ),
    "SpikingJelly Erf": (Erf(3.0), lambda u: 3 / math.sqrt(math.pi) * torch.exp(-9 * u * u)),
    "SpikingJelly Rect": (Rectangle(-0.25, 0.25, 2.0), lambda u: 2.0 * (u.abs() < 0.25)),
    "snnTorch fast_sigmoid": (FastSigmoid(25.0), lambda u: 1 / (25 * u.abs() + 1) ** 2),
    "snnTorch SFS": (
        FastSigmoid(25.0, cutoff=-0.3),
        lambda u: (u > -0.3) / (25 * u.abs() + 1) ** 2,
    ),
    "snnTorch heaviside": (StraightThrough(cutoff=0.0), lambda u: 1.0 * (u > 0)),
    "Norse triangle": (Triangle(1.0, 0.3), lambda u: 0.3 * torch.relu(1 - u.abs())),
    "Norse heavi_erfc": (
        Gaussian(1 / (math.sqrt(2) * 3), 2 / 3),
        lambda u: 2 * torch.exp(-((3 * u) ** 2)) / math.sqrt(math.pi),
    ),
    "Yin et al.": (
        MultiGaussian(0.5, scale=0.5),
        lambda u: 0.5 * (1.15 * normal(u, 0, 0.5) - 0.15 * (normal(u, 0.5, 3) + normal(u, -0.5, 3)))
    ),
    "the same twice": (Erf(1 / (math.sqrt(2) * 0.3)), Gaussian(0.3).derivative),
    "a triangle": (Triangle(0.25, 4.0), PiecewiseQuadratic(4.0).derivative),
}  # fmt: skip


def normal(u: Tensor, mean: float, deviation: float) -> Tensor:
    exponent = -((u - mean) ** 2) / (2 * deviation**2)
    return torch.exp(exponent) / (math.sqrt(2 * math.pi) * deviation)


@pytest.mark.parametrize("name", SAME)
def test_equal_to_other_libraries(name: str) -> None:
    spike, expected = SAME[name]
    torch.testing.assert_close(torch.tensor(gradient(spike, *POINTS)), expected(POINTS).float())


@pytest.mark.parametrize("kind", KINDS)
def test_the_derivative_matches_the_primal(kind: type[Surrogate]) -> None:
    spike, u = make(kind), POINTS.clone().requires_grad_()
    spike.primal(u).sum().backward()
    torch.testing.assert_close(u.grad, spike.derivative(POINTS), rtol=1e-12, atol=1e-12)
    # The integral starts at the threshold, where parameters have no gradient.
    assert torch.equal(spike.primal(torch.zeros(1)), kind().primal(torch.zeros(1)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [(), (3,)])
def test_learned_values_have_the_gradient_of_the_primal(
    kind: type[Surrogate], channels: tuple[int, ...]
) -> None:
    values = {n: torch.full(channels, v, dtype=torch.float64) for n, v in LEARNED[kind].items()}
    spike = make(kind, **{name: nn.Parameter(value) for name, value in values.items()})
    u = (POINTS[:, None] + torch.tensor([0.0, 0.01, -0.01])).requires_grad_()
    weights = torch.linspace(-1, 2, u.numel(), dtype=torch.float64).view(u.shape)
    (spike(u) * weights).sum().backward()
    smooth = make(kind, **{name: nn.Parameter(value) for name, value in values.items()})
    x = u.detach().requires_grad_()
    (smooth.primal(x) * weights).sum().backward()
    torch.testing.assert_close(u.grad, x.grad, rtol=1e-12, atol=1e-12)
    for (name, a), (_, b) in zip(spike.named_parameters(), smooth.named_parameters(), strict=True):
        assert b.grad is not None, name
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_cutoff(kind: type[Surrogate]) -> None:
    values = {name: nn.Parameter(torch.tensor(v)) for name, v in LEARNED[kind].items()}
    full, cut = make(kind, **values), make(kind, **values, cutoff=-0.25)
    u = torch.tensor([-0.75, -0.2501, -0.25, 0.0, 0.5])
    assert torch.equal(full(u), cut(u))
    expected = [0.0, 0.0, *gradient(full, *u.tolist())[2:]]
    for parameter in values.values():
        parameter.grad = None
    assert gradient(cut, *u.tolist()) == expected
    found = [parameter.grad for parameter in values.values()]
    for parameter in values.values():
        parameter.grad = None
    gradient(full, *u[2:].tolist())
    torch.testing.assert_close(found, [parameter.grad for parameter in values.values()])


def test_the_secondary_threshold() -> None:
    # The gradient threshold is 0.9, the threshold 1.0, and beta 10.
    u = POINTS.float()
    expected = torch.where(u + 1.0 >= 0.9, (10 * u.abs() + 1) ** -2, 0.0)
    found = torch.tensor(gradient(FastSigmoid(10, cutoff=-0.1), *u.tolist()))
    torch.testing.assert_close(found, expected)
    assert 0 < (found > 0).sum() < len(u)


@pytest.mark.parametrize("spike", ALL, ids=IDS)
def test_gradient_is_scaled_by_the_incoming_gradient(spike: Surrogate) -> None:
    x = torch.tensor([0.125], requires_grad=True)
    spike(x).backward(torch.tensor([-3.0]))
    assert x.grad is not None
    assert torch.equal(x.grad, -3 * spike.derivative(x.detach()))


@pytest.mark.parametrize("width", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("kind", WITH_WIDTH)
def test_bad_width(kind: type[Surrogate], width: Any) -> None:
    with pytest.raises(ValueError, match=r"width is .*: expected a positive finite number"):
        kind(width)


@pytest.mark.parametrize("width", ["4", None, True])
@pytest.mark.parametrize("kind", WITH_WIDTH)
def test_a_width_of_the_wrong_type(kind: type[Surrogate], width: Any) -> None:
    with pytest.raises(TypeError, match=r"width is .*: expected a number, a tensor or a Learnable"):
        kind(width)


def test_bad_bounds_heights_and_cutoffs() -> None:
    for left, right in ((0.5, 0.5), (1.0, 0.0), (-math.inf, 0.0), (0.0, math.nan)):
        with pytest.raises(ValueError, match="expected finite, left < right"):
            Rectangle(left, right)
    for kind in (Rectangle, Triangle, FastSigmoid):
        with pytest.raises(ValueError, match=r"height is 0: expected a positive"):
            kind(height=0)
    with pytest.raises(TypeError, match=r"cutoff is '0': expected a number, a tensor or"):
        StraightThrough(cutoff="0")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"width is a torch\.int64 tensor"):
        Sigmoid(torch.tensor(1))


class Bell(Surrogate):
    """A user-defined surrogate: five levels from -2 to 2, and no primal."""

    def __init__(self, gain: Any = 1.0, cutoff: float | None = None) -> None:
        super().__init__(cutoff)
        self.gain = gain

    def spike(self, u: Tensor) -> Tensor:
        return torch.clamp(torch.floor(u), -2.0, 2.0)

    def derivative(self, u: Tensor) -> Tensor:
        return torch.exp(-self.gain * u * u)


def test_a_user_defined_surrogate() -> None:
    u = torch.tensor([-7.0, -0.5, 0.0, 1.5, 9.0])
    assert Bell()(u).tolist() == [-2, -1, 0, 1, 2]
    assert gradient(Bell(), 0.0, 2.0) == [1.0, pytest.approx(math.exp(-4))]
    assert gradient(Bell(cutoff=1.0), 0.0, 2.0) == [0.0, pytest.approx(math.exp(-4))]


def bell(u: Tensor, gain: Any) -> Tensor:
    return torch.exp(-gain * torch.abs(u))


def integrated_bell(u: Tensor, gain: Any) -> Tensor:
    return torch.sign(u) * (1 - torch.exp(-gain * torch.abs(u))) / gain


def signs(u: Tensor, gain: Any) -> Tensor:
    return torch.sign(u)


def test_custom() -> None:
    assert gradient(Custom(lambda u: 2 + 0 * u), -1.0, 1.0) == [2.0, 2.0]
    spike = Custom(bell, signs, integrated_bell, gain=nn.Parameter(torch.tensor(0.5)), cutoff=-1.0)
    assert spike(torch.tensor([-3.0, 0.0, 0.5])).tolist() == [-1, 0, 1]
    assert gradient(spike, -2.0, 1.0) == [0.0, pytest.approx(math.exp(-0.5))]
    # The derivative of (1 - exp(-g)) / g at g = 1/2.
    expected = math.exp(-0.5) / 0.5 - (1 - math.exp(-0.5)) / 0.25
    assert spike.gain.grad.item() == pytest.approx(expected)


def test_bad_custom() -> None:
    with pytest.raises(TypeError, match="derivative is None: expected a function of u"):
        Custom(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"spike is 1\.0: expected a function of u"):
        Custom(bell, spike=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a parameter cannot be named 'training'"):
        Custom(bell, training=1.0)
    with pytest.raises(ValueError, match="gain is nan: expected a finite number"):
        Custom(bell, gain=math.nan)


def test_without_a_derivative() -> None:
    class Forgotten(Surrogate):
        pass

    u = torch.zeros(1, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"Forgotten does not define derivative"):
        Forgotten()(u).backward()
    with pytest.raises(NotImplementedError, match=r"Forgotten does not define primal"):
        Forgotten().primal(u)


def learned(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value))


@pytest.mark.parametrize(
    ("spike", "name"),
    [
        (lambda: Bell(learned(1.0)), "gain"),
        (lambda: Custom(bell, gain=learned(1.0)), "gain"),
        (lambda: Sigmoid(cutoff=learned(-0.5)), "cutoff"),
        (lambda: Gaussian(scale=learned(1.0)), "scale"),
        (lambda: MultiGaussian(share=learned(0.1)), "share"),
    ],
    ids=["no primal", "custom", "cutoff", "scale", "share"],
)
@pytest.mark.parametrize("impl", ["reference", "numba"])
def test_parameters_without_a_gradient(
    spike: Callable[[], Surrogate], name: str, impl: str
) -> None:
    neuron, x = sf.LIF(surrogate=spike()), torch.ones(2, 1, 3)
    with pytest.raises(
        ValueError, match=rf"{name}' requires a gradient.*through primal\(self, u\)"
    ):
        neuron(x, impl=impl)
    neuron.requires_grad_(False)
    assert neuron(x, impl=impl).shape == x.shape


def test_the_primal_is_not_computed_for_fixed_values() -> None:
    class Counted(Sigmoid):
        calls = 0

        def primal(self, u: Tensor) -> Tensor:
            Counted.calls += 1
            return super().primal(u)

    u = torch.zeros(3, requires_grad=True)
    Counted()(u).sum().backward()
    with torch.no_grad():
        Counted(learned(4.0))(u)
    assert Counted.calls == 0
    Counted(learned(4.0))(u)
    assert Counted.calls == 1


def test_learnable_values_without_a_neuron() -> None:
    spike = Sigmoid(sf.LearnablePositive(4.0), cutoff=-0.5)
    plain = Sigmoid(learned(4.0), cutoff=-0.5)
    assert gradient(spike, -0.6, 0.2) == pytest.approx(gradient(plain, -0.6, 0.2))
    # d exp(log) / d log
    assert spike.width.log_value.grad.item() == pytest.approx(4 * plain.width.grad.item())


class Doubled(Surrogate):
    """Learns a factor of its own, and through the surrogate inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor = Sigmoid(sf.LearnablePositive(4.0)), learned(2.0)

    def derivative(self, u: Tensor) -> Tensor:
        return self.factor * self.inner.derivative(u)

    def primal(self, u: Tensor) -> Tensor:
        return self.factor * self.inner.primal(u)


def test_learnable_values_when_compiled() -> None:
    spike = Doubled()
    expected = gradient(spike, -0.6, 0.2), [p.grad for p in spike.parameters()]
    spike.zero_grad()
    # TorchDynamo of PyTorch 2.11 cannot trace the copy with values in place of modules.
    fullgraph = not torch.__version__.startswith("2.11")
    compiled: Any = torch.compile(spike, backend="aot_eager", fullgraph=fullgraph)
    assert gradient(compiled, -0.6, 0.2) == pytest.approx(expected[0])
    torch.testing.assert_close([p.grad for p in spike.parameters()], expected[1])
    plain = Sigmoid(learned(4.0))
    assert expected[0] == pytest.approx([2 * g for g in gradient(plain, -0.6, 0.2)])
    assert expected[1][1] == pytest.approx(2 * 4 * plain.width.grad)  # d exp(log) / d log


def test_tensors_become_buffers() -> None:
    spike = Sigmoid(torch.tensor(3.0))
    assert spike.state_dict()["width"] == 3
    later = Sigmoid(3.0)
    later.width = torch.tensor(5.0)
    assert later.state_dict()["width"] == 5


class Fire(sf.Neuron):
    """A minimal neuron with an output for each surrogate: one kernel compiles faster than many."""

    v = sf.State()

    def __init__(self, *spikes: Surrogate) -> None:
        super().__init__()
        self.decay, self.surrogates = 0.75, nn.ModuleList(spikes)

    def step(self, x: Tensor, v: Tensor) -> Any:
        h = self.decay * v + x
        outputs = tuple(spike(h - 0.5) for spike in self.surrogates)
        return outputs, (h - 0.5 * outputs[0],)


WIDTHS: dict[str, Callable[[float], Any]] = {
    "fixed": float,
    "learned": learned,
    "learned per channel": lambda v: nn.Parameter(torch.tensor([v, 1.25 * v, 0.75 * v])),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kernels(kind: type[Surrogate], backends: Backends) -> None:
    """Every way to give the parameters, with a cutoff and without, on a CPU alternately."""
    widths = [width for width in WIDTHS if width == "fixed" or LEARNED[kind]]
    spikes = []
    for j, width in enumerate(widths):
        for k, cutoff in enumerate((None, -0.3)):
            if (
                torch.cuda.is_available()
                or len(widths) == 1
                or (KINDS.index(kind) + j + k) % 2 == 0
            ):
                values = {name: WIDTHS[width](value) for name, value in LEARNED[kind].items()}
                spikes.append(make(kind, cutoff, **values))
    neuron = Fire(*spikes).to(backends.device)
    assert_matches_reference(
        neuron, [make_input((9, 2, 3, 5), device=backends.device)], backends.impls
    )


OTHERS: dict[str, Callable[[], Surrogate]] = {
    "a cutoff per channel": lambda: Arctan(cutoff=torch.tensor([-0.3, -1.0, 0.0])),
    "subclass": lambda: Bell(0.7, cutoff=-1.5),
    "custom": lambda: Custom(bell, signs, integrated_bell, gain=learned(0.7)),
    "custom without a primal": lambda: Custom(bell, gain=torch.tensor([0.5, 1.0, 2.0])),
    "Learnable": lambda: Sigmoid(sf.LearnablePositive(3.0, channels=3)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_kernels_of_others(name: str, backends: Backends) -> None:
    neuron = Fire(OTHERS[name]()).to(backends.device)
    inputs = [make_input((9, 2, 3, 5), device=backends.device)]
    assert_matches_reference(neuron, inputs, backends.impls)


def test_learned_along_with_everything_else(backends: Backends) -> None:
    neuron = sf.ALIF(
        sf.LearnableTimeConstant(3.0, channels=3),
        sf.LearnablePositive(0.6),
        beta=learned(0.3),
        v_reset=nn.Parameter(torch.tensor([0.0, -0.1, 0.1])),
        surrogate=FastSigmoid(sf.LearnablePositive(5.0, 3), learned(0.9), cutoff=-0.4),
    ).to(backends.device)
    x = make_input((17, 4, 3, 8, 8), device=backends.device)
    assert_matches_reference(neuron, [x], backends.impls)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("width", ["learned", "learned per channel"])
def test_gradients_are_the_same_every_time(width: str, backends: Backends) -> None:
    neuron = sf.LIF(
        sf.LearnableFraction(0.8), learned(0.4), surrogate=Sigmoid(WIDTHS[width](3.0))
    ).to(backends.device)
    x = make_input((33, 8, 3, 16, 16), device=backends.device)
    weights = [torch.randn(x.shape).to(x), torch.randn(x.shape[1:]).to(x)]
    for impl in ("numba",) if backends.device == "cpu" else backends.impls:
        first, second = (run(neuron, [x], None, impl).backward(weights) for _ in range(2))
        assert len(first) == 4
        for name, found in first.items():
            assert found.abs().sum() > 0, name
            assert torch.equal(found, second[name]), name


def test_all_are_public() -> None:
    assert {*(kind.__name__ for kind in KINDS), "Surrogate", "Custom"} == set(surrogate.__all__)


@pytest.mark.parametrize("options", [{"detach_reset": True}, {"reset": "soft"}])
def test_straight_through_of_large_inputs_in_half_precision(options):
    neuron = sf.LIF(surrogate=StraightThrough(), **options)
    x = torch.full((4, 2, 3), 3e4, dtype=torch.float16, requires_grad=True)
    neuron(x).sum().backward()
    assert 0 < x.grad.max() < 2
