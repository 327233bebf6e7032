"""Spike-timing-dependent plasticity (STDP): weights change by the spikes on both of their sides.

Traces of the spikes are one scan for each side, and a change of all weights is one matrix product
over steps and samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spikefuse.neurons.checks import check_tensor
from spikefuse.neurons.definition import Neuron, Outputs, State, States
from spikefuse.neurons.li import LI
from spikefuse.neurons.parameters import number

__all__ = ["STDPRule", "stdp"]

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class STDPRule:
    """The constants of STDP: by pairs of spikes, or by triplets if a triplet amplitude is set.

    Equations, for the spikes `x` before and `y` after a synapse, with the traces `r1`, `r2` of `x`
    and `o1`, `o2` of `y`::

        r1[t] = pre_decay r1[t - 1] + x[t]        o1[t] = post_decay o1[t - 1] + y[t]
        r2[t] = slow_pre_decay r2[t - 1] + x[t]   o2[t] = slow_post_decay o2[t - 1] + y[t]

        up[t] = y[t] r1[t] (A2+ + A3+ (o2[t] - y[t]))
        down[t] = x[t] (o1[t] - y[t]) (A2- + A3- (r2[t] - x[t]))

    `x` and `y` of one step potentiate: a layer reads its input in the step in which it fires.

    Source: Pfister and Gerstner, "Triplets of Spikes in a Model of Spike Timing-Dependent
    Plasticity", Journal of Neuroscience 26, 2006 (all spikes interact); for pairs, Song, Miller and
    Abbott, "Competitive Hebbian Learning Through Spike-Timing-Dependent Synaptic Plasticity",
    Nature Neuroscience 3, 2000.

    Example::

        decay = lambda tau: float(torch.tensor(-1 / tau).exp())  # tau in steps, here 1 ms
        visual_cortex = sf.plasticity.STDPRule(
            decay(16.8), decay(33.7), potentiation=0.0, depression=7.1e-3,
            slow_post_decay=decay(114.0), triplet_potentiation=6.5e-3)

    Args:
        pre_decay, post_decay: factors of the traces in each step, in [0, 1].
        potentiation, depression: the amplitudes `A2+` and `A2-` of pairs.
        slow_pre_decay, slow_post_decay: factors of the slow traces, in [0, 1].
        triplet_potentiation, triplet_depression: the amplitudes `A3+` and `A3-` of triplets.
        eligibility_decay: factor of the eligibility in each step, if there are rewards.

    Raises:
        TypeError, ValueError: a factor is not a number in [0, 1], or an amplitude not a number.
    """

    pre_decay: float = 0.95
    post_decay: float = 0.95
    potentiation: float = 1.0
    depression: float = 1.0
    slow_pre_decay: float = 0.99
    slow_post_decay: float = 0.99
    triplet_potentiation: float = 0.0
    triplet_depression: float = 0.0
    eligibility_decay: float = 0.99

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            bounds = (0.0, 1.0) if name.endswith("decay") else ()
            number(name, value, *bounds)


@torch.no_grad()
def stdp(
    pre: Tensor,
    post: Tensor,
    rule: STDPRule = STDPRule(),
    reward: Tensor | None = None,
    state: Any = None,
    return_state: bool = False,
) -> Any:
    """Return by how much STDP, or reward-modulated STDP, potentiates and depresses the synapses.

    Equations, with `up[t]` of `STDPRule` for each sample and the rewards `R`; as well for `down`::

        up = mean_b sum_t up[t]             without rewards
        up = mean_b sum_t R[t] e[t],        e[t] = eligibility_decay e[t - 1] + up[t]

    Both are positive amounts, so that the update of the weight and its bounds are up to you::

        weight += 0.01 * (up - down)                            # then weight.clamp_(0, 1): hard
        weight += 0.01 * ((1 - weight) * up - weight * down)    # soft bounds 0 and 1

    Source: that of `STDPRule`; for the eligibility `e`, Izhikevich, "Solving the Distal Reward
    Problem through Linkage of STDP and Dopamine Signaling", Cerebral Cortex 17, 2007.

    Example::

        layer, neuron = nn.Linear(784, 400, bias=False), sf.LIF(0.9)
        x = (torch.rand(100, 16, 784) < 0.05).float()
        with torch.no_grad():
            up, down = sf.plasticity.stdp(x, neuron(layer(x)))
            layer.weight += 1e-4 * (up - down)

    Args:
        pre: spikes before the weights, `[T, B, N]`, of any real dtype; for a recurrent layer, those
            that it reads, its own of the step before.
        post: spikes after the weights, `[T, B, M]`.
        rule: the constants.
        reward: `[T, B]`, of any sign; None for STDP without rewards.
        state: what `return_state` gave for the steps before; None for none.
        return_state: also return the traces and, with rewards, the eligibilities: two tensors
            `[B, M, N]`.

    Returns:
        `(up, down)`, float32 `[M, N]`, the shape of the weight of `nn.Linear(N, M)`, zeros for
        B = 0; with `return_state` a pair of this and the state.

    Raises:
        TypeError: an argument is not a dense tensor, or `rule` no rule.
        ValueError: shapes do not agree, or rewards begin or end between parts of a sequence: pass
            zeros for steps without one.
    """
    sequences = {"pre": pre, "post": post, **({} if reward is None else {"reward": reward})}
    for name, x in sequences.items():
        check_tensor(name, x)
        if x.is_complex():
            raise TypeError(f"{name} is {x.dtype}: expected real numbers")
    if not isinstance(rule, STDPRule):
        raise TypeError(f"rule is {rule!r}: expected an STDPRule")
    if pre.ndim != 3 or post.ndim != 3 or pre.shape[:2] != post.shape[:2] or not len(pre):
        raise ValueError(
            f"pre and post have shapes {list(pre.shape)} and {list(post.shape)}: expected "
            "[T, B, N] and [T, B, M] with T >= 1"
        )
    before, after, eligibility = (None, None, None) if state is None else state
    if state is not None and (eligibility is None) != (reward is None):
        raise ValueError(
            "the steps before had a reward, and these have none, or the other way round: pass "
            "zeros for steps without a reward"
        )
    with torch.autocast(pre.device.type, enabled=False):
        pairs, before, after = _factors(pre.float(), post.float(), rule, before, after)
        if reward is None:
            changes = tuple(_mean_product(left, right) for left, right in pairs)
        else:
            changes = _rewarded(pairs, reward, rule.eligibility_decay, eligibility)
            if return_state:
                eligibility = _eligibility(pairs, rule.eligibility_decay, eligibility)
    return (changes, (before, after, eligibility)) if return_state else changes


class _Traces(Neuron):
    """Returns the fast trace, with the spikes of the step itself if `own` is 1, or without if it is
    0, and the spikes times the factor that the slow trace gives."""

    fast, slow = State(), State()

    def __init__(self, *constants: float) -> None:
        super().__init__()
        self.decay, self.slow_decay, self.pair, self.triplet, self.own = map(float, constants)

    def step(self, spikes: Tensor, fast: Tensor, slow: Tensor) -> tuple[Outputs, States]:
        fast, slow = self.decay * fast, self.slow_decay * slow
        factor = self.pair + self.triplet * slow
        return (fast + self.own * spikes, factor * spikes), (fast + spikes, slow + spikes)


def _factors(
    pre: Tensor, post: Tensor, rule: STDPRule, before: Any, after: Any
) -> tuple[list[Pair], Any, Any]:
    """Return the factors `[T, B, M]` and `[T, B, N]` of `up` and `down`, and the last traces."""
    of_pre = _Traces(
        rule.pre_decay, rule.slow_pre_decay, rule.depression, rule.triplet_depression, 1.0
    )
    of_post = _Traces(
        rule.post_decay, rule.slow_post_decay, rule.potentiation, rule.triplet_potentiation, 0.0
    )
    (pre_trace, pre), before = of_pre(pre, state=before, return_state=True)
    (post_trace, post), after = of_post(post, state=after, return_state=True)
    return [(post, pre_trace), (post_trace, pre)], before, after


def _rewarded(
    pairs: list[Pair], reward: Tensor, decay: float, eligibility: Pair | None
) -> tuple[Tensor, ...]:
    """Multiply each step's change by the rewards that follow, each discounted by the steps in
    between, so that no eligibility of a single step is computed."""
    steps = pairs[0][0].shape[:2]
    if reward.shape != steps:
        raise ValueError(f"reward has shape {list(reward.shape)}: expected [T, B] = {list(steps)}")
    ahead = LI(decay)(reward.float().flip(0).unsqueeze(2)).flip(0)
    changes = tuple(_mean_product(ahead * left, right) for left, right in pairs)
    if eligibility is None:
        return changes
    first = decay * ahead[0].unsqueeze(2)
    last = ((first * e).sum(0) / max(len(e), 1) for e in eligibility)
    return tuple(c + e for c, e in zip(changes, last, strict=True))


def _eligibility(pairs: list[Pair], decay: float, earlier: Pair | None) -> Pair:
    """Return the eligibilities after the last step, those of `up` and `down`, `[B, M, N]`."""
    steps = len(pairs[0][0])
    weights = decay ** torch.arange(steps - 1, -1, -1, device=pairs[0][0].device).view(-1, 1, 1)
    up, down = ((weights * left).permute(1, 2, 0) @ right.transpose(0, 1) for left, right in pairs)
    if earlier is None:
        return up, down
    return up + decay**steps * earlier[0], down + decay**steps * earlier[1]


def _mean_product(left: Tensor, right: Tensor) -> Tensor:
    return left.flatten(0, 1).T @ right.flatten(0, 1) / max(left.shape[1], 1)
