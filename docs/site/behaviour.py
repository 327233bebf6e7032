"""Draw how each neuron behaves, and write the page about it: python docs/site/behaviour.py

All models get the same inputs, in units of an input at which the model fires, see `unit`.
"""

from __future__ import annotations

import hashlib
import inspect
import io
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

import spikefuse as sf

PAGE = Path(__file__).resolve().parents[1] / "behaviour.md"
FOLDER = PAGE.parent / "behaviour"
BLUE, ORANGE = "#0072b2", "#d55e00"
STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 8,
    "axes.titlesize": 8,
    "lines.linewidth": 1,
}
STEPS, ON, OFF = 160, 20, 120
LONG = 400  # steps for rates
MODELS = {
    name: kind
    for name, kind in sorted(vars(sf).items())
    if inspect.isclass(kind) and issubclass(kind, sf.Neuron) and kind is not sf.Neuron
}
ARGUMENTS = {"SlidingPSN": {"order": 4}}
# They emit no spikes; a synapse receives them.
SYNAPSE = "ShortTermPlasticity"
VALUES = ("LI", SYNAPSE)
INTRODUCTION = """# How neurons behave

Each model with its default arguments, drawn by `docs/site/behaviour.py`. From left to right:

- **Step**: a constant input begins and ends (shaded): potential before the reset (blue) and spikes
  (orange).
- **Noise**: the spikes of 12 neurons with independent normal inputs.
- **Rate over input** (f-I curve): outputs per step for constant inputs, without the first half of
  the sequence.
- **Surrogate**: what backward takes for the derivative of the spike, over the distance to the
  threshold.

Inputs are in units of the smallest constant input that adds a spike in 20 steps to the rate without
input. The step has 1.5 of them, and the noise a standard deviation of 2. Models without spikes show
their output; `ShortTermPlasticity` receives spikes. [Neurons](neurons.md) has the equations.
"""


def make(name: str) -> sf.Neuron:
    torch.manual_seed(0)
    neuron: sf.Neuron = MODELS[name](**ARGUMENTS.get(name, {}))
    return neuron


@torch.no_grad()
def outputs(name: str, x: Tensor) -> dict[str, Tensor]:
    """The outputs and the potentials before the reset, `[T, M]`, of neurons for inputs `[T, M]`."""
    neuron = make(name).eval()
    torch.manual_seed(0)
    with sf.record(neuron, states=("spikes", "h")) as record:
        neuron(x, impl="reference")
    return dict(record[""].items())


def unit(name: str) -> float:
    """The smallest constant input, of some, that adds 0.05 spikes a step, after a while."""
    if name in VALUES:
        return 0.5
    inputs = torch.tensor([0.0, *(2.0**k * q for k in range(-6, 9) for q in (1, 1.25, 1.5, 1.75))])
    rates = outputs(name, inputs.expand(LONG, -1))["spikes"][LONG // 2 :].mean(0)
    return float(inputs[rates >= rates[0] + 0.05][0])


def draw(name: str) -> Figure:
    scale = unit(name)
    figure = Figure((9.2, 1.9))
    step, noise, curve, derivative = figure.subplots(1, 4, width_ratios=[3, 3, 2, 2])
    draw_step(step, name, 1.5 * scale)
    x = torch.randn(STEPS, 12, generator=torch.Generator().manual_seed(0)) * 2 * scale
    y = outputs(name, spikes(x) if name == SYNAPSE else x)["spikes"]
    if name in VALUES:
        noise.plot(y[:, :3])
    else:
        rows = [y[:, i].abs().nonzero().flatten().tolist() for i in range(12)]
        noise.eventplot(rows, colors="black", linelengths=0.8)
        noise.set(yticks=[], ylabel="neuron")
    noise.set(title="noise", xlabel="time step", xlim=(0, STEPS))
    inputs = torch.linspace(0, 4 * scale, 81)
    rate = outputs(name, inputs.expand(LONG, -1))["spikes"][LONG // 2 :].mean(0)
    curve.plot(inputs / scale, rate, color=BLUE)
    curve.set(title=f"{'output' if name in VALUES else 'rate'} over input", xlabel="input, units")
    surrogate = getattr(make(name), "surrogate", None)
    if surrogate is None:
        derivative.axis("off")
    else:
        u = torch.linspace(-2, 2, 401, requires_grad=True)
        (gradient,) = torch.autograd.grad(surrogate(u).sum(), u)
        derivative.plot(u.detach(), gradient, color=BLUE)
        derivative.axvline(0, color="gray", linewidth=0.5)
        derivative.set(title=f"surrogate: {type(surrogate).__name__}", xlabel="input − threshold")
    return figure


def draw_step(axes: Axes, name: str, value: float) -> None:
    x = torch.zeros(STEPS, 1)
    x[ON:OFF] = value
    title = f"1.5 units of input, {value:.3g}"
    if name == SYNAPSE:
        x[ON:OFF], title = 0.0, "ten spikes"
        x[ON:OFF:10] = 1.0
    found = outputs(name, x)
    axes.axvspan(ON, OFF, color="#eeeeee")
    if name in VALUES:
        axes.plot(found["spikes"], color=BLUE)
    else:
        axes.plot(found["h"], color=BLUE)
        bottom, top = axes.get_ylim()
        height = top - bottom
        axes.set_ylim(bottom, top + 0.15 * height)
        times = found["spikes"][:, 0].abs().nonzero().flatten().tolist()
        axes.vlines(times, top, top + 0.1 * height, color=ORANGE)
    axes.set(title=title, xlabel="time step", xlim=(0, STEPS))


def spikes(noise: Tensor) -> Tensor:
    return (noise > 1).float()


def page() -> str:
    parts = [INTRODUCTION]
    for name in MODELS:
        summary = (inspect.getdoc(MODELS[name]) or "").split("\n\n")[0].replace("\n", " ")
        parts.append(f"## {name}\n\n{summary}\n\n![{name}](behaviour/{name}.png)\n")
    return "\n".join(parts)


def digest() -> str:
    """Identify what figures are drawn by."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    about = PngInfo()
    about.add_text("Description", digest())
    for name in MODELS:
        file = io.BytesIO()
        draw(name).savefig(file, dpi=85)
        few_colours = Image.open(file).convert("RGB").quantize(32)
        few_colours.save(FOLDER / f"{name}.png", optimize=True, pnginfo=about)
    PAGE.write_text(page())


if __name__ == "__main__":
    with matplotlib.rc_context(STYLE):
        main()
