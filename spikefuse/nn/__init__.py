"""Modules for ordinary PyTorch networks."""

from spikefuse.nn.explain import explain
from spikefuse.nn.neuron import ALIF, IF, LIF, PLIF, Neuron
from spikefuse.nn.temporal import Temporal

__all__ = ["ALIF", "IF", "LIF", "PLIF", "Neuron", "Temporal", "explain"]
