"""Copies of networks whose weights hooks compute, such as pruned ones."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.utils import prune

M = TypeVar("M", bound=nn.Module)


def copied(net: M, plain: bool = True) -> M:
    """Return a deep copy, also if hooks have computed weights with a gradient.

    Args:
        plain: turn pruned weights into parameters, as `torch.nn.utils.prune.remove` does. Otherwise
            hooks compute them in the copy, too.
    """
    computed = {
        id(value): value.detach().clone()
        for module in net.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    result = copy.deepcopy(net, computed)
    for module in result.modules() if plain else ():
        for name, _ in [*module.named_parameters(recurse=False)]:
            if name.endswith("_orig") and prune.is_pruned(module):
                prune.remove(module, name.removesuffix("_orig"))
    return result
