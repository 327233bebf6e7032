"""What is read off a captured graph: changes in place, memory, and dims behind views."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from spikefuse.graph.nodes import (
    changed_by,
    changes_something,
    dim_after,
    has_one_reader,
    is_mode,
    repeats_first_dim,
    replay,
    storage_of,
    value,
    views_above,
)
from tests.graph.graphs import captured_graph, returned


def without_gradients(x: Tensor, y: Tensor, n: Tensor) -> Tensor:
    with torch.no_grad():
        return x + y


def cast(x: Tensor, y: Tensor, n: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x + y


def assigned(x: Tensor, y: Tensor, n: Tensor) -> Tensor:
    z = x.clone()
    z[0] = y[0]
    return z


def augmented(x: Tensor, y: Tensor, n: Tensor) -> Tensor:
    z = x.clone()
    z *= y
    return z


@torch.library.custom_op("spikefuse_tests::fill", mutates_args=("x",))
def fill(x: Tensor) -> None:
    x.fill_(1)


fill.register_fake(lambda x: None)


def filled(x: Tensor, y: Tensor, n: Tensor) -> Tensor:
    z = x.clone()
    fill(z)
    return z


# Together with the tensor that changes: the clone, or the argument.
CHANGES = {
    "method": (lambda x, y, n: x.clone().add_(y), "clone"),
    "method of a view": (lambda x, y, n: x.clone()[1:].mul_(2), "clone"),
    "function": (lambda x, y, n: torch.relu_(x.clone()), "clone"),
    "layer": (lambda x, y, n: F.relu(x.clone(), inplace=True), "clone"),
    "layer by position": (lambda x, y, n: F.dropout(x.clone(), 0.0, False, True), "clone"),
    "result": (lambda x, y, n: torch.add(x, 1, out=y), "y"),
    "item": (assigned, "clone"),
    "operator": (augmented, "clone"),
    "method of an operator": (lambda x, y, n: x.clone().__imul__(y), "clone"),
    "own operator": (filled, "clone"),
    "integers": (lambda x, y, n: n.clone().add_(1), "clone"),
    "addition": (lambda x, y, n: x + y, None),
    "method of two underscores": (lambda x, y, n: x.__add__(y), None),
    "layer that copies": (lambda x, y, n: F.relu(x.clone()), None),
    "several results": (lambda x, y, n: x.sort().values, None),
    "batches": (lambda x, y, n: (n.add_(1), x + y)[1], None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_in_place(name: str) -> None:
    function, changed = CHANGES[name]
    gm = captured_graph(function, torch.rand(4, 3), torch.rand(4, 3), torch.tensor(0))
    nodes = list(gm.graph.nodes)
    assert any(map(changes_something, nodes)) == (changed is not None)
    found = {storage_of(x) for node in nodes for x in changed_by(node)}
    if name == "batches":  # which are changed, but by a norm
        (counter,) = (n for n in nodes if n.op == "placeholder" and value(n).dtype == torch.int64)
        assert found == {storage_of(counter)}
    elif changed is None:
        assert not found
    else:
        (expected,) = (n for n in nodes if n.target in (changed, f"L_{changed}_"))
        assert found == {storage_of(expected)}


@pytest.mark.parametrize("function", [without_gradients, cast])
def test_modes(function) -> None:
    gm = captured_graph(function, *torch.rand(2, 4, 3, requires_grad=True), torch.tensor(0))
    modes = [node for node in gm.graph.nodes if is_mode(node)]
    assert len(modes) == 2  # enter and leave
    assert all(map(changes_something, modes))
    assert not any(changed_by(node) for node in modes)


def test_layers_that_change_their_values() -> None:
    def function(x: Tensor, mean: Tensor, var: Tensor, table: Tensor) -> Tensor:
        y = F.instance_norm(x, mean, var) + F.instance_norm(x)
        index = torch.zeros(4, dtype=torch.int64)
        return y.sum() + F.embedding(index, table, max_norm=1.0) + F.embedding(index, table)

    tensors = torch.rand(2, 3, 4), torch.zeros(3), torch.ones(3), torch.rand(5, 3)
    nodes = list(captured_graph(function, *tensors).graph.nodes)
    first, _, second, _ = (n for n in nodes if n.target in (F.instance_norm, F.embedding))
    assert [n for n in nodes if changes_something(n)] == [first, second]
    assert storage_of(first.args[1]) in {storage_of(x) for x in changed_by(first)}
    assert storage_of(second.args[1]) in {storage_of(x) for x in changed_by(second)}


# Views of [12, 5, 2, 3] as T=4 and B=3, and where the second dim is then.
VIEWS = {
    "none": (lambda x: x, 1),
    "unfolded": (lambda x: x.unflatten(0, (4, 3)), 2),
    "reshaped": (lambda x: x.reshape(4, 3, 5, 2, 3), 2),
    "viewed": (lambda x: x.view(4, 3, -1, 6).contiguous(), 2),
    "tokens": (lambda x: x.flatten(2).transpose(1, 2), 2),
    "tokens by steps": (lambda x: x.flatten(2).mT.unflatten(0, (4, 3)), None),  # a view unknown
    "unfolded tokens": (lambda x: x.flatten(2).transpose(1, 2).reshape(4, 3, 6, 5), 3),
    "permuted": (lambda x: x.permute(1, 0, 2, 3), 0),
    "moved": (lambda x: x.movedim(1, -1), 3),
    "function": (lambda x: torch.unsqueeze(torch.flatten(x, 2), 0), 2),
    "squeezed": (lambda x: x.unsqueeze(1).squeeze(1), 1),
    "merged": (lambda x: x.flatten(1), None),
    "merged and split": (lambda x: x.flatten(1).unflatten(1, (5, 6)), 1),
    "split": (lambda x: x.reshape(4, 15, 2, 3), None),
    "copied": (lambda x: x.transpose(0, 1).reshape(60, 2, 3), None),
    "steps repeated": (lambda x: x.unsqueeze(0).expand(4, -1, -1, -1, -1), 2),
    "steps repeated by a copy": (lambda x: x.unsqueeze(0).repeat(4, 1, 1, 1, 1), 2),
    "batch repeated": (lambda x: x.unsqueeze(1).expand(-1, 4, -1, -1, -1), None),
    "all repeated": (lambda x: x.repeat(1, 2, 1, 1), None),
    "two dims": (lambda x: x.reshape(12, 30), None),
}


@pytest.mark.parametrize("name", VIEWS)
def test_where_a_dim_is_after_views(name: str) -> None:
    function, expected = VIEWS[name]
    gm = captured_graph(lambda x: function(torch.sin(x)).exp(), torch.rand(12, 5, 2, 3))
    top, views = views_above(returned(gm).args[0])
    if expected is None:
        assert top.target is not torch.sin or dim_after(views, value(top), 1) is None
    else:
        assert top.target is torch.sin
        assert dim_after(views, value(top), 1) == expected


def test_views_end_where_others_read() -> None:
    gm = captured_graph(
        lambda x: ((y := x.sin().unsqueeze(0)).flatten(1).exp(), y), torch.rand(2, 3)
    )
    top, views = views_above(returned(gm).args[0])
    assert [view.target for view in views] == ["flatten"]
    assert top.target == "unsqueeze"
    assert not has_one_reader(top)
    assert storage_of(top) == storage_of(top.args[0])
    assert storage_of(top) != storage_of(returned(gm))


def test_views_of_another_tensor() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = x.sin().unsqueeze(0).repeat(4, 1, 1, 1).view(4, 5, 6).contiguous().transpose(1, 2)
        return z.exp(), y.sin()

    x, y = torch.rand(2, 5, 2, 3)
    gm = captured_graph(function, x, y)
    (first, second), *_ = gm.graph.output_node().args
    _, views = views_above(first.args[0])
    with gm.graph.inserting_before(gm.graph.output_node()):
        replayed = replay(gm.graph, second, views)
    gm.graph.output_node().args = ((replayed,),)
    gm.graph.lint()
    gm.recompile()
    inputs = dict(zip((n.name for n in gm.graph.find_nodes(op="placeholder")), (x, y), strict=True))
    (actual,) = gm(*inputs.values())
    torch.testing.assert_close(actual.exp(), function(y, x)[0])
    assert actual.stride(0) == 0  # steps are not copied


def test_repetitions_of_the_first_dim() -> None:
    cases = {
        (4, 1, 1): True,
        (4, 2, 1): False,
        (4, 1, 1, 1): False,
        (1, 1, 1): True,
    }
    for repeats, expected in cases.items():
        gm = captured_graph(lambda x, r=repeats: x.repeat(*r), torch.rand(1, 2, 3))
        (node,) = gm.graph.find_nodes(op="call_method", target="repeat")
        assert repeats_first_dim(node) == expected
    gm = captured_graph(lambda x: x.repeat(4, 1, 1), torch.rand(2, 2, 3))
    (node,) = gm.graph.find_nodes(op="call_method", target="repeat")
    assert not repeats_first_dim(node)


def test_what_is_no_tensor_has_no_memory() -> None:
    gm = captured_graph(lambda x: x.sort().values, torch.rand(3))
    assert [storage_of(n) is None for n in gm.graph.nodes] == [False, True, False, True]
    assert storage_of(None) is None
    assert isinstance(gm.graph, fx.Graph)
