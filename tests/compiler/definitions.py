"""Random definitions of neurons, as source text, and their comparison with the eager loop.

Operations that every backend rounds correctly make *exact* values; `exp`, `log`, `sqrt` and the
like, and all that is computed from them, are *smooth*. Conditions and spikes depend on exact values
only: a rounding error must not change them.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import spikefuse as sf
from spikefuse.kernels import numba_host, numba_runtime
from spikefuse.testing import ROUNDING, Run, run, within_budget

CHANNELS = 3
SHAPE = (5, 2, CHANNELS, 4)
# The relative error of a few operations, for values that lie far apart.
ROUNDINGS = 4 * 2.0**-24

EXACT = (
    "{a} + {b}",
    "{a} - {b}",
    "{a} * {b}",
    "{a} / torch.abs({b})",
    "{a} / (torch.abs({b}) + 0.5)",
    "{n} / torch.square({a})",
    "{n} - {a}",
    "-{a}",
    "torch.abs({a})",
    "torch.relu({a})",
    "torch.floor({a})",
    "torch.ceil({a})",
    "torch.round({a})",
    "torch.trunc({a})",
    "torch.fmod({a}, 0.75)",
    "{a} % 1.25",
    "torch.div({a}, 0.75, rounding_mode='floor')",
    "F.leaky_relu({a}, 0.25)",
    "{a} * torch.where({c}, 2, 3)",
    "torch.square({a})",
    "{a} ** 3",
    "{a} ** -2",
    "torch.reciprocal(torch.abs({a}))",
    "torch.sign({a}) * {b}",
    "torch.maximum({a}, {b})",
    "torch.minimum({a}, {b})",
    "torch.clamp({a}, -1.0, 1.5)",
    "torch.clamp({a}, min={b})",
    "torch.clamp({a}, max={b})",
    "{a}.detach() * {b}",
    "torch.where({c}, {a}, {b})",
    "torch.where({c}, {a}, {n})",
    "torch.where({a} != 0.0, {b} / {a}, {n})",
    "{a}.masked_fill({c}, {n})",
    "{a} * ({c})",
    "{a} * ({c}).float()",
    "{a} * (1 - ({c}).float())",
    "({c}).float() - {a}",
)
SMOOTH = (
    "torch.exp(torch.clamp({a}, max=4.0))",
    "torch.exp(-torch.abs({a}))",
    "torch.log({a})",
    "torch.log(torch.abs({a}))",
    "torch.sqrt({a})",
    "torch.sqrt(torch.abs({a}))",
    "torch.rsqrt(torch.abs({a}))",
    "torch.sigmoid({a})",
    "torch.tanh({a})",
    "torch.sin({a})",
    "torch.cos({a})",
    "torch.erf({a})",
    "torch.log2(torch.abs({a}))",
    "torch.log1p(torch.abs({a}))",
    "torch.expm1(torch.clamp({a}, max=4.0))",
    "torch.hypot({a}, {b})",
    "torch.atan2({a}, torch.abs({b}) + 0.5)",
    "F.softplus({a})",
    "F.silu({a})",
    "F.gelu(torch.clamp({a}, -1e4, 1e4))",  # PyTorch's is NaN at infinity on some CPUs
    "F.elu({a})",
    "torch.lerp({a} + 0.0 * x0, {b} + 0.0 * x0, 0.25)",  # of one dtype, in float64, too
    "(torch.abs({a}) + 0.5) ** torch.clamp({b}, -4.0, 4.0)",
    "torch.clamp(torch.abs({a}), max=8.0) ** 1.7",
    "2.0 ** torch.clamp({a}, -4.0, 4.0)",
    "torch.where({e} > 0.0, torch.log({e}), {a})",
    "torch.where({e} > 0.0, torch.sqrt({e}), {a})",
    "torch.where({e} < 1.0, torch.exp({e}), {a})",
)
CONDITIONS = (
    "{e} >= {f}",
    "{e} > {f}",
    "{e} <= {n}",
    "{e} < {n}",
    "{e} == {f}",
    "{e} != {n}",
    "{e} - {f} > 0",
    "({c}) & ({d})",
    "({c}) | ({d})",
    "({c}) ^ ({d})",
    "~({c})",
    "({c}) == ({d})",
    "({c}) & {t}",
    "({c}) | {t}",
    "torch.logical_and({c}, {e})",
    "torch.logical_or({e}, {f})",
    "torch.logical_not({e})",
    "torch.where({c}, {d}, {e} > {n})",
    "torch.where({c}, {t}, {t}) & ({d})",
)
NUMBERS = ("0.0", "0.5", "1.0", "-0.5", "2.0", "0.1")
BRANCHES = ("self.flag", "not self.flag", "self.mode == 2", 'self.kind == "soft"')
SURROGATES = (
    *("Sigmoid()", "Triangle(2.0)", "Rectangle(-1.0, 1.0)", "FastSigmoid()"),
    *("Arctan(cutoff=-1.0)", "StraightThrough()", "Gaussian()"),
)

HEADER = """\
class Drawn(sf.Neuron):
{states}

    def __init__(self):
        super().__init__()
        self.decay, self.level = 0.75, 0.5
        self.gain = torch.nn.Parameter(torch.tensor(0.7))
        self.bias = torch.nn.Parameter(torch.tensor([0.5, 0.0, -0.25]))
        self.scale = torch.tensor([1.0, 0.5, -2.0])
        self.flag, self.mode, self.kind = {flag}, {mode}, {kind!r}
        self.surrogate = sf.surrogate.{surrogate}

    def step(self, {arguments}):
