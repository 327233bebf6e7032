"""Each model against traces computed by hand, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from spikefuse import (
    ALIF,
    IF,
    LIF,
    PLIF,
    LearnableFraction,
    decay_from_tau,
    surrogate,
)
from tests.neurons.traces import gradient, trace


def test_lif_hard_reset() -> None:
    # h: 0.75, 1.125 (fires), 0.5, 1.0 (fires: h equals the threshold), 0
    spikes, states = trace(LIF(decay=0.5), 0.75, 0.75, 0.5, 0.75, 0.0)
    assert spikes == [0, 1, 0, 1, 0]
    assert states == [[0.75], [0], [0.5], [0], [0]]


def test_lif_resets_to_v_reset() -> None:
    # h: 1.0 (fires), 0.5 * -0.5 + 0.75 = 0.5
    spikes, states = trace(LIF(decay=0.5, v_reset=-0.5), 1.0, 0.75)
    assert spikes == [1, 0]
    assert states == [[-0.5], [0.5]]


def test_lif_soft_reset() -> None:
    # h: 1.5 (fires), 0.5 * 0.5 + 1.0 = 1.25 (fires), 0.5 * 0.25 = 0.125
    spikes, states = trace(LIF(decay=0.5, reset="soft"), 1.5, 1.0, 0.0)
    assert spikes == [1, 1, 0]
    assert states == [[0.5], [0.25], [0.125]]


def test_lif_fires_below_zero_with_a_negative_threshold() -> None:
    spikes, states = trace(LIF(decay=0.5, threshold=-0.5, reset="soft"), -1.0, 0.25)
    assert spikes == [0, 1]  # h: -1, -0.25
    assert states == [[-1.0], [0.25]]


def test_if_does_not_leak() -> None:
    spikes, states = trace(IF(threshold=2.0), 0.75, 0.75, 0.75, 0.25)
    assert spikes == [0, 0, 1, 0]  # h: 0.75, 1.5, 2.25, 0.25
    assert states == [[0.75], [1.5], [0], [0.25]]


def test_if_soft_reset_subtracts_the_threshold() -> None:
    spikes, states = trace(IF(reset="soft"), 2.5, 0.0, 0.0, 0.0)
    assert spikes == [1, 1, 0, 0]
    assert states == [[1.5], [0.5], [0.5], [0.5]]


def test_plif_is_lif_at_its_initial_decay() -> None:
    plif = PLIF(decay=0.5, threshold=1.0)
    assert plif.decay().item() == 0.5
    assert trace(plif, 0.75, 0.75, 0.5) == trace(LIF(decay=0.5), 0.75, 0.75, 0.5)


def test_plif_per_channel() -> None:
    plif = PLIF(channels=2, threshold=10.0)
    with torch.no_grad():
        plif.decay.logit.copy_(torch.tensor([0.25, 0.75]).logit())
    x = torch.ones(3, 1, 2, dtype=torch.float64)
    _, (v,) = plif(x, return_state=True, impl="reference")
    expected = [[1 + 0.25 + 0.25**2, 1 + 0.75 + 0.75**2]]
    assert v.tolist() == [pytest.approx(row, rel=1e-6) for row in expected]


def test_plif_gradient_of_decay() -> None:
    plif = PLIF(decay=0.25, threshold=10.0)
    x = torch.tensor([[2.0], [3.0], [0.0]], dtype=torch.float64)
    _, (v,) = plif(x, return_state=True, impl="reference")
    v.backward()
    # v = d (2 d + 3), dv/dd = 4 d + 3 = 4, and dd/dlogit = d (1 - d).
    assert plif.decay.logit.grad is not None
    assert plif.decay.logit.grad.item() == pytest.approx(4 * 0.25 * 0.75, rel=1e-6)


def test_alif_raises_its_threshold() -> None:
    alif = ALIF(decay=0.5, threshold=1.0, adaptation_decay=0.5, beta=0.25)
    # h: 1 (fires; a = 1), 1.125 (threshold 1.25: no), 1.1875 (threshold 1.125: fires)
    spikes, states = trace(alif, 1.0, 1.125, 0.625)
    assert spikes == [1, 0, 1]
    assert states == [[0, 1], [1.125, 0.5], [0, 1.25]]


def test_alif_soft_reset_subtracts_the_raised_threshold() -> None:
    alif = ALIF(decay=0.5, adaptation_decay=0.5, beta=0.25, reset="soft")
    # h: 1 (threshold 1), 1.5 (threshold 1.25)
    spikes, states = trace(alif, 1.0, 1.5)
    assert spikes == [1, 1]
    assert states == [[0, 1], [0.25, 1.5]]


BOX = surrogate.Rectangle(-1.0, 1.0, height=0.5)


@pytest.mark.parametrize(
    ("options", "first"),
    [
        # dv/dh = 1 - s - g h = 1 - 0.5 * 0.75 before the spike: the reset carries a gradient.
        ({}, 0.5 * (1 + 0.5 * (1 - 0.5 * 0.75))),
        # dv/dh = 1 - s.
        ({"detach_reset": True}, 0.5 * (1 + 0.5)),
        # dv/dh = 1 - g threshold.
        ({"reset": "soft"}, 0.5 * (1 + 0.5 * (1 - 0.5))),
        ({"reset": "soft", "detach_reset": True}, 0.5 * (1 + 0.5)),
        # dv/dh = 1 - s - g (h - v_reset).
        ({"v_reset": 0.25}, 0.5 * (1 + 0.5 * (1 - 0.5 * (0.75 - 0.25)))),
    ],
)
def test_gradient_through_the_reset(options: dict[str, object], first: float) -> None:
    # Two steps below the threshold, g = 0.5 at both: ds_2/dh_1 = g decay dv_1/dh_1.
    found = gradient(LIF(decay=0.5, surrogate=BOX, **options), 0.75, 0.25)
    assert found == [pytest.approx(first), 0.5]


def test_gradient_after_a_spike() -> None:
    # h_1 = 1.5 fires: dv/dh = -g h = -0.75; with the reset detached it is 0.
    kept = gradient(LIF(decay=0.5, surrogate=BOX), 1.5, 0.25)
    assert kept == [pytest.approx(0.5 * (1 + 0.5 * -0.75)), 0.5]
    detached = gradient(LIF(decay=0.5, surrogate=BOX, detach_reset=True), 1.5, 0.25)
    assert detached == [0.5, 0.5]


def test_the_default_surrogate_is_a_sigmoid_of_width_4() -> None:
    (found,) = gradient(LIF(), 1.0)
    assert found == 1.0  # 4 * 0.5 * 0.5 at the threshold


@pytest.mark.parametrize("value", [1.5, -0.1, float("nan"), float("inf")])
def test_decay_out_of_range(value: float) -> None:
    with pytest.raises(ValueError, match=r"decay is .*expected a number in \[0, 1\]"):
        LIF(decay=value)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 2.0])
def test_a_learnable_fraction_out_of_range(value: float) -> None:
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        PLIF(decay=value)


@pytest.mark.parametrize("name", ["threshold", "v_reset"])
def test_values_must_be_finite_numbers(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is nan: expected a finite number"):
        LIF(**{name: float("nan")})
    with pytest.raises(TypeError, match=f"{name} is '1': expected a number, a tensor or"):
        LIF(**{name: "1"})
    with pytest.raises(TypeError, match=f"{name} is True"):
        LIF(**{name: True})
    with pytest.raises(TypeError, match=f"{name} is a torch.int64 tensor"):
        LIF(**{name: torch.tensor(1)})


def test_alif_checks_its_parameters() -> None:
    with pytest.raises(ValueError, match=r"adaptation_decay is 2\.0"):
        ALIF(adaptation_decay=2.0)
    with pytest.raises(TypeError, match="beta is None"):
        ALIF(beta=None)  # type: ignore[arg-type]


def test_invalid_options() -> None:
    with pytest.raises(ValueError, match="reset is 'zero': expected one of hard, soft"):
        LIF(reset="zero")
    with pytest.raises(ValueError, match="reset is 'zero': expected one of hard, soft"):
        LIF().reset = "zero"
    with pytest.raises(TypeError, match=r"surrogate is 4\.0: expected a surrogate like Sig"):
        LIF(surrogate=4.0)
    with pytest.raises(TypeError, match=r"v_reset is None: .* use reset='soft'"):
        LIF(v_reset=None)


def test_integers_become_float_values() -> None:
    lif = LIF(decay=1, threshold=2)
    assert (lif.decay, lif.threshold) == (1.0, 2.0)
    assert all(isinstance(v, float) for v in (lif.decay, lif.threshold))


def test_parameters_of_a_module() -> None:
    lif = LIF(decay=nn.Parameter(torch.tensor(0.5)), threshold=LearnableFraction(0.25))
    assert {name for name, _ in lif.named_parameters()} == {"decay", "threshold.logit"}

    def loss(x: Tensor) -> Tensor:
        return lif(x, impl="reference").sum()

    loss(torch.full((3, 2), 0.2)).backward()
    for name, parameter in lif.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.item() != 0, name


def test_decay_from_tau():
    assert decay_from_tau(1.25) == pytest.approx(0.2)
    assert decay_from_tau(20.0, dt=5.0) == pytest.approx(0.75)
    assert decay_from_tau(2.0, exact=True) == pytest.approx(math.exp(-0.5))
    for wrong in ({"tau": 0.0}, {"tau": 0.5}, {"tau": 2.0, "dt": -1.0}, {"tau": math.inf}):
        with pytest.raises(ValueError, match="tau"):
            decay_from_tau(**wrong)
    taus = torch.tensor([2.0, 4.0])
    assert decay_from_tau(taus).tolist() == [0.5, 0.75]
    expected = [math.exp(-0.5), math.exp(-0.25)]
    assert decay_from_tau(taus, exact=True).tolist() == pytest.approx(expected)
    for tensor in ([2.0, 0.5], [2.0, math.nan], [math.inf, 2.0], [2.0, -1.0]):
        with pytest.raises(ValueError, match="tau"):
            decay_from_tau(torch.tensor(tensor))


def test_an_unknown_option() -> None:
    message = (
        r"LIF has no option 'tau'; its options are decay, threshold, decay_input, v_reset, reset, "
        r"detach_reset, surrogate\. decay_from_tau\(tau\) .* docs/differences\.md"
    )
    with pytest.raises(TypeError, match=message):
        LIF(tau=2.0)
    with pytest.raises(TypeError, match="outputs= and state= are arguments of the call"):
        LIF(outputs=("v",))
