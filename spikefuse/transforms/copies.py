"""Copies of networks that hold tensors with a graph, such as pruned ones."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.utils import prune

from spikefuse.nn.nesting import named_values

M = TypeVar("M", bound=nn.Module)


def copied(net: M, plain: bool = True) -> M:
    """Return a deep copy, also if hooks have computed weights with a gradient, or neurons of
    another library hold states with one.

    Args:
        plain: turn pruned weights into parameters, as `torch.nn.utils.prune.remove` does. Otherwise
            hooks compute them in the copy, too.
    """
    computed = {
        id(value): value.detach().clone()
        for module in net.modules()
        for _, value in named_values(vars(module))
        if isinstance(value, Tensor) and not value.is_leaf
    }
    result = copy.deepcopy(net, computed)
    for module in result.modules() if plain else ():
        for name, _ in [*module.named_parameters(recurse=False)]:
            if name.endswith("_orig") and prune.is_pruned(module):
                prune.remove(module, name.removesuffix("_orig"))
    return result
