"""Random networks: plain and fused, under each memory policy, against the eager loop."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse import memory
from spikefuse.testing import LAYOUTS, lay_out, make_input, within_budget

ROUNDING = 2.0**-24
RETAINS_LAST = [int(part) for part in torch.__version__.split(".")[:2]] > [2, 11]
POLICIES = (memory.SaveAll(), memory.Recompute(), memory.Bits())


def learned(rng: random.Random) -> sf.Neuron:
    """A neuron whose values are all learned, of kernels of its own: its class is new."""
    kind = rng.choice((sf.surrogate.Sigmoid, sf.surrogate.Arctan, sf.surrogate.FastSigmoid))
    decay, threshold, width = (nn.Parameter(torch.tensor(v)) for v in (0.6, 0.4, 2.0))
    return sf.LIF(decay, threshold, surrogate=type("Own", (kind,), {})(width))


NEURONS: tuple[Callable[[random.Random], sf.Neuron], ...] = (
    lambda rng: sf.LIF(rng.choice((0.2, 0.5, 0.9)), rng.choice((0.3, 1.0))),
    lambda rng: sf.LIF(0.5, 0.4, reset="soft", detach_reset=True),
    lambda rng: sf.PLIF(0.5, rng.choice((0.3, 0.6))),
    lambda rng: sf.ALIF(0.8, 0.5),
    learned,
)


def add_in_place(x: Tensor, y: Tensor) -> Tensor:
    y += x
    return y


#: How a residual is added, each another graph.
SUMS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    add_in_place,
    lambda x, y: x + y,
    lambda x, y: y.add(x),
    lambda x, y: torch.add(y, x, alpha=1),
    lambda x, y: torch.cat((x, y), 1).unflatten(1, (2, -1)).sum(1),
    lambda x, y: y + (x + y),
)


class Residual(nn.Module):
    """A residual around layers, and perhaps a neuron of the sum, which is read twice then."""

    def __init__(self, body: nn.Sequential, rng: random.Random, neuron: nn.Module | None) -> None:
        super().__init__()
        # Not in place what a neuron has saved.
        sums = SUMS[isinstance(body[-1], sf.Neuron) :]
        self.body, self.sum, self.neuron = body, rng.choice(sums), neuron

    def forward(self, x: Tensor) -> Tensor:
        y = self.sum(x, self.body(x))
        return y if self.neuron is None else self.neuron(y) + y


class Observed(nn.Module):
    """A norm whose result is read by hooks, and whose gradients are asked for, beside a neuron."""

    def __init__(self, norm: nn.Module, neuron: nn.Module, rng: random.Random) -> None:
        super().__init__()
        self.norm, self.neuron, self.is_late = norm, neuron, rng.random() < 0.5
        scale = rng.choice((None, 0.5, 2.0))
        # Compiled by PyTorch 2.11, a tensor retains its gradient from before its hooks.
        self.scale, self.seen = scale if RETAINS_LAST else None, []

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if not y.requires_grad:
            return self.neuron(y)
        s = self.neuron(y) if self.is_late else None
        if self.scale is not None:
            y.register_hook(lambda g: self.scale * g)
        y.retain_grad()
        self.seen.append(y)
        return self.neuron(y) if s is None else s


class Checkpointed(nn.Module):
    """Layers that backward computes a second time."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return sf.checkpoint(self.layers, x)


