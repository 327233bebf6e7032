"""The other models against traces computed by hand, in float64."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.testing import make_input
from tests.definitions import DEFINITIONS
from tests.neurons.traces import gradient, trace


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def fixed(value: float) -> Tensor:
    """Return a tensor, which is used unchanged where a float would be learned."""
    return torch.tensor(value)


def test_lif_with_decayed_input() -> None:
    # h: 0.5, 0.25 + 0.75 = 1 (fires), 0.5
    spikes, states = trace(sf.LIF(decay=0.5, decay_input=True), 1.0, 1.5, 1.0)
    assert spikes == [0, 1, 0]
    assert states == [[0.5], [0], [0.5]]
    for neuron in (sf.PLIF(0.5, decay_input=True), sf.ALIF(0.5, beta=0.0, decay_input=True)):
        assert trace(neuron, 1.0, 1.5, 1.0)[0] == [0, 1, 0]


def test_cuba_lif() -> None:
    # current: 0.5, 0.75, 0.875; h: 0.5, 1 (fires; the current stays), 0.875
    spikes, states = trace(sf.CubaLIF(current_decay=0.5, decay=0.5), 0.5, 0.5, 0.5)
    assert spikes == [0, 1, 0]
    assert states == [[0.5, 0.5], [0, 0.75], [0.875, 0.875]]


def test_cuba_lif_with_decayed_input() -> None:
    # current: 1, 0.5; h: 0.5, 0.25 + 0.25
    _, states = trace(sf.CubaLIF(0.5, 0.5, decay_input=True), 1.0, 0.0)
    assert states == [[0.5, 1], [0.5, 0.5]]


def test_ad_lif() -> None:
    # h: 0.5 * 3 = 1.5 (fires), w = 0.25 * 1.5 + 1 = 1.375; h: 0.25 + 0.5 * (1 - 1.375) = 0.0625
    neuron = sf.AdLIF(0.5, 1.0, adaptation_decay=0.5, coupling=0.25, jump=1.0)
    spikes, states = trace(neuron, 3.0, 1.0)
    assert spikes == [1, 0]
    assert states == [[0.5, 1.375], [0.0625, 0.6875 + 0.25 * 0.0625]]


def test_se_ad_lif() -> None:
    # h: 0.5; w = 0.5 * (2 * 0.5) = 0.5; h: 0.25 + 0.5 * (3 - 0.5) = 1.5 (fires), the adaptation
    # sees the potential after the reset: w = 0.25 + 0.5 * (0 + 4)
    neuron = sf.SEAdLIF(0.5, 1.0, adaptation_decay=0.5, coupling=2.0, jump=4.0)
    spikes, states = trace(neuron, 1.0, 3.0)
    assert spikes == [0, 1]
    assert states == [[0.5, 0.5], [0.0, 2.25]]


def test_alpha_lif() -> None:
    # e: 2, 1; i: -2, -0.5; h: 0, 1 (fires)
    options = {"excitatory_decay": 0.5, "inhibitory_decay": 0.25, "gain": 2.0}
    spikes, states = trace(sf.AlphaLIF(**options), 2.0, 0.0, 0.0)
    assert spikes == [0, 1, 0]
    assert states == [[2, -2], [0, 0], [0, 0]]
    # The soft reset takes 1 / 2 from e, which leaves h = 0.
    spikes, states = trace(sf.AlphaLIF(**options, reset="soft"), 2.0, 0.0, 0.0)
    assert spikes == [0, 1, 0]
    assert states == [[2, -2], [0.5, -0.5], [0.25, -0.125]]


def test_alpha_lif_gain() -> None:
    # log(a) / (log(b) - log(a)) + 1, as snnTorch writes it.
    expected = math.log(0.9) / (math.log(0.8) - math.log(0.9)) + 1
    assert sf.AlphaLIF(0.9, 0.8).gain == pytest.approx(expected)
    with pytest.raises(ValueError, match="0 < inhibitory_decay < excitatory_decay < 1"):
        sf.AlphaLIF(0.8, 0.9)
    with pytest.raises(TypeError, match="gain is None: give it a value"):
        sf.AlphaLIF(sf.LearnableFraction(0.9), 0.8)


@pytest.mark.parametrize("name", [name for name in DEFINITIONS if name != "Gated"])
def test_all_have_the_potential_before_the_reset(name: str) -> None:
    neuron, x = DEFINITIONS[name](3, reset="hard"), make_input((6, 2, 3))
    spikes, h = neuron(x, outputs=("spikes", "h"), impl="reference")
    if name in ("LI", "LI-decay-input", "ShortTermPlasticity"):
        assert torch.equal(h, spikes)
    elif name == "StochasticLIF":
        assert spikes.unique().tolist() == [0, 1]
    elif name == "RateIF":
        assert ((spikes > 0) == (h >= 1)).all()
    elif name == "SlidingPSN":
        assert torch.equal(spikes, (h >= 0).float())
    else:
        # Adaptation only raises the threshold.
        assert spikes.any()
        fired = h.abs() >= 0.4 if name == "GatedLIF" else h.abs() >= neuron.threshold
        fired = h >= 0.5 * 0.4 if name == "IntegerLIF" else fired
        assert fired[spikes != 0].all()


def test_qif() -> None:
    # Drives: 0, 0, 0, (-0.5) (-1) = 0.5; h: 0.5, 1 (fires), -0.5, -0.25
    spikes, states = trace(sf.QIF(tau=2.0, v_critical=0.5), 1.0, 1.0, -1.0, 0.0)
    assert spikes == [0, 1, 0, 0]
    assert states == [[0.5], [0], [-0.5], [-0.25]]


def test_qif_grows_above_its_critical_potential() -> None:
    qif = sf.QIF(tau=2.0, v_critical=0.5, threshold=10.0)
    below, above = (trace(qif, x, *[0.0] * 9)[1][-1][0] for x in (0.9, 1.1))
    assert below < 0.45
    assert above > 0.55


def test_eif() -> None:
    # The exponential term is 0.5 exp(-1) at 0, and 0.5 at 0.5.
    eif = sf.EIF(tau=2.0, v_rheobase=0.5, sharpness=0.5)
    start = 0.5 * math.exp(-1)
    spikes, states = trace(eif, 1 - start, 1.0)
    assert spikes == [0, 1]  # h: 0.5, 0.5 + (1 - 0.5 + 0.5) / 2
    assert states == [[pytest.approx(0.5)], [0]]


def test_adex_adapts_as_in_the_paper() -> None:
    # Spike-frequency adaptation with the paper's parameters (pF, nS, mV, ms, pA), in steps of dt.
    dt, c, g, tau_w, a, b = 0.5, 281.0, 30.0, 144.0, 4.0, 80.5
    rest, rheobase, sharp = -70.6, -50.4, 2.0
    neuron = sf.AdEx(
        *(c / g / dt, rest, rheobase, sharp, tau_w / dt, a / g, b / g, 20.0), v_reset=rest
    )
    x = torch.full((400, 1), 900.0 / g, dtype=torch.float64)
    start = torch.full((1,), rest, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    v, w, expected = rest, 0.0, []
    for _ in range(400):
        slope = -g * (v - rest) + g * sharp * math.exp((v - rheobase) / sharp) - w + 900.0
        v, w = v + dt * slope / c, w + dt * (a * (v - rest) - w) / tau_w
        expected.append(v >= 20.0)
        v, w = (rest, w + b) if v >= 20.0 else (v, w)
    spikes, _ = neuron(x, state=start, return_state=True, impl="reference")
    assert spikes.flatten().tolist() == expected
    intervals = spikes.flatten().nonzero().flatten().diff().tolist()
    assert intervals == sorted(intervals)
    assert intervals[-1] > 2 * intervals[0]


def test_brf() -> None:
    inputs = (20.0, 20.0, 0.0, -5.0, 0.0, 40.0, 40.0, 0.0)
    spikes, states = trace(sf.BRF(8.0, 0.5, 1.5, dt=0.05), *inputs)
    u, q, expected = 0j, 0.0, []
    for x, state in zip(inputs, states, strict=True):
        b = (math.sqrt(1 - 0.4**2) - 1) / 0.05 - 0.5 - q
        u += 0.05 * (complex(b, 8.0) * u + x)
        expected.append(float(u.real >= 1.5 + q))
        q = 0.9 * q + expected[-1]
        assert state == pytest.approx([u.real, u.imag, q])
    assert spikes == expected
    assert 0 < sum(spikes) < len(spikes)


def test_brf_resonates_and_does_not_diverge() -> None:
    # At the divergence boundary the amplitude is constant, whatever the frequency.
    neuron, omega = sf.BRF(torch.tensor([10.0, 40.0, 90.0]), 0.0, 1e9), 20.0
    start = [torch.full((1, 3), value, dtype=torch.float64) for value in (1.0, 0.0, 0.0)]
    silence = torch.zeros(100, 1, 3, dtype=torch.float64)
    _, (u, v, _) = neuron(silence, state=start, return_state=True, impl="reference")
    assert torch.hypot(u, v).flatten().tolist() == pytest.approx([1.0] * 3)
    # Among oscillators, that of the frequency of the input responds most strongly.
    neuron = sf.BRF(torch.tensor([5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0]), 2.0, 1e9)
    x = torch.cos(omega * 0.01 * torch.arange(200, dtype=torch.float64)).view(-1, 1, 1)
    (u,) = neuron(x.expand(-1, 1, 7), impl="reference", outputs=("u",))
    assert u[100:].abs().amax((0, 1)).argmax() == 3


def test_c_silif() -> None:
    inputs = (1.0, 2.0, 0.0, 1.0, -1.0, 3.0)
    spikes, states = trace(sf.CSiLIF(0.4, 0.5, 2.0, 0.6), *inputs)
    u, expected = 0j, []
    decay = cmath.exp(complex(-0.5, 2.0) * 0.4)
    for x, state in zip(inputs, states, strict=True):
        u = decay * u + 0.6 * x
        expected.append(float(2 * u.real >= 1))
        u -= 0.5 * expected[-1]
        assert state == pytest.approx([u.real, u.imag])
    assert spikes == expected
    assert 0 < sum(spikes) < len(spikes)


def test_stochastic_lif() -> None:
    neuron = sf.StochasticLIF(decay=0.5, temperature=0.5)
    x = torch.tensor([[0.5, 0.5]], dtype=torch.float64, requires_grad=True)
    # h + noise / 2 is 1 (fires), and less; the derivative is that of p = sigmoid(-1) in both.
    spikes, (v,) = neuron(
        x, x.detach().new_tensor([[1.0, 0.9]]), return_state=True, impl="reference"
    )
    assert spikes.tolist() == [[1, 0]]
    assert v.tolist() == [0, 0.5]
    spikes.sum().backward()
    assert x.grad is not None
    assert x.grad[0].tolist() == pytest.approx([2 * sigmoid(-1) * sigmoid(1)] * 2)


def test_stochastic_lif_fires_with_its_probability() -> None:
    torch.manual_seed(0)
    neuron = sf.StochasticLIF(threshold=1.0, temperature=0.25)
    for h in (0.5, 1.0, 1.25):
        rate = neuron(torch.full((1, 40000), h), impl="reference").mean().item()
        p = sigmoid((h - 1) / 0.25)
        assert abs(rate - p) < 4 * math.sqrt(p * (1 - p) / 40000)


def test_stochastic_lif_recomputes_its_noise() -> None:
    class Recomputed(nn.Module):
        def __init__(self, layers: nn.Module) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = sf.checkpoint(self.layers, x)
            return result

    layers = nn.Sequential(nn.Linear(8, 8), sf.StochasticLIF(), nn.Linear(8, 8))
    x, results = torch.rand(5, 4, 8), []
    for net in (layers, Recomputed(layers)):
        torch.manual_seed(1)
        y = sf.Temporal(net)(x, impl="reference")
        results.append((y, *torch.autograd.grad(y.sum(), layers[0].weight)))
    assert all(map(torch.equal, *results))
    assert not torch.equal(sf.Temporal(layers)(x, impl="reference"), results[0][0])


def test_short_term_plasticity() -> None:
    # u: 0.5, 0.25 + 0.5 * 0.75; y: 0.5, 0.625 * r, where r = 1 - 0.25 * 0.5
    synapse = sf.ShortTermPlasticity(0.5, facilitation_decay=0.5, recovery_decay=0.25)
    y, states = trace(synapse, 1.0, 1.0, 0.0)
    assert y == [0.5, 0.625 * 0.875, 0]
    assert states[0] == [0.5, 0.875]
    assert states[2][0] == 0.3125


def test_short_term_depression_has_the_stationary_response_of_the_paper() -> None:
    # R = (1 - e) / (1 - (1 - U) e), where e is the decay over the interval of 4 steps.
    synapse = sf.ShortTermPlasticity(0.4, facilitation_decay=0.0, recovery_decay=0.9)
    y, _ = trace(synapse, *[1.0, 0.0, 0.0, 0.0] * 16, 1.0)
    e = 0.9**4
    assert y[0] == pytest.approx(0.4)
    assert y[-1] == pytest.approx(0.4 * (1 - e) / (1 - 0.6 * e))


def test_izhikevich() -> None:
    neuron = sf.Izhikevich(
        tau=2.0, v_critical=0.5, tau_recovery=2.0, coupling=0.5, jump=0.25, v_reset=-0.5
    )
    # h: 0.5, 0.5 + (1.125 - 0.125) / 2 = 1 (fires), -0.5 + (0.5625 - 0.5625 + 0.5) / 2
    # w: 0.25 / 2, 0.125 + (0.5 - 0.125) / 2 + 0.25, 0.5625 + (-0.125 - 0.5625) / 2
    spikes, states = trace(neuron, 1.0, 1.125, 0.5625)
    assert spikes == [0, 1, 0]
    assert states == [[0.5, 0.125], [-0.5, 0.5625], [-0.25, 0.21875]]


def test_izhikevich_in_the_units_of_the_paper() -> None:
    a, b, c, d = 0.02, 0.2, -65.0, 8.0
    low, high = (-5 - math.sqrt(2.6)) / 0.08, (-5 + math.sqrt(2.6)) / 0.08
    neuron = sf.Izhikevich(1.0, low, high, 0.04, 1 / a, b, d, 30.0, v_reset=c)
    state = tuple(torch.full((1, 1), s, dtype=torch.float64) for s in (-65.0, b * (c - low)))
    x = torch.full((200, 1, 1), 10.0 - b * low, dtype=torch.float64)
    spikes, _ = neuron(x, state=state, return_state=True, impl="reference")
    v, u, expected = -65.0, b * c, []
    for _ in range(200):
        v = v + 0.04 * v * v + 5 * v + 140 - u + 10
        u = u + a * (b * v - u)
        expected.append(v >= 30)
        v, u = (c, u + d) if v >= 30 else (v, u)
    assert spikes.flatten().tolist() == expected
    assert 2 < sum(expected) < 20


def test_klif() -> None:
    # h: 0.5, 1, -1; f: 1, 2 (fires), 0
    spikes, states = trace(sf.KLIF(decay=0.5, threshold=1.5, k=2.0), 0.5, 0.5, -1.0)
    assert spikes == [0, 1, 0]
    assert states == [[1], [0], [0]]


def test_klif_with_scale_reset() -> None:
    # f: 1.5 (fires; 1.5 / 2 - 1 / 2), 0.25
    klif = sf.KLIF(decay=0.5, k=2.0, scale_reset=True, reset="soft")
    spikes, states = trace(klif, 0.75, 0.0)
    assert spikes == [1, 0]
    assert states == [[0.25], [0.125]]


def test_klif_learns_k() -> None:
    klif = sf.KLIF(threshold=10.0, k=0.5, channels=2)
    assert klif.k.shape == (2,)
    x = torch.tensor([[[3.0, -1.0]]], dtype=torch.float64)
    _, (v,) = klif(x, return_state=True, impl="reference")
    v.sum().backward()
    assert klif.k.grad.tolist() == [3.0, 0.0]
    given = nn.Parameter(torch.tensor(0.5))
    assert sf.KLIF(k=given).k is given


def test_clif() -> None:
    # The first step fires: m = 1, v = 1 - (1 + sigmoid(1)).
    spikes, states = trace(sf.CLIF(decay=0.75), 1.0, 0.0)
    h = -0.75 * sigmoid(1)
    assert spikes == [1, 0]
    assert states[0] == [pytest.approx(-sigmoid(1)), 1]
    assert states[1] == [pytest.approx(h), pytest.approx(sigmoid(0.25 * h))]


def test_gated_lif_with_half_open_gates() -> None:
    gated = sf.GatedLIF(
        decay=0.5, threshold=0.75, leak=0.25, drop=0.5, conductance=0.5, alpha=0.5, beta=0.5
    )
    # h = v - 0.125 + 0.75 x: 1 (fires; v = 0.75 * 1 * 0.5 - 0.25), 0
    spikes, states = trace(gated, 1.5, 0.0)
    assert spikes == [1, 0]
    assert [v[0] for v in states] == pytest.approx([0.125, 0], abs=1e-6)


def test_gated_lif_is_lif_with_its_gates_closed() -> None:
    x = (0.75, 0.75, 0.5, 0.75, 0.0)
    gated = sf.GatedLIF(*(0.5, fixed(1.0)), alpha=fixed(1.0), beta=fixed(0.0), gamma=fixed(1.0))
    assert trace(gated, *x)[0] == trace(sf.LIF(0.5), *x)[0] == [0, 1, 0, 1, 0]


def test_gated_lif_learns_every_parameter() -> None:
    gated = sf.GatedLIF(channels=3)
    gated(torch.ones(4, 2, 3), impl="reference").sum().backward()
    names = {"alpha", "beta", "gamma", "decay", "threshold", "leak", "drop", "conductance"}
    found = {n: p.grad for n, p in gated.named_parameters()}
    assert set(found) == {f"{name}.logit" for name in names}
    assert all(grad is not None and (grad != 0).any() for grad in found.values())


def test_li() -> None:
    assert trace(sf.LI(0.5), 1.0, 1.0, -3.5)[0] == [1, 1.5, -2.75]
    assert trace(sf.LI(0.5, decay_input=True), 1.0, 1.0, -2.0)[0] == [0.5, 0.75, -0.625]


def test_refractory_lif() -> None:
    # Fires, ignores two inputs, then h: 0.5, 1 (fires).
    neuron = sf.RefractoryLIF(decay=0.5, refractory=2, v_reset=-0.5)
    spikes, states = trace(neuron, 1.0, 5.0, 5.0, 0.75, 0.75)
    assert spikes == [1, 0, 0, 0, 1]
    assert states == [[-0.5, 2], [-0.5, 1], [-0.5, 0], [0.5, 0], [-0.5, 2]]
    assert gradient(neuron, 1.0, 5.0, 5.0, 0.75, 0.75)[1:3] == [0, 0]


def test_refractory_lif_with_period_zero_is_lif() -> None:
    x = (0.75, 0.75, 1.5, 1.5, 0.0)
    assert trace(sf.RefractoryLIF(0.5, refractory=0), *x)[0] == trace(sf.LIF(0.5), *x)[0]


def test_delayed_reset_lif() -> None:
    # v: 1.5 (fires), 0.75 + 1 - 1, 0.375 + 1 (fires), 0.6875 - 1
    spikes, states = trace(sf.DelayedResetLIF(decay=0.5), 1.5, 1.0, 1.0, 0.0)
    assert spikes == [1, 0, 1, 0]
    assert states == [[1.5], [0.75], [1.375], [-0.3125]]
    # v: 1.5 (fires), -0.25 + 1, 0.375 + 1 (fires), -0.25
    spikes, states = trace(
        sf.DelayedResetLIF(decay=0.5, reset="hard", v_reset=-0.5), 1.5, 1.0, 1.0, 0.0
    )
    assert spikes == [1, 0, 1, 0]
    assert states == [[1.5], [0.75], [1.375], [-0.25]]


def test_a_delayed_hard_reset_gives_the_spikes_and_gradients_of_lif() -> None:
    x = (0.75, 0.75, 1.5, 0.5, 0.625, 0.0)
    delayed = sf.DelayedResetLIF(0.5, reset="hard", v_reset=-0.25)
    lif = sf.LIF(0.5, v_reset=-0.25, detach_reset=True)
    assert trace(delayed, *x)[0] == trace(lif, *x)[0]
    assert gradient(delayed, *x) == pytest.approx(gradient(lif, *x))


def test_a_delayed_reset_is_detached_by_default() -> None:
    box = sf.surrogate.Rectangle(-1.0, 1.0, height=0.5)
    # dv_2/dv_1 is the decay, less the threshold times the derivative of the first spike.
    found = gradient(sf.DelayedResetLIF(0.5, surrogate=box), 0.75, 0.25)
    assert found == [pytest.approx(0.5 * (1 + 0.5)), 0.5]
    found = gradient(sf.DelayedResetLIF(0.5, surrogate=box, detach_reset=False), 0.75, 0.25)
    assert found == [pytest.approx(0.5 * (1 + 0.5 - 0.5)), 0.5]


def test_ternary_lif() -> None:
    # h: -1 (fires below), 0.75, 1.125 (fires)
    spikes, states = trace(sf.TernaryLIF(decay=0.5, v_reset=0.0), -1.0, 0.75, 0.75)
    assert spikes == [-1, 0, 1]
    assert states == [[0], [0.75], [0]]
    # h: -1.5, -0.25 + 1.5
    spikes, states = trace(sf.TernaryLIF(decay=0.5, reset="soft"), -1.5, 1.5)
    assert spikes == [-1, 1]
    assert states == [[-0.5], [0.25]]


def test_integer_lif() -> None:
    # h: 1.5, -0.25 + 2.5, 0.125 + 10, 3.5625 - 9
    spikes, states = trace(sf.IntegerLIF(decay=0.5, levels=3), 1.5, 2.5, 10.0, -9.0)
    assert spikes == [2, 2, 3, 0]
    assert states == [[-0.5], [0.25], [7.125], [-5.4375]]
    # The threshold is 0.25, so h = 0.375 is 1.5 levels.
    assert trace(sf.IntegerLIF(threshold=0.25), 0.375)[0] == [2]


@pytest.mark.parametrize(
    ("x", "expected"), [(-0.5, 0.0), (0.0, 0.5), (2.0, 0.5), (2.9, 0.5), (6.0, 0.5), (6.5, 0.0)]
)
def test_integer_lif_passes_gradients_straight_through(x: float, expected: float) -> None:
    assert gradient(sf.IntegerLIF(threshold=2.0, levels=3), x) == [expected]


def test_integer_lif_emits_integers() -> None:
    x = 3 * torch.randn(20, 500, generator=torch.Generator().manual_seed(0))
    y = sf.IntegerLIF(0.9, 0.7)(x)
    assert set(y.flatten().tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0}


def test_two_compartment_lif() -> None:
    # d: 1, 1 - 0.25 + 1; h: 0.5, 0.5 + 0.875 (fires)
    neuron = sf.TwoCompartmentLIF(feedback=0.5, drive=0.5, gamma=0.5)
    spikes, states = trace(neuron, 1.0, 1.0)
    assert spikes == [0, 1]
    assert states == [[1, 0.5], [1.25, 0.375]]
    spikes, states = trace(sf.TwoCompartmentLIF(reset="hard", v_reset=0.25), 1.0, 1.0)
    assert spikes == [0, 1]
    assert states == [[1, 0.5], [0.25, 0.25]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sf.CubaLIF(current_decay=1.5), "current_decay is 1.5"),
        (lambda: sf.QIF(tau=0.0), "tau is 0.0: expected a positive finite number"),
        (lambda: sf.EIF(sharpness=-1.0), "sharpness is -1.0: expected a positive finite number"),
        (lambda: sf.Izhikevich(tau_recovery=0.0), "tau_recovery is 0.0"),
        (lambda: sf.KLIF(k=0.0), "k is 0.0: expected a positive finite number"),
        (lambda: sf.GatedLIF(threshold=1.0), "threshold is 1.0: expected .* strictly between"),
        (lambda: sf.LI(decay=-0.1), "decay is -0.1"),
        (lambda: sf.RefractoryLIF(refractory=-1), "refractory is -1: expected an integer >= 0"),
        (lambda: sf.RefractoryLIF(refractory=1.5), "refractory is 1.5"),  # type: ignore[arg-type]
        (
            lambda: sf.TernaryLIF(threshold=0.0),
            "threshold is 0.0: expected a positive finite number",
        ),
        (lambda: sf.IntegerLIF(levels=0), "levels is 0: expected an integer >= 1"),
        (lambda: sf.TwoCompartmentLIF(drive=1.0), "strictly between 0 and 1"),
        (lambda: sf.BRF(200.0), r"omega is 200.0: expected a number in \[0, 100\]"),
        (lambda: sf.StochasticLIF(temperature=0.0), "temperature is 0.0"),
        (lambda: sf.ShortTermPlasticity(1.5), "utilization is 1.5"),
    ],
)
def test_wrong_parameters(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
