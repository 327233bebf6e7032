"""Loops of several neurons, against loops written by hand."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse import reference
from tests.grid import on_grid


class Populations(nn.Module):
    """Excitation and inhibition."""

    def __init__(self):
        super().__init__()
        self.e, self.i = sf.LIF(0.75), sf.ALIF(0.5)
        self.ee, self.ei, self.ie = (
            nn.Linear(a, b, bias=False) for a, b in ((6, 6), (6, 4), (4, 6))
        )
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(on_grid(p.shape))

    def forward(self, x, e, i):
        new = self.e(x + self.ee(e) - self.ie(i))
        return new, self.i(self.ei(new))


def by_hand(body, x):
    e, i = x.new_zeros(x.shape[1], 6), x.new_zeros(x.shape[1], 4)
    state, other, found = None, None, []
    for now in x:
        current = now + body.ee(e) - body.ie(i)
        (e,), state = reference.scan(body.e, (current[None],), state)
        (i,), other = reference.scan(body.i, (body.ei(e[0])[None],), other)
        e, i = e[0], i[0]
        found.append((e, i))
    return tuple(map(torch.stack, zip(*found, strict=True)))


def gradients(y, parameters):
    loss = sum((part * (1 + torch.arange(part.shape[-1], device=part.device))).sum() for part in y)
    return torch.autograd.grad(loss, parameters)


def test_two_populations(device):
    torch.manual_seed(0)
    body = Populations().to(device)
    loop, x = sf.Loop(body, (6,), (4,)), on_grid((7, 3, 6), device).requires_grad_()
    parameters = [x, *body.parameters()]
    y, expected = loop(x), by_hand(body, x)
    assert all(map(torch.equal, y, expected))
    assert all(part.any() for part in y)
    torch.testing.assert_close(gradients(y, parameters), gradients(expected, parameters))


def test_states():
    loop, x = sf.Loop(Populations(), (6,), (4,)), on_grid((7, 3, 6))
    y, _ = loop(x, return_state=True)
    first, state = loop(x[:3], return_state=True)
    second = loop(x[3:], state)
    for whole, *parts in zip(y, first, second, strict=True):
        assert torch.equal(torch.cat(parts), whole)


class Excitation(nn.Module):
    """The first output of a loop, as a layer of a network."""

    def __init__(self):
        super().__init__()
        self.loop = sf.Loop(Populations(), (6,), (4,))

    def forward(self, x):
        return self.loop(x)[0]


def test_inside_a_network():
    torch.manual_seed(0)
    net = sf.Temporal(nn.Sequential(nn.Linear(5, 6), Excitation(), nn.Linear(6, 2), sf.LIF()))
    x = torch.rand(7, 3, 5)
    first, excitation, readout, last = net.net
    expected = last(readout(excitation.loop(first(x))[0]))
    for other in (net, sf.fuse(net)):
        torch.testing.assert_close(other(x), expected)
    net(x).sum().backward()


def test_in_parts_inside_a_network():
    """States by the layers' names, among them those of a loop in the body of another."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.lif = Excitation(), sf.LIF(0.5)

        def forward(self, x, last):
            return self.lif(self.inner(x + last))

    torch.manual_seed(0)
    loop = sf.Loop(Outer(), (6,))
    net, x = sf.Temporal(nn.Sequential(sf.LIF(0.5), loop, sf.LIF(0.75))), on_grid((7, 3, 6))
    expected = net(2 * x)
    assert expected.any()
    first, state = net(2 * x[:3], return_state=True)
    second, last = net(2 * x[3:], state=state, return_state=True)
    assert torch.equal(torch.cat([first, second]), expected)
    inside = ("inner.loop", "inner.loop.body.e", "inner.loop.body.i", "lif")
    names = ["net.0", "net.1", *(f"net.1.body.{name}" for name in inside), "net.2"]
    assert last.keys() == set(names)
    assert [len(last[name]) for name in names] == [1, 1, 2, 1, 2, 1, 1]
    stream = sf.Stream(net)
    assert torch.equal(torch.stack([stream(2 * step) for step in x]), expected)


