"""Every definition, backend, reset, dtype, layout and T against the eager loop.

tests/gpu/test_exactness.py runs the same tests on a GPU.
"""

import itertools

import pytest
import torch

import spikefuse as sf
from spikefuse.testing import DTYPES, LAYOUTS, assert_matches_reference, make_input

STEPS = (1, 2, 7, 16, 33, 130)
RESETS = ("hard", "soft", "hard-detached")
# A multiple of 16 neurons, in more than one block of a float32 kernel, and a number that is not.
SHAPES = ((2, 2, 8, 10), (3, 3, 5, 5))


class Gated(sf.Neuron):
    """A user's own: two inputs, two outputs, a threshold per channel, a state from 0.25."""

    u, w = sf.State(0.25), sf.State()

    def __init__(self, reset="hard", detach_reset=False, channels=4):
        super().__init__()
        self.threshold = torch.nn.Parameter(torch.linspace(0.4, 0.9, channels))
        self.gain = torch.nn.Parameter(torch.tensor(0.7))
        self.surrogate = sf.surrogate.Triangle(1.5)
        self.reset, self.detach_reset = reset, detach_reset

    def step(self, x, y, u, w):
        w = 0.75 * w + self.gain * y
        h = torch.where(y > 0, 0.8 * u + x, 0.5 * u) + torch.clamp(w, min=-1.0, max=1.0)
        s = self.surrogate(h - self.threshold)
        r = s.detach() if self.detach_reset else s
        new = h * (1 - r) if self.reset == "hard" else h - self.threshold * r
        return (s, torch.maximum(new, w)), (new, w)


DEFINITIONS = {
    "LIF": lambda c, **kw: sf.LIF(0.8, 0.6, v_reset=-0.1, **kw),
    "IF": lambda c, **kw: sf.IF(1.2, surrogate=sf.surrogate.FastSigmoid(), **kw),
    "PLIF": lambda c, **kw: sf.PLIF(0.7, **kw),
    "PLIF-channel": lambda c, **kw: sf.PLIF(
        0.7, channels=c, surrogate=sf.surrogate.Rectangle(-0.5, 0.7, 0.9), **kw
    ),
    "ALIF": lambda c, **kw: sf.ALIF(0.7, 0.7, **kw),
    "Gated": lambda c, **kw: Gated(channels=c, **kw),
}


def make(name, reset, channels, device):
    options = {"reset": reset.split("-")[0], "detach_reset": reset.endswith("detached")}
    return DEFINITIONS[name](channels, **options).to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_equals_reference(name, reset, dtype, backends):
    for (i, num_steps), constant in itertools.product(enumerate(STEPS), (False, True)):
        shape = SHAPES[i % 2]
        neuron = make(name, reset, shape[1], backends.device)
        inputs = [
            make_input((num_steps, *shape), dtype, backends.device, seed, constant)
            for seed in range(len(neuron.input_names))
        ]
        # Two in three start from a state that is given.
        state = tuple(
            make_input(shape, torch.float32, backends.device, seed=9 + j)
            for j in range(len(neuron.states))
        )
        try:
            assert_matches_reference(
                neuron,
                inputs,
                backends.impls,
                state if i % 3 else None,
                # An input that is constant in time has no other layout.
                layouts=LAYOUTS[:1] if constant else LAYOUTS,
            )
        except AssertionError as error:
            raise AssertionError(f"T = {num_steps}, constant {constant}: {error}") from error