"""


@dataclass
class Definition:
    """The source of a neuron; whether each output and each state is exact."""

    source: str
    num_inputs: int
    outputs: tuple[bool, ...]
    states: tuple[bool, ...]

    @property
    def is_steep(self) -> bool:
        """Whether derivatives have terms without bound, which may cancel."""
        return bool(re.search(r"/ torch\.abs\(\w+\)|reciprocal|sqrt|log", self.source))

    def build(self) -> sf.Neuron:
        scope: dict = {"torch": torch, "F": F, "sf": sf, "__name__": __name__}
        exec(self.source, scope)
        return scope["Drawn"]()


@dataclass
class _Writer:
    draw: random.Random
    exact: list[str]
    smooth: list[str]
    conditions: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def pick(self, values: list[str]) -> str:
        """Return a value, often one of the last."""
        return self.draw.choice(values[-3:] if self.draw.random() < 0.5 else values)

    def fill(self, template: str, values: list[str]) -> str:
        """Return the template with random operands: `a`, `b` from `values`, `e`, `f` exact."""
        names = {key: self.pick(values) for key in "ab"}
        names |= {key: self.pick(self.exact) for key in "ef"}
        # The gradient of x / x is 0 only as the difference of equal terms, g / x and g x / x^2:
        # what rounding leaves of them, some 1e-5 in eager PyTorch, too, exceeds any budget
        # relative to 0.
        if names["a"] == names["b"]:
            names["b"] = f"(0.7 * {names['a']})" if "/" not in template else "self.level"
        names |= {"n": self.draw.choice(NUMBERS), "t": self.draw.choice(("True", "False"))}
        if "{t}, {t}" in template:
            names["t"] = f"torch.tensor({names['t']})"
        for key in "cd":
            compared = f"{self.pick(self.exact)} > {self.draw.choice(NUMBERS)}"
            names[key] = self.draw.choice([compared, *self.conditions])
        return template.format(**names)

    def assign(self, kind: str) -> None:
        """Append a line that assigns a new value, sometimes in branches on an attribute."""
        pools = {"exact": self.exact, "smooth": self.smooth, "condition": self.conditions}
        templates = {"exact": EXACT, "smooth": (*EXACT, *SMOOTH), "condition": CONDITIONS}[kind]
        values = [*self.exact, *self.smooth] if kind == "smooth" else self.exact
        name = f"{kind[0]}{len(self.lines)}"
        first, second = (self.fill(self.draw.choice(templates), values) for _ in range(2))
        if self.draw.random() < 0.1:
            test = self.draw.choice(BRANCHES)
            self.lines += [f"if {test}:", f"    {name} = {first}"]
            self.lines += ["else:", f"    {name} = {second}"]
        else:
            self.lines.append(f"{name} = {first}")
        pools[kind].append(name)

    def recent(self, exact: bool) -> str:
        values = self.exact if exact or not self.smooth else self.smooth
        return self.draw.choice(values[-6:])


def draw_definition(seed: int) -> Definition:
    """Return the random definition that belongs to `seed`."""
    draw = random.Random(seed)
    inputs = [f"x{i}" for i in range(draw.randint(1, 3))]
    kinds = {f"v{i}": draw.random() < 0.6 for i in range(draw.randint(1, 4))}
    exact = ["self.decay", "self.level", "self.gain", "self.bias", "self.scale", *inputs]
    exact += [v for v, is_exact in kinds.items() if is_exact]
    smooth = [v for v, is_exact in kinds.items() if not is_exact]
    writer = _Writer(draw, exact, smooth)
    for _ in range(draw.randint(3, 10)):
        chosen = "exact" if all(kinds.values()) and draw.random() < 0.7 else "smooth"
        writer.assign(draw.choice([chosen, "exact", "exact", "condition"]))
    h = writer.recent(exact=True)
    writer.lines += [f"h = torch.clamp({h}, -4.0, 4.0) + 0.5 * x0", "s = self.surrogate(h - 0.5)"]
    writer.exact += ["h", "s"]

    new = []
    for is_exact in kinds.values():
        value = writer.recent(is_exact)
        forms = ["h * (1 - s)", "h - 0.5 * s", f"0.5 * {value}", f"torch.clamp({value}, -4.0, 4.0)"]
        if writer.conditions:
            forms.append(draw.choice(writer.conditions))
        new.append(draw.choice(forms + forms[-1:] * 2))
    outputs = {"s": True}
    for _ in range(draw.randint(0, 2)):
        is_exact = draw.random() < 0.5 or not writer.smooth
        outputs[writer.recent(is_exact)] = is_exact
    if writer.conditions and draw.random() < 0.2:
        outputs[draw.choice(writer.conditions)] = True
    if not any(name in " ".join(new) for name in ("h", "s")) and len(outputs) > 1:
        outputs.pop("s") if draw.random() < 0.1 else None
    writer.lines.append(f"return ({', '.join(outputs)},), ({', '.join(new)},)")
    states = [f"    {v} = sf.State({draw.choice((0.0, 0.0, 0.5))})" for v in kinds]
    header = HEADER.format(
        states="\n".join(states),
        flag=draw.random() < 0.5,
        mode=draw.randint(1, 2),
        kind=draw.choice(("soft", "hard")),
        surrogate=draw.choice(SURROGATES),
        arguments=", ".join([*inputs, *kinds]),
    )
    source = header + "".join(f"        {line}\n" for line in writer.lines)
    return Definition(source, len(inputs), tuple(outputs.values()), tuple(kinds.values()))


def draw_tensor(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return normal random values, half of them multiples of 0.5, so that zeros and ties occur."""
    generator = torch.Generator().manual_seed(seed)
    x, rounded = (torch.randn(shape, generator=generator) for _ in range(2))
    return torch.where(torch.rand(shape, generator=generator) < 0.5, x, (2 * rounded).round() / 2)


