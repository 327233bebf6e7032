"""Neurons: what they compute in one time step, not how. Each model has a file."""

from spikefuse.neurons.ad_lif import AdLIF
from spikefuse.neurons.adex import AdEx
from spikefuse.neurons.alif import ALIF
from spikefuse.neurons.alpha_lif import AlphaLIF
from spikefuse.neurons.brf import BRF
from spikefuse.neurons.c_silif import CSiLIF
from spikefuse.neurons.clif import CLIF
from spikefuse.neurons.cuba_lif import CubaLIF
from spikefuse.neurons.definition import Neuron, State
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
from spikefuse.neurons.rate_if import RateIF
from spikefuse.neurons.refractory_lif import RefractoryLIF
from spikefuse.neurons.se_ad_lif import SEAdLIF
from spikefuse.neurons.short_term_plasticity import ShortTermPlasticity
from spikefuse.neurons.sliding_psn import SlidingPSN
from spikefuse.neurons.stochastic_lif import StochasticLIF
from spikefuse.neurons.ternary_lif import TernaryLIF
from spikefuse.neurons.two_compartment_lif import TwoCompartmentLIF

# In the order in which they are offered and documented.
__all__ = [  # noqa: RUF022
    "Neuron",
    "SlidingPSN",
    "State",
    "LIF",
    "IF",
    "PLIF",
    "ALIF",
    "AdLIF",
    "SEAdLIF",
    "CubaLIF",
    "AlphaLIF",
    "RateIF",
    "RefractoryLIF",
    "DelayedResetLIF",
    "KLIF",
    "CLIF",
    "GatedLIF",
    "QIF",
    "EIF",
    "AdEx",
    "Izhikevich",
    "BRF",
    "CSiLIF",
    "StochasticLIF",
    "TernaryLIF",
    "IntegerLIF",
    "TwoCompartmentLIF",
    "LI",
    "ShortTermPlasticity",
    "Learnable",
    "LearnableFraction",
    "LearnablePositive",
    "LearnableTimeConstant",
    "decay_from_tau",
]
