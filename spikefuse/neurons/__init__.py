"""Neuron models: what they compute, not how. Each file is one model."""

from spikefuse.neurons.ad_lif import AdLIF
from spikefuse.neurons.alif import ALIF
from spikefuse.neurons.alpha_lif import AlphaLIF
from spikefuse.neurons.clif import CLIF
from spikefuse.neurons.cuba_lif import CubaLIF
from spikefuse.neurons.definition import Definition, State
from spikefuse.neurons.delayed_reset_lif import DelayedResetLIF
from spikefuse.neurons.eif import EIF
from spikefuse.neurons.gated_lif import GatedLIF
from spikefuse.neurons.if_ import IF
from spikefuse.neurons.integer_lif import IntegerLIF
from spikefuse.neurons.izhikevich import Izhikevich
from spikefuse.neurons.klif import KLIF
from spikefuse.neurons.learnable import (
    Learnable,
    LearnableFraction,
    LearnablePositive,
    LearnableTimeConstant,
)
from spikefuse.neurons.li import LI
from spikefuse.neurons.lif import LIF, decay_from_tau
from spikefuse.neurons.plif import PLIF
from spikefuse.neurons.qif import QIF
from spikefuse.neurons.refractory_lif import RefractoryLIF
from spikefuse.neurons.se_ad_lif import SEAdLIF
from spikefuse.neurons.ternary_lif import TernaryLIF
from spikefuse.neurons.two_compartment_lif import TwoCompartmentLIF

__all__ = [
    "ALIF",
    "CLIF",
    "EIF",
    "IF",
    "KLIF",
    "LI",
    "LIF",
    "PLIF",
    "QIF",
    "AdLIF",
    "AlphaLIF",
    "CubaLIF",
    "Definition",
    "DelayedResetLIF",
    "GatedLIF",
    "IntegerLIF",
    "Izhikevich",
    "Learnable",
    "LearnableFraction",
    "LearnablePositive",
    "LearnableTimeConstant",
    "RefractoryLIF",
    "SEAdLIF",
    "State",
    "TernaryLIF",
    "TwoCompartmentLIF",
    "decay_from_tau",
]
