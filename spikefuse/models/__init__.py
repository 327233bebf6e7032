"""Network architectures, written for one time step and run by `spikefuse.Temporal`.

Every builder takes these arguments; further ones default to the published values:

    neuron: returns a new neuron module per call, such as `lambda: spikefuse.LIF(decay=0.5)`.
    in_channels: channels of the input.
    num_classes: outputs of the last layer, which is linear and has no neuron.
    size: height and width of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from spikefuse.models.mlp import SPLIT_LAYERS, event_mlp, mlp, split_widths
from spikefuse.models.plain import alexnet, cifar_large, cifar_medium, cifar_small, conv, vggsnn
from spikefuse.models.resnet import ms_resnet34, resnet18, resnet34, resnet50
from spikefuse.models.sew_resnet import sew_resnet18, sew_resnet34, sew_resnet50
from spikefuse.models.spikformer import spikformer

Builder = Callable[[Callable[[], nn.Module], int, int, tuple[int, int]], nn.Module]

MODELS: dict[str, Builder] = {
    "mlp": mlp,
    "conv": conv,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "sew_resnet18": sew_resnet18,
    "sew_resnet34": sew_resnet34,
    "sew_resnet50": sew_resnet50,
    "ms_resnet34": ms_resnet34,
    "cifar_small": cifar_small,
    "cifar_medium": cifar_medium,
    "cifar_large": cifar_large,
    "alexnet": alexnet,
    "vggsnn": vggsnn,
    "spikformer": spikformer,
    **{f"mlp{n}": partial(mlp, hidden=split_widths(n), norm=False) for n in SPLIT_LAYERS},
    "event-mlp": event_mlp,  # three hidden layers
    **{f"event-mlp{n}": partial(event_mlp, hidden=split_widths(n)) for n in SPLIT_LAYERS if n != 3},
}

__all__ = [
    "MODELS",
    "Builder",
    "alexnet",
    "cifar_large",
    "cifar_medium",
    "cifar_small",
    "conv",
    "event_mlp",
    "mlp",
    "ms_resnet34",
    "resnet18",
    "resnet34",
    "resnet50",
    "sew_resnet18",
    "sew_resnet34",
    "sew_resnet50",
    "spikformer",
    "split_widths",
    "vggsnn",
]
