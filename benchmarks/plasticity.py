"""The change of a layer's weights by pair STDP, beside loops over time.

    PYTHONPATH=.parity python -m benchmarks.plasticity

784 inputs, 400 neurons, T = 250, B = 16, as in networks that learn digits, 3 % of the inputs and
1 % of the neurons fire in a step. One loop adds the outer products of all samples, as the rule is
usually written; the other takes a matrix product in each step. SpikingJelly's function adds over
samples, and spikes of the same step also depress.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import spikefuse as sf
from benchmarks import runner
from benchmarks.jelly import spikingjelly
from benchmarks.layers import LOOP, OURS
from benchmarks.runner import Contender, Record, Timing, difference, first_line, measure

SIZE, QUICK_SIZE = (250, 16, 784, 400), (5, 2, 12, 7)  # T, B, inputs, neurons
OUTER, MATRIX, JELLY = LOOP, f"{LOOP}, matrix products", "SpikingJelly"
TAU = 20.0
DECAY = 1 - 1 / TAU
TOLERANCE = 1e-5  # relative difference of sums in another order


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("plasticity", __doc__, rounds=7)
    parser.set_defaults(device="cpu")
    args = runner.parse(parser, argv)
    T, B, N, M = QUICK_SIZE if args.quick else SIZE
    title = f"{N}-{M}, T = {T}, B = {B}"
    return runner.run_cases(args, [(title, partial(pair_stdp, args, T, B, N, M))])


def pair_stdp(args: argparse.Namespace, T: int, B: int, N: int, M: int) -> Record:
    torch.manual_seed(0)
    pre, post = (torch.rand(T, B, n, device=args.device) < p for n, p in ((N, 0.03), (M, 0.01)))
    pre, post = pre.float(), post.float()
    rule = sf.plasticity.STDPRule(DECAY, DECAY)

    def ours() -> Tensor:
        up, down = sf.plasticity.stdp(pre, post, rule)
        return up - down

    expected = looped(product, pre.double(), post.double())
    same_step = product(post.flatten(0, 1).double(), pre.flatten(0, 1).double())
    contenders = [
        Contender(OURS, ours),
        Contender(OUTER, partial(looped, outer, pre, post)),
        Contender(MATRIX, partial(looped, product, pre, post)),
        jelly(pre, post),
    ]

    def verify(contender: Contender, change: Tensor) -> None:
        is_jelly = contender.name == JELLY
        error = difference([change], [B * expected - same_step if is_jelly else expected])
        assert error < TOLERANCE, f"relative difference {error:.2g}"

    return measure(contenders, verify, Timing.of(args, whole_steps=True))


def outer(post: Tensor, pre: Tensor) -> Tensor:
    return (post.unsqueeze(2) * pre.unsqueeze(1)).sum(0)


def product(post: Tensor, pre: Tensor) -> Tensor:
    return post.T @ pre


def looped(correlate: Callable[[Tensor, Tensor], Tensor], pre: Tensor, post: Tensor) -> Tensor:
    """Return the mean over samples, one step after the other."""
    _, B, N = pre.shape
    change = pre.new_zeros(post.shape[2], N)
    before, after = pre.new_zeros(B, N), pre.new_zeros(B, post.shape[2])
    for x, y in zip(pre, post, strict=True):
        before, after = DECAY * before + x, DECAY * after
        change += correlate(y, before)
        change -= correlate(after, x)
        after += y
    return change / B


def jelly(pre: Tensor, post: Tensor) -> Contender:
    """SpikingJelly's function for one step of `nn.Linear`, in its loop."""
    try:
        (functional,) = spikingjelly("functional")
        step = functional.stdp_linear_step
    except Exception as error:  # it, or what it needs, is not installed
        return Contender(JELLY, unavailable=first_line(error))
    weight = pre.new_ones(post.shape[2], pre.shape[2])

    def run() -> Tensor:
        change, traces = (
            torch.zeros_like(weight),
            (torch.zeros_like(pre[0]), torch.zeros_like(post[0])),
        )
        for x, y in zip(pre, post, strict=True):
            delta, traces = step(x, y, traces, weight, tau_pre=TAU, tau_post=TAU)
            change += delta
        return change

    return Contender(JELLY, run)


if __name__ == "__main__":
    main()
