"""Every definition, backend, reset, dtype, layout and T against the eager loop."""

import itertools
from zlib import crc32

import pytest
import torch

from spikefuse import reference
from spikefuse.kernels import numba_host
from spikefuse.testing import DTYPES, LAYOUTS, Backends, assert_matches_reference, make_input
from tests.definitions import CORE, DEFINITIONS, RESETS, RESETS_OF, SMOOTH, ZOO, make

# Threads share kernels of any size, also where they end in the middle of a sample.
pytestmark = pytest.mark.usefixtures("any_threads", "two_threads")

STEPS = (1, 2, 7, 16, 33, 70)
# A multiple of 16 neurons, in several blocks of each kernel, and a number that is not, in one.
# The interpreter's time depends on the number of blocks, not on their neurons.
SHAPES = ((2, 2, 8, 10), (3, 2, 3, 5))
# A multiple of 16 neurons, in several blocks of a backward kernel alone: for a CPU.
SMALL = (2, 2, 4, 9)


def turn_of(name):
    """A number that decides what a neuron sees. It does not depend on the other neurons."""
    return crc32(name.encode())


def cases():
    """Half precision with every reset of the core where there is a GPU, else with the first. On a
    CPU, models of the zoo take turns: each has one of the two half precisions."""
    every = CORE if torch.cuda.is_available() else {}
    for name in DEFINITIONS:
        halves = DTYPES[1:]
        if name in ZOO and not torch.cuda.is_available():
            halves = (DTYPES[1 + turn_of(name) // 2 % 2],)
        for i, reset in enumerate(RESETS_OF.get(name, RESETS)):
            for dtype in (DTYPES[0], *(halves if name in every or i == 0 else ())):
                yield pytest.param(name, reset, dtype, id=f"{name}-{reset}-{dtype}")


def calls(name, reset, dtype, device):
    """(T, shape, constant in time, whether a state is given, layouts).

    A GPU sees every T in every layout. A CPU, which compiles longer and whose interpreter is slow,
    sees every layout where chunks are whole and where the last is not; and every T with a neuron's
    first reset, but with each of the others and in half precision only half of them: all T with
    every reset and dtype, as neurons, resets and dtypes take turns.
    """
    every = device == "cuda"
    if name not in CORE:
        turn = turn_of(name)
        yield 19, SHAPES[0] if every else (SMALL, SHAPES[1])[turn % 2], False, True, LAYOUTS
        yield 3, SHAPES[1], True, False, LAYOUTS[:1]
        return
    turn = RESETS.index(reset) + DTYPES.index(dtype)
    for i, num_steps in enumerate(STEPS):
        if turn > 0 and not every and (i + turn + turn_of(name)) % 2:
            continue
        shape, is_given = SHAPES[i % 2], i % 3 > 0
        if num_steps == 33 and not every:
            shape = SMALL
        layouts = LAYOUTS if every or num_steps in (16, 33) else LAYOUTS[:1]
        yield num_steps, shape, False, is_given, layouts
        if every or num_steps in (1, 16):
            # An input that is constant in time has no other layout.
            yield num_steps, shape, True, is_given, LAYOUTS[:1]


def impls_of(name, reset, dtype, backends):
    """The backends of a case.

    On a CPU a model of the zoo has both in float32 with its first reset, and else takes turns: its
    half precision is Numba's or Triton's, as is one of two more resets, and each reset and each
    dtype is both's.
    """
    resets = RESETS_OF.get(name, RESETS)
    turn = turn_of(name) + resets.index(reset) + DTYPES.index(dtype)
    first = reset == resets[0] and dtype == torch.float32
    if name in CORE or first or backends.device == "cuda" or len(backends.impls) == 1:
        return backends.impls
    return backends.impls[turn % 2 :][:1]


def steady(neuron, inputs, state):
    """The inputs, 0 for neurons that a change by 1e-5 makes spike at other times: there, rounding
    decides."""
    runs = [
        reference.scan(neuron, tuple(x.double() * scale for x in inputs), state)[0][0]
        for scale in (1.0, 1 - 1e-5, 1 + 1e-5)
    ]
    moved = ((runs[1] != runs[0]) | (runs[2] != runs[0])).any(0)
    assert moved.float().mean() < 0.05
    return [(x[:1] if x.stride(0) == 0 else x).masked_fill(moved, 0.0).expand_as(x) for x in inputs]


@pytest.mark.parametrize(("name", "reset", "dtype"), [*cases()])
def test_equals_reference(name, reset, dtype, backends, monkeypatch):
    if name in ZOO:
        # The same ranges on threads of Python. OpenMP's are entered by compiled code, which depends
        # on the types of the arguments only; the core and test_numba_host run it.
        monkeypatch.setattr(numba_host, "_has_openmp", False)
    impls = impls_of(name, reset, dtype, backends)
    for num_steps, shape, constant, is_given, layouts in calls(name, reset, dtype, backends.device):
        neuron = make(name, reset, shape[1], backends.device)
        inputs = [
            make_input((num_steps, *shape), dtype, backends.device, seed, constant)
            for seed in range(len(neuron.input_names))
        ]
        state = tuple(
            make_input(shape, torch.float32, backends.device, seed=9 + j)
            for j in range(len(neuron.states))
        )
        state = state if is_given else None
        if name in SMOOTH:
            inputs = steady(neuron, inputs, state)
        try:
            assert_matches_reference(
                neuron,
                inputs,
                impls,
                state,
                exact=name not in SMOOTH,
                layouts=layouts,
            )
        except AssertionError as error:
            raise AssertionError(f"T = {num_steps}, constant {constant}: {error}") from error


def test_turns_cover_every_combination():
    for reset, dtype in itertools.product(RESETS, DTYPES):
        steps = {call[0] for name in CORE for call in calls(name, reset, dtype, "cpu")}
        assert steps == {*STEPS}, f"{reset}, {dtype}: T is one of {steps} only"
    both, seen = Backends("cpu", ("numba", "triton")), {}
    for name, reset, dtype in (case.values for case in cases()):
        if name in ZOO:
            for key in (reset, dtype):
                seen.setdefault(key, set()).update(impls_of(name, reset, dtype, both))
    assert all(impls == {*both.impls} for impls in seen.values()), seen