def test_one_output():
    class Inhibited(nn.Module):
        """The strongest input wins, unless it won before."""

        def __init__(self):
            super().__init__()
            self.lif = sf.LIF(0.5)

        def forward(self, x, last):
            drive = x - 2 * last
            return self.lif(torch.where(drive == drive.amax(-1, keepdim=True), 2.0, 0.0))

    x = torch.tensor([3.0, 2.0]).expand(4, 1, 2)
    spikes = sf.Loop(Inhibited(), (2,))(x)
    assert spikes[:, 0].tolist() == [[1, 0], [0, 1], [1, 0], [0, 1]]


class Cell(nn.Module):
    """A cell of torch.nn, whose state the loop passes on, and a neuron."""

    def __init__(self):
        super().__init__()
        self.cell, self.neuron = nn.GRUCell(3, 4), sf.LIF(0.75, 0.25)

    def forward(self, x, hidden, last):
        hidden = self.cell(x, hidden)
        return hidden, self.neuron(4.0 * hidden + last)


def test_a_cell_of_pytorch():
    torch.manual_seed(0)
    body, x = Cell(), torch.randn(5, 2, 3)
    net = sf.Temporal(nn.Sequential(sf.Loop(body, (4,), (4,))))
    hidden, last, v = torch.zeros(2, 4), torch.zeros(2, 4), None
    for t, (found, spikes) in enumerate(zip(*sf.Loop(body, (4,), (4,))(x), strict=True)):
        hidden = body.cell(x[t], hidden)
        (last,), v = reference.scan(body.neuron, ((4.0 * hidden + last)[None],), v)
        last = last[0]
        torch.testing.assert_close(found, hidden)
        assert torch.equal(spikes, last)
    assert last.any()
    assert torch.equal(net(x)[1][-1], last)
    with pytest.raises(TypeError, match=r"GRUCell.* a cell in a Loop"):
        sf.Temporal(nn.Sequential(nn.GRUCell(3, 4)))(x)


def test_settings_of_the_network():
    """The reference can be differentiated twice."""
    net, x = sf.Temporal(Excitation()), on_grid((3, 2, 6)).requires_grad_()
    (grad,) = torch.autograd.grad(net(x, impl="reference").square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert x.grad is not None


def test_wrong_arguments():
    for shape in (6, "6", (6.0,), (-6,), ((6,),), None):
        wrong = f"a shape is {shape!r}: expected a tuple of the sizes of an output without B, such"
        with pytest.raises(TypeError, match=re.escape(wrong)):
            sf.Loop(Populations(), shape, (4,))
    with pytest.raises(ValueError, match="shapes is empty"):
        sf.Loop(Populations())
    with pytest.raises(TypeError, match="body"):
        sf.Loop(3, (2,))
    match = r"body of Loop returned shapes \[\[3, 6\], \[3, 4\]\]: expected \[\[3, 6\], \[3, 5\]\]"
    body = Populations()
    body.ie = nn.Linear(5, 6)
    with pytest.raises(ValueError, match=match):
        sf.Loop(body, (6,), (5,))(torch.rand(2, 3, 6))
    loop = sf.Loop(Populations(), (7,), (4,))
    with pytest.raises(RuntimeError) as caught:
        loop(torch.rand(2, 3, 6))
    assert "x [3, 6] and its last outputs [[3, 7], [3, 4]], of the s" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="state is a Tensor: expected one of an earlier call"):
        loop(torch.rand(2, 3, 6), torch.rand(3, 6))
    body, x = Populations(), torch.rand(2, 3, 6)
    state = sf.Loop(body, (6,), (4,))(x[:, :2], return_state=True)[1]
    match = r"the last outputs in state have shapes \[\[2, 6\], \[2, 4\]\]: expected \[\[3, 6\]"
    with pytest.raises(ValueError, match=match):
        sf.Loop(body, (6,), (4,))(x, state)


@pytest.mark.parametrize("found", [None, {"y": torch.zeros(3, 2)}, [torch.zeros(3, 2), 1.0]])
def test_outputs_that_are_no_tensors(found):
    class Body(nn.Module):
        def forward(self, x, last):
            return found

    match = r"body of Loop returned a \w+: expected tensors of shapes \[\[3, 2\]\]"
    with pytest.raises(TypeError, match=match):
        sf.Loop(Body(), (2,))(torch.rand(2, 3, 2))


def test_a_temporal_in_the_body_would_read_the_batch_as_time():
    body = nn.Sequential(nn.Linear(4, 4), sf.Temporal(sf.LIF()))
    with pytest.raises(ValueError, match=r"body contains a Temporal"):
        sf.Loop(body, (4,))
