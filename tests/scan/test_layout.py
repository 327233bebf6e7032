"""Which memory orders are read in place, and that every one gives the same result."""

from __future__ import annotations

import gc

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.scan import layout as layouts
from spikefuse.scan import op
from spikefuse.scan.execution import execution_for, execution_of
from spikefuse.scan.layout import MAX_STRIDES, MIN_INNER, MIN_ROW, Layout
from spikefuse.scan.records import Wanted
from spikefuse.testing import lay_out, make_input


def layout_of(tensors: list[Tensor]) -> Layout:
    return layouts.layout_of([(x.shape, x.stride()) for x in tensors])


def copied(x: Tensor, layout: Layout | None = None) -> bool:
    layout = layout_of([x]) if layout is None else layout
    return layout.conform(x) is not x


def test_contiguous():
    x = make_input((4, 2, 3, 5, 7))
    layout = layout_of([x])
    assert (layout.order, layout.inner, layout.num_neurons) == ((0, 1, 2, 3), 210, 210)
    assert (layout.channels, layout.channel_inner) == (3, 35)
    assert layout.strides(x) == (210, 210)
    assert not copied(x)


def test_channels_last():
    x = lay_out(make_input((4, 2, 3, 5, 7)), "channels_last")
    layout = layout_of([x])
    assert (layout.order, layout.channels, layout.channel_inner) == ((0, 2, 3, 1), 3, 1)
    assert not copied(x)
    y = layout.empty(x, torch.float32)
    assert y.stride() == x.stride()
    assert y.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)


def test_batch_first_is_read_in_groups():
    x = lay_out(make_input((4, 2, 3, 5, 7)), "batch_first")
    layout = layout_of([x])
    assert layout.inner == 3 * 5 * 7
    assert layout.strides(x) == (105, 4 * 105)
    assert not copied(x)
    # Outputs have time outermost, so that flattening time into the batch is free.
    assert layout.empty(x, torch.float32).is_contiguous()


def test_a_sequence_in_time_and_batch():
    x = make_input((2, 4, 3, 8)).transpose(0, 1)[1:3]
    assert not copied(x)
    assert layout_of([x]).strides(x)[0] == 3 * 8


def test_constant_in_time():
    x = make_input((6, 2, 3, 5), constant=True)
    layout = layout_of([x])
    assert x.stride(0) == 0
    assert layout.strides(x)[0] == 0
    assert not copied(x)


def test_a_constant_sequence_is_copied_as_one_step():
    layout = layout_of([make_input((6, 2, 3, 5))])
    x = make_input((1, 2, 5, 3)).transpose(2, 3).expand(6, 2, 3, 5)
    y = layout.conform(x)
    assert y.stride(0) == 0
    assert torch.equal(x, y)


def test_sizes_of_one_have_any_stride():
    x = make_input((4, 1, 3, 1, 7)).as_strided((4, 1, 3, 1, 7), (21, 999, 7, 5, 1))
    layout = layout_of([x])
    assert layout.inner == 21
    assert not copied(x)
    assert layout_of([make_input((1, 2, 24))]).strides(make_input((1, 2, 24)))[0] == 0