def differences(
    seed: int,
    impl: str,
    device: str = "cpu",
    shape: tuple[int, ...] = SHAPE,
    change: Callable[[Tensor], Tensor] = lambda x: x,
) -> list[str]:
    """Return what differs between an implementation and the eager loop, one line each.

    Args:
        shape: of the inputs, `[T, B, CHANNELS, ...]`.
        change: gives an input another dtype or layout.
    """
    definition = draw_definition(seed)
    neuron = definition.build().to(device)
    drawn = [draw_tensor(shape, 100 * seed + i) for i in range(definition.num_inputs)]
    inputs = [change(x.to(device)) for x in drawn]
    state = None
    if seed % 3 == 0:
        starts = range(len(definition.states))
        state = tuple(draw_tensor(shape[1:], 100 * seed + 50 + i).to(device) for i in starts)
    truth = run(neuron, inputs, state, "float64")
    expected = run(neuron, inputs, state, "reference")
    actual = run(neuron, inputs, state, impl)
    found = []

    def check(
        name: str,
        a: Tensor,
        e: Tensor,
        t: Tensor,
        exact: bool,
        scale: float = 0.0,
        error: float = 0.0,
    ) -> None:
        try:
            if exact:
                assert torch.equal(a.nan_to_num(1.5e38), e.nan_to_num(1.5e38)), f"{name} differs"
            elif not torch.allclose(a, e, ROUNDINGS, 0.0, equal_nan=True):
                within_budget(name, (a, e, t), 8.0, scale, error=error)
        except AssertionError as error:
            found.append(str(error))

    for role in ("outputs", "states"):
        rows = zip(*(getattr(r, role) for r in (actual, expected, truth)), strict=True)
        for i, (values, is_exact) in enumerate(zip(rows, getattr(definition, role), strict=True)):
            # Terms of about 1 cancel, as in `1 - F.softplus(self.gain)`, of which the loop may have
            # no error where all elements have one value.
            check(f"{role} {i}", *values, exact=is_exact, error=2.0**-24)
    if not same_conditions(expected, truth):
        return found
    generator = torch.Generator().manual_seed(seed)
    results = (*expected.outputs, *expected.states)
    weights = [torch.randn(r.shape, generator=generator).to(device) for r in results]
    wanted, true, gradients = (r.backward(weights) for r in (expected, truth, actual))
    takes_zeros_for_none = has_states_without_effect(neuron, definition)
    # What parameters receive as a sum: through the potential, and from the results themselves.
    summed = torch.cat([t.double().flatten().cpu() for t in (true["input 0"], *weights)])
    scale = summed[summed.isfinite()].norm().item()
    for name, gradient in gradients.items():
        is_sum = name in ("gain", "bias") or name.startswith("surrogate")
        terms = 100 * scale if definition.is_steep else is_sum * scale
        # Infinities have either sign, and cancel to NaN in one order of additions only.
        pair = [torch.where(g.isfinite(), g, torch.nan) for g in (gradient, wanted[name])]
        if takes_zeros_for_none:  # where the loop multiplies 0 by an infinite derivative
            pair[1] = torch.where(pair[1].isnan() & gradient.isfinite(), gradient, pair[1])
        check(f"gradient of {name}", *pair, true[name], False, terms)
    return found