class Generator:
    """Draws a network for images `[C, S, S]`."""

    def __init__(self, rng: random.Random, samples: int) -> None:
        self.rng, self.samples = rng, samples
        self.channels, self.size = rng.randint(1, 3), rng.choice((2, 4, 5, 8))
        self.input = self.channels, self.size, self.size

    def network(self) -> nn.Sequential:
        stages = [layer for _ in range(self.rng.randint(1, 4)) for layer in self.stage()]
        width = self.channels * self.size**2
        layers = [*stages, nn.Flatten()]
        for out in (self.rng.randint(1, 6) for _ in range(self.rng.randint(0, 2))):
            layers.append(nn.Linear(width, out, bias=self.rng.random() < 0.5))
            norm = self.samples >= 4 and self.rng.random() < 0.4
            layers += [nn.BatchNorm1d(out)] if norm else []
            layers += self.neuron(0.6)
            width = out
        if not any(isinstance(m, sf.Neuron) for layer in layers for m in layer.modules()):
            layers += self.neuron(1.0)
        return nn.Sequential(*layers)

    def stage(self) -> Iterator[nn.Module]:
        kinds = "conv", "conv", "residual", "checkpoint", "observed", "pool", "neuron"
        kind = self.rng.choice(kinds)
        if kind == "conv":
            yield from self.conv(self.rng.randint(1, 5))
            yield from self.neuron(0.8)
        elif kind == "residual":
            layers = [*self.conv(self.channels), *self.neuron(0.3)]
            neuron = next(iter(self.neuron(0.3)), None)
            yield Residual(nn.Sequential(*layers), self.rng, neuron)
            yield from self.neuron(0.7)
        elif kind == "checkpoint":
            yield Checkpointed(*self.conv(self.channels), *self.neuron(0.7))
        elif kind == "observed" and (norms := [*self.norm(1.0)]):
            yield Observed(norms[0], self.neuron(1.0)[0], self.rng)
        elif kind == "pool" and self.size >= 4:
            self.size //= 2
            yield self.rng.choice((nn.AvgPool2d, nn.MaxPool2d, sf.nn.MaxPool2d))(2)
        else:
            yield from self.norm(0.5)
            yield from self.neuron(1.0)

    def conv(self, out: int) -> Iterator[nn.Module]:
        size, bias = self.rng.choice((1, 3)), self.rng.random() < 0.3
        yield nn.Conv2d(self.channels, out, size, padding=size // 2, bias=bias)
        self.channels = out
        yield from self.norm(0.7)

    def norm(self, probability: float) -> Iterator[nn.Module]:
        if self.samples * self.size**2 >= 4 and self.rng.random() < probability:
            yield nn.BatchNorm2d(self.channels)

    def neuron(self, probability: float) -> list[nn.Module]:
        rng = self.rng
        return [rng.choice(NEURONS)(rng)] if rng.random() < probability else []


def results(net: sf.Temporal, x: Tensor, impl: str = "auto") -> dict[str, Tensor]:
    """Return the output, the gradients and the buffers, in double precision for double inputs."""
    leaf = x.detach().requires_grad_()
    y = net(leaf, impl=impl)
    generator = torch.Generator().manual_seed(1)
    loss = (y.double() * torch.randn(y.shape, generator=generator)).sum()
    observed = {name: m for name, m in net.named_modules() if isinstance(m, Observed)}
    seen = {name: m.seen.pop() for name, m in observed.items() if m.seen}
    asked = torch.autograd.grad(loss, [*seen.values()], retain_graph=True) if seen else ()
    loss.backward()
    found = {"output": y.detach(), "gradient of the input": leaf.grad}
    found |= {f"gradient of {name}'s norm": g for name, g in zip(seen, asked, strict=True)}
    found |= {f"gradient that {name}'s norm retains": z.grad for name, z in seen.items()}
    found |= {f"gradient of {name}": p.grad for name, p in net.named_parameters()}
    found |= {name: buffer.clone() for name, buffer in net.named_buffers()}
    return {name: torch.zeros(()) if v is None else v for name, v in found.items()}


def spikes(net: nn.Module, x: Tensor, impl: str, error: float = 0.0) -> list[Tensor]:
    """Return the outputs of all neurons of a plain network whose norms err."""
    net, found = copy.deepcopy(net), []
    for m in net.modules():
        if isinstance(m, sf.Neuron):
            m.register_forward_hook(lambda m, args, y: found.append(y.detach().float()))
        elif isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.register_forward_hook(lambda m, args, y: y + error)
    with torch.no_grad():
        sf.Temporal(net)(x, impl=impl)
    return found


def is_steady(net: nn.Module, x: Tensor) -> bool:
    """Return whether rounding decides no spike, as far as errors of the input and of norms show."""
    expected, double = spikes(net, x, "reference"), copy.deepcopy(net).double()
    others = [spikes(double, (1 + e) * x.double(), "reference", e) for e in (-1e-5, 0.0, 1e-5)]
    return all(torch.equal(a, b) for o in others for a, b in zip(o, expected, strict=True))


def sensitivity(net: sf.Temporal, x: Tensor, truth: dict[str, Tensor]) -> dict[str, float]:
    """Return how far each result moves, in roundings, if each layer rounds at random.

    Sums of many values round at each addition, for which it is doubled twice.
    """

    def rounded(y: Tensor) -> Tensor:  # and so is its gradient
        return y * (1 + ROUNDING * torch.randn_like(y))

    moved = dict.fromkeys(truth, 0.0)
    for _ in range(4):
        other = copy.deepcopy(net)
        for m in other.net.modules():
            if not list(m.children()):
                m.register_forward_hook(lambda m, args, y: rounded(y))
        for name, value in results(other, rounded(x), "reference").items():
            moved[name] = max(moved[name], 4 * float((value - truth[name]).abs().max()) / ROUNDING)
    return moved


def unequal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return the names of results that differ; all statistics of nothing are NaN."""
    names = [name for name in expected if name not in actual]
    pairs = {name: (actual[name], expected[name]) for name in actual if name in expected}
    return names + [n for n, p in pairs.items() if not torch.allclose(*p, equal_nan=True)]


def case(seed: int) -> list[str]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    torch.compiler.reset()  # each network would count as a recompilation, up to a limit
    steps, batch = rng.choice((1, 2, 4, 7)), rng.randint(1, 3)
    generator = Generator(rng, steps * batch)
    if is_empty := rng.random() < 0.03:  # with the layers of more samples
        batch = 0
    net = generator.network().train(rng.random() < 0.8)
    x = make_input((steps, batch, *generator.input), seed=seed, constant=rng.random() < 0.3)
    # PyTorch's batch norm on a CPU (2.13) misreads gradients of a single image of other strides.
    if x.stride(0) and steps * batch > 1:
        x = lay_out(x, rng.choice(LAYOUTS))
    steady, found = not is_empty and is_steady(net, x), []
    expected = results(sf.Temporal(copy.deepcopy(net)), x, "reference")
    double = sf.Temporal(copy.deepcopy(net).double())
    truth = results(copy.deepcopy(double), x.double(), "reference")
    if steady:
        pairs = zip(spikes(net, x, "auto"), spikes(net, x, "reference"), strict=True)
        found += [
            f"spikes of neuron {i} differ" for i, p in enumerate(pairs) if not torch.equal(*p)
        ]
    scales = sensitivity(double, x.double(), truth) if steady else {}
    gradients = [name for name in scales if name.startswith("gradient")]
    # A norm makes some gradients 0 by differences of much larger ones, on which no result depends.
    largest = 4 * max([truth[name].abs().max().item() for name in gradients], default=0.0)
    scales |= {name: max(scales[name], largest) for name in gradients}
    # Of the second call of a captured network, other numbers of steps and samples are symbols.
    others = [(steps, batch + 1), (steps + 1, batch + 2)] if rng.random() < 0.2 else []
    others = [make_input((*sizes, *generator.input), seed=seed) for sizes in others]
    for fused, policies in ((False, POLICIES), (True, (*POLICIES, memory.Checkpoint()))):
        first = None
        for policy in policies:
            variant = sf.Temporal(copy.deepcopy(net), policy)
            variant = sf.fuse(variant) if fused else variant
            actual = results(variant, x)
            actual |= {f"output {i}": variant(other).detach() for i, other in enumerate(others)}
            if fused and any(report.notes for report in variant.fusion.reports):
                found.append(variant.fusion.summary)
            first, label = first or actual, f"{'fused' if fused else 'plain'}, {policy}"
            for name in (name for name in actual if name.startswith("output")):
                if not torch.equal(actual[name], first[name]):
                    found.append(f"{label}: the {name} is not that of {policies[0]}")
            if is_empty:
                found += [f"{label}: {what}" for what in unequal(actual, expected)]
            for name in expected if steady else ():
                try:
                    values = actual[name].float(), expected[name].float(), truth[name]
                    within_budget(f"{label}: {name}", values, 16.0, scales[name])
                except AssertionError as error:
                    found.append(str(error))
    return [f"{net}, {list(x.shape)}", *found] if found else []