@pytest.mark.parametrize(
    "x",
    [
        make_input((3, 4, 40))[:, :, ::2],
        make_input((3, 4, 2)).expand(3, 4, 2).unsqueeze(3).expand(3, 4, 2, 16),
        make_input((3, 4, 6, 6))[:, :, 1:5, 1:5],
        make_input((3, 4, 4, MIN_INNER // 2))[:, :, 0],
    ],
    ids=["every other", "expanded", "window", "short groups"],
)
def test_inputs_that_are_not_dense_are_copied(x):
    layout = layout_of([x])
    assert layout.order == tuple(range(x.ndim - 1))
    assert layout.inner == layout.num_neurons
    y = layout.conform(x)
    assert y.is_contiguous()
    assert torch.equal(x, y)


def test_slices_that_leave_long_groups_are_not_copied():
    x = make_input((3, 4, 2, MIN_INNER))[:, :, 0]
    layout = layout_of([x])
    assert (layout.inner, layout.strides(x)) == (MIN_INNER, (8 * MIN_INNER, 2 * MIN_INNER))
    assert not copied(x)


def test_inputs_in_two_orders_share_the_first_ones():
    x = make_input((3, 2, 3, 8, 8))
    y = lay_out(make_input(x.shape, seed=1), "channels_last")
    layout = layout_of([x, y])
    assert layout.order == (0, 1, 2, 3)
    assert layout.conform(x) is x
    assert layout.conform(y).is_contiguous()
    assert torch.equal(layout.conform(y), y)


def test_inputs_of_different_groups_share_the_smaller():
    x, y = make_input((3, 2, 4, 16)), lay_out(make_input((3, 2, 4, 16), seed=1), "batch_first")
    layout = layout_of([x, y])
    assert layout.inner == 64
    assert layout.conform(x) is x
    assert layout.conform(y) is y


class Modulated(sf.Neuron):
    """A LIF neuron whose input is multiplied by a second one."""

    v = sf.State()

    def __init__(self) -> None:
        super().__init__()
        self.surrogate = sf.surrogate.Sigmoid(4.0)

    def step(self, x, factor, v):
        h = 0.5 * v + x * factor
        s = self.surrogate(h - 1.0)
        return s, (h * (1.0 - s),)


@pytest.mark.parametrize("order", ["contiguous", "channels_last"])
def test_a_value_per_step_is_copied_as_one_row(backends, order):
    values = torch.tensor([0.5, 1.0, 2.0, 1.5]).view(4, 1, 1, 1, 1).to(backends.device)
    x = lay_out(make_input((4, 3, 5, 16, 16)), order).to(backends.device)
    factor = values.expand_as(x)
    layout = layout_of([x, factor])
    assert layout.inner == 5 * 16 * 16 >= MIN_ROW
    assert not copied(x, layout)
    row = layout.conform(factor)
    assert torch.equal(row, factor)
    assert row.untyped_storage().nbytes() == 4 * 4 * layout.inner
    given = [t.clone().requires_grad_() for t in (x, values)]
    found = {}
    for impl in (*backends.impls, "reference"):
        y = Modulated()(given[0], given[1].expand_as(x), impl=impl)
        found[impl] = y, *torch.autograd.grad(y, given, torch.ones_like(y))
    y, *grads = found.pop("reference")
    assert 0.1 < y.mean() < 0.9
    for spikes, *others in found.values():
        assert torch.equal(spikes, y)
        torch.testing.assert_close(others, grads)


def test_states_are_float32_in_the_order_of_the_step():
    layout = layout_of([lay_out(make_input((4, 2, 3, 5, 7)), "channels_last")])
    state = layout.empty_step(torch.device("cpu"))
    assert layout.conform_step(state) is state
    other = make_input((2, 3, 5, 7), torch.bfloat16)
    conformed = layout.conform_step(other)
    assert (conformed.dtype, conformed.stride()) == (torch.float32, state.stride())
    assert torch.equal(conformed, other.float())


def test_gradients_of_parameters_are_sums():
    for name in ("contiguous", "channels_last"):
        layout = layout_of([lay_out(make_input((1, 2, 3, 4, 5)), name)])
        per_neuron = layout.empty_step(torch.device("cpu")).copy_(make_input((2, 3, 4, 5)))
        flat = per_neuron.as_strided((120,), (1,))
        assert torch.allclose(layout.reduce_to(flat, torch.zeros(())), per_neuron.sum())
        channels = layout.reduce_to(flat, torch.zeros(3))
        assert torch.allclose(channels, per_neuron.sum((0, 2, 3)))


def test_sizes_of_zero():
    for shape in ((2, 0, 3), (2, 3, 0, 4), (2, 0)):
        layout = layout_of([torch.empty(shape)])
        assert layout.num_neurons == 0
        assert layout.empty(torch.empty(0), torch.float32).shape == shape


PLAIN, CHANNELS = sf.LIF(threshold=0.3), sf.PLIF(channels=3, threshold=0.3)
with torch.no_grad():
    CHANNELS.decay.logit.copy_(torch.tensor([-1.0, 0.0, 2.0]))


@st.composite
def views(draw: st.DrawFn, num_dims: int, channels: bool) -> tuple[Tensor, Tensor]:
    """Two tensors of one shape, each a permuted, padded, strided, expanded piece of memory."""
    shape = [draw(st.integers(1, 6)) for _ in range(num_dims)]
    if channels:
        shape[2] = 3
    made = []
    for seed in range(2):
        order = draw(st.permutations(range(num_dims)))
        padding = [draw(st.sampled_from((0, 0, 1, 2))) for _ in shape]
        step = [draw(st.sampled_from((1, 1, 1, 2))) for _ in shape]
        expanded = [draw(st.sampled_from((False, False, False, True))) for _ in shape]
        sizes = [1 if e else n * s for n, s, e in zip(shape, step, expanded, strict=True)]
        memory = make_input([1, *(sizes[d] + padding[d] for d in order)], seed=seed)[0]
        x = memory.permute([order.index(d) for d in range(num_dims)])
        pieces = zip(sizes, padding, step, strict=True)
        x = x[tuple(slice(p // 2, p // 2 + n, s) for n, p, s in pieces)]
        made.append(x.expand(shape))
    return made[0], made[1]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data(), st.integers(2, 5), st.booleans())
def test_any_view_of_input_and_gradient(data, num_dims, channels):
    channels = channels and num_dims > 2
    neuron = CHANNELS if channels else PLAIN
    x, gradient = data.draw(views(num_dims, channels))
    here, plain = x.detach().requires_grad_(), x.detach().clone().requires_grad_()
    y, expected = neuron(here), neuron(plain, impl="reference")
    assert torch.equal(y, expected)
    actual = torch.autograd.grad(y, [here, *neuron.parameters()], gradient)
    wanted = torch.autograd.grad(expected, [plain, *neuron.parameters()], gradient)
    for a, e in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, e, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_batch_norm_behind_a_single_channels_last_sample(is_fused, impl):
    """Torch's batch norm computes a wrong gradient on a CPU from strides (8, 1, 48, 8)."""
    layers = nn.BatchNorm2d(8), sf.LIF(), nn.BatchNorm2d(8), sf.LIF(), nn.BatchNorm2d(8)
    net = sf.Temporal(nn.Sequential(*layers))
    nets = [net]
    if is_fused:
        nets = [sf.fuse(net), sf.fuse(sf.Temporal(net.net, memory=sf.memory.Checkpoint()))]
    image, weights = (make_input((1, 8, 6, 6), seed=i) for i in range(2))

    def gradient(net, memory_format):
        x = image.contiguous(memory_format=memory_format).unsqueeze(0).requires_grad_()
        y = net(x, impl=impl)
        torch.nn.functional.batch_norm(y[0], None, None, training=True).backward(weights)
        return y.detach(), x.grad

    for net in nets:
        actual, expected = (
            gradient(net, f) for f in (torch.channels_last, torch.contiguous_format)
        )
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


def test_caches_by_strides_are_bounded():
    x = make_input((4, 2, 32)).requires_grad_()
    neuron = sf.LIF()
    (expected,) = torch.autograd.grad(neuron(x).sum(), x)
    execution = execution_of(op.choose(neuron, x, Wanted(impl="numba"))[0], [x])
    for padding in range(3 * MAX_STRIDES):
        weights = torch.ones(4, 2, 32 + padding)[..., :32]
        (gradient,) = torch.autograd.grad(neuron(x), x, weights)
        assert torch.equal(gradient, expected)
    assert 1 < len(execution._launches) <= MAX_STRIDES
    assert 1 < len(execution.layout.outer_strides) <= MAX_STRIDES


def test_caches_by_shape_are_bounded():
    neuron, size = sf.LIF(), execution_for.cache_info().maxsize
    for num in range(1, 700):
        neuron(torch.ones(1, 1, num))
    assert execution_for.cache_info().currsize <= size == 512


def test_host_objects_do_not_grow_with_the_number_of_shapes():
    fused = sf.fuse(sf.Temporal(nn.Sequential(nn.BatchNorm2d(2), sf.LIF(), sf.nn.MaxPool2d(2))))
    plain, num = sf.LIF(), 300  # two entries each: more than the caches hold

    def call(size):
        x = torch.ones(1, 1, 2, 2, size, requires_grad=True)
        (fused(x).sum() + plain(x).sum()).backward()

    def objects_after(first):
        for size in range(first, first + num):
            call(size)
        gc.collect()
        return len(gc.get_objects())

    objects_after(10)  # drops what earlier tests left in the caches
    before = objects_after(10 + num)
    # A shape has about 35. Other objects of earlier tests may be dropped in between.
    assert objects_after(10 + 2 * num) - before < 2 * num
