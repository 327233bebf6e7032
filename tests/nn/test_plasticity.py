"""STDP against loops in float64, parts of a sequence against the whole, and a paper's figure."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor

import spikefuse as sf
from spikefuse.nn.plasticity import STDPRule, stdp

T, B, N, M = 12, 3, 5, 4
PAIR = STDPRule(0.8, 0.7, 0.5, 0.3)
TRIPLET = STDPRule(0.8, 0.7, 0.5, 0.3, 0.9, 0.95, 0.2, 0.1, 0.85)


def trains(device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pre, post = (torch.rand(T, B, n, generator=generator) < 0.4 for n in (N, M))
    reward = torch.randn(T, B, generator=generator)
    return pre.float().to(device), post.float().to(device), reward.to(device)


def loop(pre: Tensor, post: Tensor, rule: STDPRule, reward: Tensor | None = None) -> list[Tensor]:
    """Synapse by synapse and step by step, in float64."""
    r = asdict(rule)
    sums = torch.zeros(2, M, N, dtype=torch.float64)
    for b in range(B):
        for i in range(M):
            for j in range(N):
                r1 = r2 = o1 = o2 = 0.0
                eligible = [0.0, 0.0]
                for t in range(T):
                    x, y = pre[t, b, j].item(), post[t, b, i].item()
                    o1, o2 = o1 * r["post_decay"], o2 * r["slow_post_decay"]
                    r1, r2 = r1 * r["pre_decay"], r2 * r["slow_pre_decay"]
                    down = x * o1 * (r["depression"] + r["triplet_depression"] * r2)
                    r1 += x
                    up = y * r1 * (r["potentiation"] + r["triplet_potentiation"] * o2)
                    o1, o2, r2 = o1 + y, o2 + y, r2 + x
                    for k, change in enumerate((up, down)):
                        eligible[k] = r["eligibility_decay"] * eligible[k] + change
                        now = change if reward is None else eligible[k] * reward[t, b].item()
                        sums[k, i, j] += now / B
    return [*sums]


def check(found: tuple[Tensor, Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double().cpu(), b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", [PAIR, TRIPLET], ids=["pair", "triplet"])
@pytest.mark.parametrize("rewarded", [False, True])
def test_against_a_loop(rule: STDPRule, rewarded: bool, device: str) -> None:
    pre, post, reward = trains(device)
    given = reward if rewarded else None
    expected = loop(pre, post, rule, given)
    check(stdp(pre.bool(), post.to(torch.uint8), rule, given), expected)
    # Parts of one, two and more steps, each with the state of the one before.
    state, changes, start = None, torch.zeros(2, M, N, device=device), 0
    for stop in (1, 3, T):
        part = slice(start, stop)
        values, state = stdp(
            pre[part], post[part], rule, None if given is None else given[part], state, True
        )
        changes, start = changes + torch.stack(values), stop
    check((changes[0], changes[1]), expected)


# Changes of synapses of the visual cortex by 60 pairs of spikes, and their errors, at rates in Hz:
# Sjostrom et al., Neuron 32, 2001, as in Pfister and Gerstner, with the postsynaptic spike 10 ms
# after and 10 ms before the other.
RATES = (0.1, 10, 20, 40, 50)
MEASURED = {
    10: ((-0.04, 0.05), (0.14, 0.1), (0.29, 0.14), (0.53, 0.11), (0.56, 0.26)),
    -10: ((-0.29, 0.08), (-0.41, 0.11), (-0.34, 0.1), (0.56, 0.32), (0.75, 0.19)),
}


def paired(delay_ms: int, rate: float, rule: STDPRule) -> float:
    """The change by 60 pairs, in steps of 1 ms; of rates below 1 Hz by 1 pair, 60 times."""
    pairs, period = (60, round(1000 / rate)) if rate >= 1 else (1, 1000)
    pre, post = torch.zeros(2, pairs * period + 20, 1, 1)
    pre[10::period][:pairs], post[10 + delay_ms :: period][:pairs] = 1, 1
    up, down = stdp(pre, post, rule)
    return 60 / pairs * float(up - down)


def test_pairs_of_spikes_in_visual_cortex() -> None:
    """The minimal triplet model for all pairs has an error of 0.34 in the paper."""
    decay = {tau: math.exp(-1 / tau) for tau in (16.8, 33.7, 114.0)}
    pair = STDPRule(decay[16.8], decay[33.7], potentiation=0.0, depression=7.1e-3)
    rule = replace(pair, slow_post_decay=decay[114.0], triplet_potentiation=6.5e-3)
    errors = [
        ((paired(delay, rate, rule) - value) / error) ** 2
        for delay, values in MEASURED.items()
        for rate, (value, error) in zip(RATES, values, strict=True)
    ]
    assert sum(errors) / len(errors) < 0.4


def test_under_autocast_and_with_a_graph() -> None:
    pre, post, reward = trains()
    expected = stdp(pre, post, PAIR, reward)
    with torch.autocast("cpu", torch.bfloat16):
        found = stdp(pre, post.requires_grad_(), PAIR, reward)
    assert all(map(torch.equal, found, expected))
    assert not any(x.requires_grad for x in found)


@pytest.mark.parametrize("rewarded", [False, True])
def test_no_samples(rewarded: bool) -> None:
    """Nothing changes, also in the next part of the sequence."""
    pre, post, reward = (x[:, :0] for x in trains())
    state = None
    for _ in range(2):
        r = reward if rewarded else None
        changes, state = stdp(pre, post, TRIPLET, r, state, return_state=True)
        assert all(torch.equal(x, torch.zeros(M, N)) for x in changes)


def test_wrong_arguments() -> None:
    pre, post, reward = trains()
    _, state = stdp(pre, post, PAIR, return_state=True)
    with pytest.raises(ValueError, match="pass zeros for steps without a reward"):
        stdp(pre, post, PAIR, reward, state)
    with pytest.raises(ValueError, match=r"shapes \[12, 3, 5\] and \[11, 3, 4\]: expected \[T, B"):
        stdp(pre, post[1:])
    with pytest.raises(ValueError, match=r"shape \[3\]: expected \[T, B\] = \[12, 3\]"):
        stdp(pre, post, reward=reward[0])
    with pytest.raises(ValueError, match=r"post_decay is 1\.5: expected a number in \[0, 1\]"):
        sf.plasticity.STDPRule(post_decay=1.5)
    with pytest.raises(ValueError, match="potentiation is nan: expected a finite number"):
        sf.plasticity.STDPRule(potentiation=math.nan)
    with pytest.raises(TypeError, match=r"rule is 0\.5: expected an STDPRule"):
        stdp(pre, post, 0.5)
    with pytest.raises(TypeError, match=r"post is torch\.complex64: expected real numbers"):
        stdp(pre, post + 0j)
