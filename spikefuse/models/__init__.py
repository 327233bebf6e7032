"""Network architectures, written for one time step and run by `spikefuse.Temporal`.

Every builder takes these arguments; further ones default to the published values:

    neuron: returns a new neuron module per call, such as `lambda: spikefuse.LIF(decay=0.5)`.
    in_channels: channels of the input.
    num_classes: outputs of the last layer, which is linear and does not spike.
    size: height and width of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from spikefuse.models.blocks import named
from spikefuse.models.maxformer import (
    maxformer_10_384,
    maxformer_10_512,
    maxformer_10_768,
)
from spikefuse.models.mlp import SPLIT_LAYERS, event_mlp, mlp, split_widths
from spikefuse.models.plain import (
    alexnet,
    cifar_large,
    cifar_medium,
    cifar_small,
    conv,
    vgg11,
    vgg16,
    vggsnn,
)
from spikefuse.models.qkformer import qkformer, qkformer_10_384, qkformer_10_512, qkformer_10_768
from spikefuse.models.recurrent import recurrent, recurrent_720, recurrent_1024
from spikefuse.models.resnet import (
    ms_resnet18,
    ms_resnet34,
    ms_resnet104,
    resnet18,
    resnet34,
    resnet50,
)
from spikefuse.models.sew_resnet import (
    sew_resnet18,
    sew_resnet34,
    sew_resnet50,
    sew_resnet101,
    sew_resnet152,
)
from spikefuse.models.spike_driven import (
    sdt,
    sdt_8_384,
    sdt_8_512,
    sdt_8_768,
    sdt_v2_15m,
    sdt_v2_31m,
    sdt_v2_55m,
    sdt_v3_5m,
    sdt_v3_10m,
    sdt_v3_19m,
)
from spikefuse.models.spikformer import (
    spikformer,
    spikformer_8_384,
    spikformer_8_512,
    spikformer_8_768,
)
from spikefuse.models.spikingresformer import (
    spikingresformer_l,
    spikingresformer_m,
    spikingresformer_s,
    spikingresformer_ti,
)

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
    "sew_resnet101": sew_resnet101,
    "sew_resnet152": sew_resnet152,
    "ms_resnet18": ms_resnet18,
    "ms_resnet18_cifar": partial(ms_resnet18, stem="cifar"),
    "ms_resnet34": ms_resnet34,
    "ms_resnet104": ms_resnet104,
    "cifar_small": cifar_small,
    "cifar_medium": cifar_medium,
    "cifar_large": cifar_large,
    "alexnet": alexnet,
    "vgg11": vgg11,
    "vgg16": vgg16,
    "vggsnn": vggsnn,
    "spikformer": spikformer,
    "spikformer_8_384": spikformer_8_384,
    "spikformer_8_512": spikformer_8_512,
    "spikformer_8_768": spikformer_8_768,
    "qkformer": qkformer,
    "qkformer_10_384": qkformer_10_384,
    "qkformer_10_512": qkformer_10_512,
    "qkformer_10_768": qkformer_10_768,
    "sdt": sdt,
    "sdt_8_384": sdt_8_384,
    "sdt_8_512": sdt_8_512,
    "sdt_8_768": sdt_8_768,
    "sdt_v2_15m": sdt_v2_15m,
    "sdt_v2_31m": sdt_v2_31m,
    "sdt_v2_55m": sdt_v2_55m,
    "sdt_v3_5m": sdt_v3_5m,
    "sdt_v3_10m": sdt_v3_10m,
    "sdt_v3_19m": sdt_v3_19m,
    "maxformer_10_384": maxformer_10_384,
    "maxformer_10_512": maxformer_10_512,
    "maxformer_10_768": maxformer_10_768,
    "spikingresformer_ti": spikingresformer_ti,
    "spikingresformer_s": spikingresformer_s,
    "spikingresformer_m": spikingresformer_m,
    "spikingresformer_l": spikingresformer_l,
    **{f"mlp{n}": partial(mlp, hidden=split_widths(n), norm=False) for n in SPLIT_LAYERS},
    "recurrent": recurrent,
    "recurrent_720": recurrent_720,
    "recurrent_1024": recurrent_1024,
    "event-mlp": event_mlp,  # three hidden layers
    **{f"event-mlp{n}": partial(event_mlp, hidden=split_widths(n)) for n in SPLIT_LAYERS if n != 3},
}

# Editors know partial functions, but `help` shows neither their names nor their parameters.
for _name, _build in MODELS.items():
    if isinstance(_build, partial):
        MODELS[_name] = globals()[_name] = named(_name, _build)

__all__ = [
    "MODELS",
    "Builder",
    "alexnet",
    "cifar_large",
    "cifar_medium",
    "cifar_small",
    "conv",
    "event_mlp",
    "maxformer_10_384",
    "maxformer_10_512",
    "maxformer_10_768",
    "mlp",
    "ms_resnet18",
    "ms_resnet34",
    "ms_resnet104",
    "qkformer",
    "qkformer_10_384",
    "qkformer_10_512",
    "qkformer_10_768",
    "recurrent",
    "recurrent_720",
    "recurrent_1024",
    "resnet18",
    "resnet34",
    "resnet50",
    "sdt",
    "sdt_8_384",
    "sdt_8_512",
    "sdt_8_768",
    "sdt_v2_15m",
    "sdt_v2_31m",
    "sdt_v2_55m",
    "sdt_v3_5m",
    "sdt_v3_10m",
    "sdt_v3_19m",
    "sew_resnet18",
    "sew_resnet34",
    "sew_resnet50",
    "sew_resnet101",
    "sew_resnet152",
    "spikformer",
    "spikformer_8_384",
    "spikformer_8_512",
    "spikformer_8_768",
    "spikingresformer_l",
    "spikingresformer_m",
    "spikingresformer_s",
    "spikingresformer_ti",
    "split_widths",
    "vgg11",
    "vgg16",
    "vggsnn",
]
