"""Kernels of random definitions and shapes against the eager loop."""

import operator

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, Phase, given, settings

import spikefuse as sf
from spikefuse.testing import Backends, assert_matches_reference, make_input

# Operations that every backend rounds correctly, with results of moderate size.
BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": lambda a, b: torch.clamp(a, -2.0, 2.0) * torch.clamp(b, -2.0, 2.0),
    "div": lambda a, b: a / (1.0 + torch.abs(b)),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda a, b: torch.where((a > b) & (a != 0.5), a, 0.5 * b),
    "select": lambda a, b: torch.where((a <= b) | ~(b >= 0.25), b, a),
}
UNARY = {
    "neg": operator.neg,
    "abs": torch.abs,
    "relu": torch.relu,
    "half": lambda a: 0.5 * a,
    "clamp": lambda a: torch.clamp(a, min=-1.0, max=1.5),
    "square": lambda a: torch.clamp(a, -2.0, 2.0) ** 2,
}
# Operations that are accurate to float32, but not bit for bit.
SMOOTH = {
    "sqrt": lambda a: torch.sqrt(torch.abs(a) + 0.5),
    "exp": lambda a: torch.exp(-torch.abs(a)),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "log": lambda a: torch.log(torch.abs(a) + 0.5),
    "power": lambda a: (torch.abs(a) + 0.5) ** 1.7,
}


class Random(sf.Neuron):
    """A step computed by a random expression: each instruction reads two earlier values."""

    v, w = sf.State(), sf.State(0.5)

    def __init__(self, program, spiking):
        super().__init__()
        self.program, self.spiking = program, spiking
        self.decay = 0.75
        self.bias = torch.nn.Parameter(torch.tensor(0.3))
        self.surrogate = sf.surrogate.Triangle(2.0)

    def step(self, x, y, v, w):
        values = [x, y, self.decay * v, w, self.bias + 0.0 * x]
        for name, i, j in self.program:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(BINARY[name](a, b) if name in BINARY else {**UNARY, **SMOOTH}[name](a))
        h, other = values[-1], values[-2]
        # Otherwise products of states would overflow float32.
        h = torch.clamp(h, -8.0, 8.0)
        s = self.surrogate(h - 0.5) if self.spiking else 0.5 * h
        return (s, torch.clamp(other, -8.0, 8.0)), (h - s, 0.5 * w + 0.25 * h)


def programs(names):
    index = st.integers(0, 30)
    return st.lists(
        st.tuples(st.sampled_from(sorted(names)), index, index), min_size=2, max_size=9
    ).map(tuple)


SHAPES = st.tuples(st.integers(1, 19), st.integers(1, 3), st.integers(1, 4), st.integers(1, 20))
EXAMPLES = settings(
    # The examples are fixed. Each takes seconds to compile on a CPU, which runs fewer.
    max_examples=10 if torch.cuda.is_available() else 4,
    deadline=None,
    derandomize=True,
    # No shrinking: each attempt would compile kernels, and the programs are short already.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def check(program, shape, seed, spiking, backends: Backends):
    neuron = Random(program, spiking).to(backends.device)
    inputs = [make_input(shape, device=backends.device, seed=seed + i) for i in range(2)]
    assert_matches_reference(neuron, inputs, backends.impls, exact=spiking)


@EXAMPLES
@given(programs([*BINARY, *UNARY]), SHAPES, st.integers(0, 99))
def test_spiking_definitions_of_exact_operations(backends, program, shape, seed):
    check(program, shape, seed, True, backends)


@EXAMPLES
@given(programs([*BINARY, *UNARY, *SMOOTH]), SHAPES, st.integers(0, 99))
def test_smooth_definitions(backends, program, shape, seed):
    check(program, shape, seed, False, backends)
