"""Values in tuples, lists and dicts."""

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch

from spikefuse.nn.nesting import flatten, key_of, map_tensors, map_values, named_values, unflatten


class Pair(NamedTuple):
    a: Any
    b: Any


TREES = [
    1,
    None,
    (),
    [1, (2, [3])],
    {"x": 1, "y": {"z": (2,)}},
    Pair(1, [2]),
    OrderedDict(b=1, a=[2]),
    (torch.Size([2, 3]), 4),
    ((1,), {"k": Pair(None, {3: 4})}),
]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_round_trip(tree):
    values, structure = flatten(tree)
    restored = unflatten(values, structure)
    assert restored == tree
    assert type(restored) is type(tree)
    assert [x for _, x in named_values(tree)] == values


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_names_are_places(tree):
    for name, value in named_values(tree, "tree"):
        assert eval(name) == value


def test_a_dict_with_a_default():
    tree = defaultdict(list, a=1)
    doubled = map_values(lambda x: 2 * x, tree)
    assert doubled == {"a": 2}
    assert doubled["b"] == []
    assert tree == {"a": 1}


def test_tensors_only():
    x = torch.ones(2)
    found = map_tensors(lambda x: x + 1, {"x": x, "n": 3, "all": (x, "s", None)})
    assert found["x"].tolist() == [2, 2]
    assert found["all"][0].tolist() == [2, 2]
    assert (found["n"], *found["all"][1:]) == (3, "s", None)
    assert map_tensors(lambda x: x + 1, x).tolist() == [2, 2]
    largest = map_tensors(lambda x: x + 1, torch.eye(2).max(0))
    assert type(largest) is torch.return_types.max
    assert largest.values.tolist() == [2, 2]


def test_keys():
    keys = [key_of(flatten(tree)[1]) for tree in TREES if isinstance(tree, tuple | list | dict)]
    assert len(set(keys)) == len(keys)
    assert key_of({"a": 1}) == key_of({"a": 2}) != key_of({"b": 1})
    assert key_of([1]) != key_of((1,))