def has_states_without_effect(neuron: sf.Neuron, definition: Definition) -> bool:
    """Return whether no output depends on some state, at any later step.

    Of the gradients of such states, zeros count as none (docs/explanation/exactness.md).
    """
    inputs = [torch.rand(1, 1, CHANNELS) for _ in range(definition.num_inputs)]
    states = tuple(torch.rand(1, CHANNELS, requires_grad=True) for _ in definition.states)
    outputs, new = neuron.cpu()(*inputs, state=states, return_state=True, impl="reference")
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    reads = [
        {i for i, s in enumerate(states) if result.requires_grad and _depends(result, s)}
        for result in (*outputs, *new)
    ]
    useful = set().union(*reads[: len(outputs)])
    for _ in states:
        useful |= set().union(*(reads[len(outputs) + i] for i in useful))
    return len(useful) < len(states)


def _depends(result: Tensor, state: Tensor) -> bool:
    (found,) = torch.autograd.grad(result.sum(), state, retain_graph=True, allow_unused=True)
    return found is not None


def same_conditions(expected: Run, truth: Run) -> bool:
    """Return whether the float64 run took the same branches, as far as its results show."""
    results = zip(
        (*expected.outputs, *expected.states), (*truth.outputs, *truth.states), strict=True
    )
    return all(
        torch.allclose(a.double(), b.double(), tolerance, tolerance, True)
        for a, b in results
        for tolerance in (max(1e-3, 4 * ROUNDING[a.dtype]),)
    )


def _at(array: np.ndarray, addresses: tuple[int, ...], index: int) -> np.ndarray:
    if not addresses:
        return array
    if not addresses[index]:
        return array[:0]
    memory = (ctypes.c_char * sys.maxsize).from_address(addresses[index])
    return np.ndarray(1 << 40, array.dtype, memory)


def _load(array: np.ndarray, index: int, slot: int) -> np.float32:
    if array.dtype == np.uint16:  # bfloat16
        return (np.uint32(array[index]) << np.uint32(16)).view(np.float32)
    return np.float32(array[index])


def _store(array: np.ndarray, index: int, value: np.float32, slot: int) -> None:
    if array.dtype == np.uint16:
        value = torch.tensor(value).bfloat16().view(torch.uint16).item()
    array[index] = value


def _fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))  # the product is exact


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run newly generated Numba source as Python, without its compilation, which takes seconds."""
    compiled = numba_runtime.kernel

    def kernel(function: Callable[..., Any]) -> Any:
        # Modules of the library that are first imported here stay compiled for other users.
        return compiled(function) if function.__module__.startswith("spikefuse.") else function

    replaced = {
        "kernel": kernel,
        "at": _at,
        "load": _load,
        "store": _store,
        "fma": _fma,
        "add": lambda a, b: a + b,
        "exp": np.exp,
        "sigmoid": lambda x: np.float32(1.0) / (np.float32(1.0) + np.exp(-x)),
        "channel_rows": numba_runtime.channel_rows.py_func,
        "unsigned": int,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(numba_runtime, **replaced))
        stack.enter_context(mock.patch.object(numba_host, "MIN_TASK", sys.maxsize))  # one thread
        stack.enter_context(np.errstate(all="ignore"))
        yield


if __name__ == "__main__":
    impl, device, first, last, stride = sys.argv[1:]
    torch.set_num_threads(1)  # there are several such processes
    context = interpreted() if impl == "interpreted" else contextlib.nullcontext()
    context.__enter__()
    impl = "numba" if impl == "interpreted" else impl
    for seed in range(int(first), int(last), int(stride)):
        try:
            found = differences(seed, impl, device)
        except Exception as error:
            found = [f"{type(error).__name__}: {str(error)[:300]}"]
        if found:
            print(f"seed {seed}: {'; '.join(found)}", flush=True)
    print("done", first, flush=True)
