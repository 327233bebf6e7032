"""The models of `spikefuse.neurons` as modules: thin names on top of `Neuron`."""

from __future__ import annotations

from spikefuse import neurons
from spikefuse.nn.neuron import Neuron

# In the order in which they are offered and documented.
__all__ = [  # noqa: RUF022
    "LIF",
    "IF",
    "PLIF",
    "ALIF",
    "AdLIF",
    "SEAdLIF",
    "CubaLIF",
    "AlphaLIF",
    "RefractoryLIF",
    "DelayedResetLIF",
    "KLIF",
    "CLIF",
    "GatedLIF",
    "QIF",
    "EIF",
    "Izhikevich",
    "TernaryLIF",
    "IntegerLIF",
    "TwoCompartmentLIF",
    "LI",
]


class LIF(Neuron, neurons.LIF):
    __doc__ = neurons.LIF.__doc__


class IF(Neuron, neurons.IF):
    __doc__ = neurons.IF.__doc__


class PLIF(Neuron, neurons.PLIF):
    __doc__ = neurons.PLIF.__doc__


class ALIF(Neuron, neurons.ALIF):
    __doc__ = neurons.ALIF.__doc__


class AdLIF(Neuron, neurons.AdLIF):
    __doc__ = neurons.AdLIF.__doc__


class SEAdLIF(Neuron, neurons.SEAdLIF):
    __doc__ = neurons.SEAdLIF.__doc__


class CubaLIF(Neuron, neurons.CubaLIF):
    __doc__ = neurons.CubaLIF.__doc__


class AlphaLIF(Neuron, neurons.AlphaLIF):
    __doc__ = neurons.AlphaLIF.__doc__


class RefractoryLIF(Neuron, neurons.RefractoryLIF):
    __doc__ = neurons.RefractoryLIF.__doc__


class DelayedResetLIF(Neuron, neurons.DelayedResetLIF):
    __doc__ = neurons.DelayedResetLIF.__doc__


class KLIF(Neuron, neurons.KLIF):
    __doc__ = neurons.KLIF.__doc__


class CLIF(Neuron, neurons.CLIF):
    __doc__ = neurons.CLIF.__doc__


class GatedLIF(Neuron, neurons.GatedLIF):
    __doc__ = neurons.GatedLIF.__doc__


class QIF(Neuron, neurons.QIF):
    __doc__ = neurons.QIF.__doc__


class EIF(Neuron, neurons.EIF):
    __doc__ = neurons.EIF.__doc__


class Izhikevich(Neuron, neurons.Izhikevich):
    __doc__ = neurons.Izhikevich.__doc__


class TernaryLIF(Neuron, neurons.TernaryLIF):
    __doc__ = neurons.TernaryLIF.__doc__


class IntegerLIF(Neuron, neurons.IntegerLIF):
    __doc__ = neurons.IntegerLIF.__doc__


class TwoCompartmentLIF(Neuron, neurons.TwoCompartmentLIF):
    __doc__ = neurons.TwoCompartmentLIF.__doc__


class LI(Neuron, neurons.LI):
    __doc__ = neurons.LI.__doc__
