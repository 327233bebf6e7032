"""Neurons that tests of kernels run: a user's own and all models."""

import torch

import spikefuse as sf

RESETS = ("hard", "soft", "hard-detached")


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


CORE = {
    "LIF": lambda c, **kw: sf.LIF(0.8, 0.6, v_reset=-0.1, **kw),
    "IF": lambda c, **kw: sf.IF(1.2, surrogate=sf.surrogate.FastSigmoid(), **kw),
    "PLIF": lambda c, **kw: sf.PLIF(0.7, **kw),
    "PLIF-channel": lambda c, **kw: sf.PLIF(
        0.7, channels=c, surrogate=sf.surrogate.Rectangle(-0.5, 0.7, 0.9), **kw
    ),
    "ALIF": lambda c, **kw: sf.ALIF(0.7, 0.7, **kw),
    "Gated": lambda c, **kw: Gated(channels=c, **kw),
}
# Each model sees every backend and layout; the rest of the code is that of the core.
ZOO = {
    "LIF-decay-input": lambda c, **kw: sf.LIF(0.8, 0.3, decay_input=True, **kw),
    "CubaLIF": lambda c, **kw: sf.CubaLIF(
        torch.nn.Parameter(torch.linspace(0.3, 0.8, c)), 0.8, 0.6, v_reset=-0.1, **kw
    ),
    "AlphaLIF": lambda c, **kw: sf.AlphaLIF(0.9, 0.7, 0.4, **kw),
    "AdLIF": lambda c, **kw: sf.AdLIF(
        0.7, 0.3, torch.nn.Parameter(torch.linspace(0.9, 0.98, c)), 0.2, 0.4, **kw
    ),
    "SEAdLIF": lambda c, **kw: sf.SEAdLIF(
        0.7, 0.3, 0.95, 2.0, torch.nn.Parameter(torch.linspace(2.0, 5.0, c)), **kw
    ),
    "QIF": lambda c, **kw: sf.QIF(3.0, -0.1, 0.7, 0.2, 0.6, v_reset=-0.2, **kw),
    "EIF": lambda c, **kw: sf.EIF(3.0, -0.1, 0.7, 0.8, 0.6, v_reset=-0.2, **kw),
    "Izhikevich": lambda c, **kw: sf.Izhikevich(3.0, -0.1, 0.7, 0.2, 3.0, 0.3, 0.4, 0.6, **kw),
    "AdEx": lambda c, reset, **kw: sf.AdEx(3.0, -0.1, 0.7, 0.8, 5.0, 0.3, 0.4, 0.6, **kw),
    "BRF": lambda c, **kw: sf.BRF(
        torch.nn.Parameter(torch.linspace(0.5, 2.5, c)), 0.3, 0.2, dt=0.3
    ),
    "CSiLIF": lambda c, reset, **kw: sf.CSiLIF(
        torch.nn.Parameter(torch.linspace(0.1, 0.5, c)), 0.5, 1.0, 0.6, 0.6
    ),
    "StochasticLIF": lambda c, reset, **kw: sf.StochasticLIF(
        0.8, 0.6, torch.nn.Parameter(torch.linspace(0.2, 0.5, c))
    ),
    "KLIF": lambda c, **kw: sf.KLIF(0.8, 0.6, 1.3, c, **kw),
    "KLIF-scaled": lambda c, **kw: sf.KLIF(0.8, 0.6, 1.3, scale_reset=True, **kw),
    "CLIF": lambda c, reset, **kw: sf.CLIF(0.7, 0.6, **kw),
    "GatedLIF": lambda c, reset, **kw: sf.GatedLIF(channels=c, **kw),
    "RefractoryLIF": lambda c, **kw: sf.RefractoryLIF(0.8, 0.6, 3, **kw),
    "DelayedResetLIF": lambda c, **kw: sf.DelayedResetLIF(0.8, 0.6, v_reset=-0.1, **kw),
    "TernaryLIF": lambda c, **kw: sf.TernaryLIF(0.8, 0.6, **kw),
    "IntegerLIF": lambda c, reset, **kw: sf.IntegerLIF(0.7, 0.4, 3, **kw),
    "TwoCompartmentLIF": lambda c, **kw: sf.TwoCompartmentLIF(0.4, 0.6, channels=c, **kw),
    "SlidingPSN": lambda c, reset, **kw: sf.SlidingPSN(3),
    "RateIF": lambda c, reset, **kw: sf.RateIF(torch.linspace(0.4, 0.9, c), shift=0.05),
    "ShortTermPlasticity": lambda c, **kw: sf.ShortTermPlasticity(
        torch.nn.Parameter(torch.linspace(0.2, 0.5, c)), 0.9, 0.8
    ),
    "LI": lambda c, **kw: sf.LI(sf.LearnableFraction(0.8, c)),
    "LI-decay-input": lambda c, **kw: sf.LI(0.8, decay_input=True),
}
DEFINITIONS = CORE | ZOO
# Models with one reset, or none.
RESETS_OF = dict.fromkeys(("CLIF", "GatedLIF", "IntegerLIF"), ("own", "own-detached"))
RESETS_OF |= dict.fromkeys(
    ("SlidingPSN", "RateIF", "ShortTermPlasticity", "LI", "LI-decay-input"), ("none",)
)
# Their reset is that of a base class, which others test.
RESETS_OF |= dict.fromkeys(("AdEx", "BRF", "CSiLIF", "StochasticLIF"), ("own",))
# Models with operations that are not rounded correctly everywhere.
SMOOTH = ("EIF", "CLIF", "AdEx", "BRF", "CSiLIF")


def make(name, reset, channels, device):
    """A neuron with a reset, such as "hard-detached"."""
    options = {"reset": reset.split("-")[0], "detach_reset": reset.endswith("detached")}
    return DEFINITIONS[name](channels, **options).to(device)
