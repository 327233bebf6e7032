"""Balance a pole on a cart: reinforcement learning, one time step of the network per move.

Many carts run side by side. At each move, the network reads where they are, and answers with a push
to the left or right, and with the reward that it expects (advantage actor-critic). Its neurons
carry their states from move to move, and start a trial from rest.

python examples/cart_pole.py
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributions import Categorical

import spikefuse as sf

MOVES, DISCOUNT, LONGEST = 32, 0.98, 500
SCALE = torch.tensor([2.4, 2.0, 0.2, 2.0])
State = dict[str, tuple[Tensor, ...]] | None  # of the neurons; None for rest


class Carts:
    """Carts on a track, each with a pole: Barto, Sutton, Anderson, IEEE TSMC 13(5), 1983.

    A trial ends when a pole leans by 12 degrees, at the end of the track, or after 500 moves.
    """

    def __init__(self, count: int) -> None:
        self.state = torch.empty(count, 4).uniform_(-0.05, 0.05)  # x, speed, angle and turn
        self.age = torch.zeros(count)

    def push(self, right: Tensor) -> tuple[Tensor, Tensor]:
        """Push each cart with 10 N; return whether its trial has ended, and its number of moves."""
        _, speed, angle, turn = self.state.unbind(1)
        sine, cosine = angle.sin(), angle.cos()
        force = (20.0 * right - 10.0 + 0.05 * turn.square() * sine) / 1.1  # 1.1 kg, 0.1 in the pole
        leaning = (9.8 * sine - cosine * force) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
        moved = torch.stack([speed, force - 0.05 * leaning * cosine / 1.1, turn, leaning], 1)
        self.state, self.age = self.state + 0.02 * moved, self.age + 1
        x, _, angle, _ = self.state.unbind(1)
        ended = (x.abs() > 2.4) | (angle.abs() > math.radians(12)) | (self.age == LONGEST)
        age, start = self.age, torch.empty_like(self.state).uniform_(-0.05, 0.05)
        self.state = torch.where(ended[:, None], start, self.state)
        self.age = torch.where(ended, 0, age)
        return ended, age


def make_network() -> sf.Temporal:
    """`[T, B, 4]` to `[T, B, 3]`: preferences for two pushes, and the expected reward."""
    return sf.Temporal(nn.Sequential(
        nn.Linear(4, 64), sf.LIF(decay=0.5, threshold=0.5),
        nn.Linear(64, 64), sf.LIF(decay=0.5, threshold=0.5),
        nn.Linear(64, 3), sf.LI(decay=0.5)))  # fmt: skip


def look(net: sf.Temporal, carts: Carts, state: State) -> tuple[Categorical, Tensor, Any]:
    """Run one time step from `state`: the pushes, the expected reward, and the next state."""
    outputs, later = net((carts.state / SCALE)[None], state=state, return_state=True)
    return Categorical(logits=outputs[0, :, :2]), outputs[0, :, 2], later


def play(net: sf.Temporal, carts: Carts, state: State) -> tuple[Tensor, State, list[float]]:
    """Make some moves; return the loss, the state, and the lengths of the trials that ended."""
    if state is not None:  # gradients flow through the moves of this call
        state = {name: tuple(s.detach() for s in own) for name, own in state.items()}
    chances, entropies, values, ends, lengths = [], [], [], [], []
    for _ in range(MOVES):
        pushes, value, state = look(net, carts, state)
        push = pushes.sample()
        chances.append(pushes.log_prob(push))
        entropies.append(pushes.entropy())
        values.append(value)
        ended, age = carts.push(push)
        ends.append(ended)
        lengths += age[ended].tolist()
        state = {name: tuple(s * ~ended[:, None] for s in own) for name, own in state.items()}
    with torch.no_grad():
        _, later, _ = look(net, carts, state)
    rewards: list[torch.Tensor] = []  # one for each move that a pole stands, discounted
    for ended in reversed(ends):
        later = ~ended * (1 + DISCOUNT * later)
        rewards.insert(0, later)
    surplus = torch.stack(rewards) - torch.stack(values)
    gain = surplus.detach() / surplus.std().detach()
    loss = -(gain * torch.stack(chances)).mean() + surplus.square().mean() / 100
    return loss - 0.01 * torch.stack(entropies).mean(), state, lengths


def main(updates: int, count: int = 64) -> tuple[float, float]:
    """Train, and return the mean length of 100 trials at the start and at the end."""
    torch.manual_seed(0)
    net, carts, means = make_network(), Carts(count), []
    state: State = None
    recent: deque[float] = deque(maxlen=100)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for update in range(updates):
        loss, state, lengths = play(net, carts, state)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        recent.extend(lengths)
        means.append(sum(recent) / max(len(recent), 1))
        print(f"\rupdate {update + 1}: poles stand for {means[-1]:.0f} moves  ", end="", flush=True)
    print()
    return means[0], means[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=200, help="of 32 moves of each cart")
    parser.add_argument("--count", type=int, default=64, help="carts side by side")
    main(**vars(parser.parse_args()))
