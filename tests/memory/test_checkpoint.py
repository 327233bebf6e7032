"""Training with recomputed segments, against the default policy, which saves what they need."""

import copy
import gc

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.block.block import Block
from spikefuse.memory import Checkpoint, checkpoint, microbatch
from spikefuse.models import MODELS
from spikefuse.neurons import Neuron
from spikefuse.testing import make_input
from tests.grid import with_exact_layers
from tests.memory.measuring import Allocations, Peak, packings
from tests.memory.networks import Mixed, assert_same, fused, step, train

SHAPE = (4, 6, 3, 8, 8)  # T, B, C, H, W
CHUNKS = (1, 2, 8)


@pytest.fixture(autouse=True)
def without_tf32(monkeypatch):
    """Algorithms differ with the size of a microbatch; in TF32 their results would differ much."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def assert_trains_alike(
    net, x, chunks=CHUNKS, cast=None, prepare=lambda net: net, impl="auto", **options
):
    """As the default policy, bit for bit except for sums over microbatches."""
    default = prepare(fused(net, None, x.device, **options))
    expected = train(default, x, cast, impl=impl)
    names = ["output", "input", *dict(default.named_parameters()), *dict(default.named_buffers())]
    for num in chunks:
        found = train(prepare(fused(net, Checkpoint(num), x.device, **options)), x, cast, impl=impl)
        assert len(found) == len(expected) == len(names)
        for name, a, b in zip(names, found, expected, strict=True):
            where = f"{name} with {num} chunks"
            if num == 1 or name == "output":
                assert torch.equal(a, b), where
            elif cast is None and a.is_floating_point():
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
            else:
                torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2 * b.abs().max().item())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("constant", [False, True])
def test_equals_the_default(backends, layout, constant):
    x = make_input(SHAPE, device=backends.device, constant=constant)
    if not constant:
        x = x.flatten(0, 1).contiguous(memory_format=layout).unflatten(0, x.shape[:2])
    assert_trains_alike(Mixed, x, prepare=lambda net: net.to(memory_format=layout))


def test_states_are_computed_again(backends):
    """More steps than kernels walk without storing a state, and a parameter of the neuron."""

    def make():
        layers = [nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), sf.PLIF(0.5)]
        return nn.Sequential(*layers, nn.Conv2d(4, 2, 1, bias=False), nn.BatchNorm2d(2), sf.LIF())

    x = make_input((19, 2, 3, 6, 6), device=backends.device)
    for impl in backends.impls:
        assert_trains_alike(make, x, chunks=(1, 2), impl=impl)


def test_a_model(backends):
    x = make_input(SHAPE, device=backends.device)
    assert_trains_alike(lambda: MODELS["cifar_small"](sf.LIF, 3, 5, SHAPE[-2:]), x)


def test_autocast(backends):
    x = make_input(SHAPE, device=backends.device)
    assert_trains_alike(Mixed, x, (1, 4), torch.bfloat16)


def test_dropout_is_drawn_once(backends):
    assert_trains_alike(Mixed, make_input(SHAPE, device=backends.device), drop=0.5)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_norms_of_a_sum_that_share_a_parameter(device, name):
    def prepare(net):
        setattr(net.net.other, name, getattr(net.net.bn, name))
        return net

    x = make_input(SHAPE, device=device)
    assert_trains_alike(lambda: Wired(WIRED["two norms"]), x, chunks=(1, 2), prepare=prepare)


@pytest.mark.parametrize("half", ["norms", "layers"])
def test_modes_and_frozen_parts(backends, half):
    def prepare(net):
        for module in net.modules():
            if half == "norms" and isinstance(module, nn.BatchNorm2d):
                module.eval()
            elif half == "layers" and isinstance(module, nn.Conv2d):
                module.requires_grad_(False)
        return net

    x = make_input(SHAPE, device=backends.device)
    assert_trains_alike(Mixed, x, (1, 8), prepare=prepare)


def test_microbatches(backends):
    net = fused(Mixed, Checkpoint(8), backends.device)
    seen = []
    conv = net.net.stem[0]
    conv.forward = lambda x: seen.append(len(x) // SHAPE[0]) or type(conv).forward(conv, x)
    x = make_input(SHAPE, device=backends.device)
    batches = [1, 2, 1, 2]
    # One sample for the size; forward; two passes, of which the second finds the last one there.
    for first in ([1], []):
        train(net, x)
        assert seen == [*first, *batches, *batches, *batches[:-1]]
        seen.clear()


@pytest.mark.parametrize("name", ["join", "stem.2", "stem.1", "stem", "deep", "right", "pool"])
def test_hooks_run_as_in_the_default(backends, name):
    """On all kinds of modules; registered and removed between calls, or from the start."""
    x = make_input(SHAPE, device=backends.device).requires_grad_()

    def steps(policy):
        net, seen = fused(Mixed, policy, x.device), []

        def calls():
            train(net, x)
            return {kind: shapes for kind, *shapes in seen}

        module = net.net.get_submodule(name)
        yield calls()
        handles = [
            module.register_forward_pre_hook(lambda m, given: seen.append(("pre", given[0].shape))),
            module.register_forward_hook(lambda m, given, y: seen.append(("forward", y.shape))),
            module.register_full_backward_hook(
                lambda m, into, out: seen.append(("backward", out[0].shape))
            ),
            module.register_forward_hook(lambda m, given, y: 2 * y),
        ]
        yield calls()
        yield train(net, x)
        for handle in handles:
            handle.remove()
        seen.clear()
        yield calls()

    for found, expected in zip(steps(Checkpoint(1)), steps(None), strict=True):
        if isinstance(found, dict):
            assert found == expected
        else:
            assert_same(found, expected)


HOOKS = {
    "random numbers": lambda m, given, y: y + torch.rand_like(y),
    "mixed samples": lambda m, given, y: y - y.mean(0, keepdim=True),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_cannot_be_recomputed(backends, name):
    def prepare(net):
        net.net.right.register_forward_hook(HOOKS[name])
        torch.manual_seed(1)
        return net

    assert_trains_alike(Mixed, make_input(SHAPE, device=backends.device), (1, 4), prepare=prepare)


class Pooled(nn.Module):
    """Maxima that two segments read."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 1, bias=False), nn.BatchNorm2d(16), sf.LIF())
        self.pool, self.branch = nn.MaxPool2d(2), nn.Sequential(nn.Conv2d(16, 16, 1), sf.LIF())

    def forward(self, x):
        y = self.pool(self.stem(x))
        return y + self.branch(y)


def test_a_hook_that_changes_maxima(backends):
    """Maxima of spikes are saved as bits; the result of the hook must not be."""

    def prepare(net):
        net.net.pool.register_forward_hook(lambda m, given, y: 0.5 * y)
        return net

    assert_trains_alike(Pooled, make_input(SHAPE, device=backends.device), (1, 4), prepare=prepare)


def test_hooks_on_the_whole_network(device):
    net = fused(Mixed, Checkpoint(), device)
    seen = []
    net.net.register_forward_hook(lambda *given: seen.append(given[2].shape))
    with pytest.warns(UserWarning, match=r"recomputes nothing, because Mixed, .* has hooks"):
        train(net, make_input(SHAPE, device=device))
    assert seen == [(SHAPE[0] * SHAPE[1], 5)]


def test_microbatches_are_the_same_for_any_number_of_steps(backends, monkeypatch):
    """Processes that share a sequence have each its own."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.left, self.right = (nn.Conv2d(c, 16, 1) for c in (3, 16, 16))
            self.first, self.second = sf.LIF(), sf.LIF()

        def forward(self, x):
            x = self.stem(x)
            return self.first(self.left(x)) + self.second(self.right(x))

    def split(*given):
        found[-1].append(microbatch.split(*given))
        return found[-1][-1]

    found = []
    monkeypatch.setattr(checkpoint, "split", split)
    for steps, constant in ((1, False), (5, False), (5, True)):
        found.append([])
        x = make_input((steps, *SHAPE[1:]), device=backends.device, constant=constant)
        fused(Twice, Checkpoint(5), backends.device)(x)
    assert found[0] == found[1] == found[2]
    assert max(map(len, found[0])) > 1


def test_spikes_are_saved_as_bits(backends):
    """Those of neurons, and what pooling makes of them if several segments read it."""
    net = fused(Pooled, Checkpoint(1), backends.device)
    with packings() as seen:
        net(make_input(SHAPE, device=backends.device))
    rows = SHAPE[0] * SHAPE[1] * 16
    assert seen == [rows * 8 * 8, rows * 4 * 4, rows * 4 * 4]


def test_saved_values_are_released_with_the_output(backends):
    x = make_input(SHAPE, device=backends.device)
    net = fused(Mixed, Checkpoint(), backends.device)
    for _ in range(2):  # the first makes things that stay
        gc.collect()
        gc.disable()
        try:
            with Allocations([x, *net.parameters(), *net.buffers()]) as memory:
                net(x)
            held = memory.num_bytes()
        finally:
            gc.enable()
    assert held == 0


def stack():
    """Two large layers, the second of which sets the peak, and smaller ones."""
    layers = []
    for width, channels, stride in ((3, 32, 1), (32, 32, 1), (32, 32, 2), (32, 16, 2)):
        layers += [nn.Conv2d(width, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels)]
        layers.append(sf.LIF())
    return nn.Sequential(*layers)


def test_peak(backends):
    x = make_input((4, 16, 3, 16, 16), device=backends.device)
    largest, peaks, kept = 4 * 16 * 32 * 16 * 16 * 4, {}, {}
    for policy in (sf.memory.Recompute(), Checkpoint(1), Checkpoint(8)):
        net = fused(stack, policy, backends.device)
        train(net, x)
        with Peak([x, *net.parameters(), *net.buffers()]) as memory:
            y = net(x)
            kept[policy] = memory.num_bytes()
            y.sum().backward()
        peaks[policy] = memory.peak
    # One bit per spike, the output, and the statistics of norms.
    assert kept[Checkpoint(8)] < largest * (2 + 1 / 4) / 32 + y.nbytes + 2**14
    assert peaks[Checkpoint(8)] < 2.1 * largest
    assert peaks[Checkpoint(8)] < 0.5 * peaks[Checkpoint(1)]
    assert peaks[Checkpoint(8)] < 0.5 * peaks[sf.memory.Recompute()]


def test_without_gradients_nothing_changes(backends):
    x = make_input(SHAPE, device=backends.device)
    nets = [fused(Mixed, policy, backends.device).eval() for policy in (None, Checkpoint())]
    with torch.no_grad():
        expected, found = (net(x, return_state=True) for net in nets)
    assert torch.equal(found[0], expected[0])
    assert_same(
        [s for states in found[1].values() for s in states],
        [s for states in expected[1].values() for s in states],
    )
    with pytest.raises(ValueError, match="trains on whole sequences"):
        nets[1](x, return_state=True)
    with pytest.raises(ValueError, match="trains on whole sequences"):
        nets[1](x, state=expected[1])


def test_the_reference(backends):
    x = make_input(SHAPE, device=backends.device)
    nets = [fused(Mixed, policy, backends.device) for policy in (None, Checkpoint())]
    assert_same(*(train(net, x, impl="reference") for net in nets))


def test_backward_once(backends):
    net = fused(Mixed, Checkpoint(), backends.device)
    y = net(make_input(SHAPE, device=backends.device)).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward a second time"):
        y.backward()


def test_double_backward_is_refused(backends):
    net = fused(Mixed, Checkpoint(), backends.device)
    x = make_input(SHAPE, device=backends.device).requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward.* or memory=Checkpoint"):
        (gradient.square().sum() + x.square().sum()).backward()


def test_outputs(backends):
    """Any nesting, also the input, a value that others read, and one that nobody needs."""

    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block(nn.BatchNorm2d(3), sf.LIF())
            self.conv, self.weight = nn.Conv2d(3, 3, 1), nn.Parameter(torch.ones(3, 1, 1))
            with_exact_layers(self)

        def forward(self, x):
            s = self.block(x * (self.weight + 1))
            # The norm alone would leave the weight no gradient but what is rounded.
            return {"x": x, "s": s, "more": [self.conv(s) * self.weight, self.conv(s) * 2]}

    x = make_input(SHAPE, device=backends.device)
    found = []
    for policy in (None, Checkpoint(2)):
        net = fused(Several, policy, backends.device)
        leaf = x.clone().requires_grad_()
        y = net(leaf)
        loss = (y["x"] * y["s"]).sum() + y["more"][0].square().sum()
        found.append([y["s"], *y["more"], *torch.autograd.grad(loss, [leaf, *net.parameters()])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
    assert all(map(torch.equal, found[0][:3], found[1][:3]))


def test_several_outputs_are_refused(backends):
    class Twice(Neuron):
        v = sf.State()

        def step(self, x, v):
            h = v + x
            return (h, h * 2), (h * 0.5,)

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.neuron, self.conv = Twice(), nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return self.neuron(self.conv(x))[0]

    net = sf.Temporal(First(), Checkpoint()).to(backends.device)
    with pytest.raises(ValueError, match="a neuron with several outputs"):
        net(make_input(SHAPE, device=backends.device))


def test_an_empty_batch(backends):
    """As by the other policies."""
    net = sf.Temporal(nn.Sequential(nn.Linear(3, 4), sf.LIF(), nn.Linear(4, 2)), Checkpoint())
    net.to(backends.device)
    y = net(torch.zeros(4, 0, 3, device=backends.device))
    y.sum().backward()
    assert y.shape == (4, 0, 2)
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())


class Wired(nn.Module):
    """A block, wired by a function."""

    def __init__(self, forward):
        super().__init__()
        self.function, self.conv, self.bn = forward, nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.other, self.same = nn.BatchNorm2d(3), nn.Identity()
        nn.init.uniform_(self.bn.bias)  # so that the order of sums matters
        self.block, self.lif, self.two = Block(nn.BatchNorm2d(3), sf.LIF()), sf.LIF(), Two()

    def forward(self, x):
        return self.function(self, x)


class Two(sf.Neuron):
    v = sf.State()

    def step(self, x, y, v):
        h = 0.5 * v + x + 0.5 * y
        return torch.sigmoid(h), (h,)


def without_gradients(n, x):
    with torch.no_grad():
        y = n.conv(x)
    return n.lif(n.bn(y))


def two_norms_in_place(n, x):
    y = n.bn(n.conv(x))
    y += n.other(x)
    return n.lif(y)


WIRED = {
    "what the norm reads": lambda n, x: n.lif(n.bn(y := n.conv(x)) + y),
    "block": lambda n, x: n.block(y := n.conv(x), y),
    "keywords": lambda n, x: n.block(residual=x.sin(), x=n.conv(x)),
    "one keyword": lambda n, x: n.block(n.conv(x), residual=x.sin()),
    "no residual": lambda n, x: n.block(n.conv(x), residual=None),
    "two inputs": lambda n, x: n.two(y := n.conv(x), y),
    "two keywords": lambda n, x: n.two(n.conv(x), x),
    "norm of two inputs": lambda n, x: n.two(n.bn(n.conv(x)), x),
    "two norms": lambda n, x: n.lif(n.bn(n.conv(x)) + n.other(x)),
    "two norms in place": two_norms_in_place,
    "identities": lambda n, x: n.lif(n.same(n.same(n.bn(n.conv(x)))) + n.same(n.other(x))),
    "norm twice": lambda n, x: n.lif(n.bn(n.conv(n.bn(x)))),
    "a learned number": lambda n, x: n.lif(n.bn(n.conv(x) * n.conv.weight.mean())),
    "a learned tuple": lambda n, x: n.lif(n.bn(n.conv(x) * n.bn.weight.max(0)[0])),
    "a learned shape": lambda n, x: n.lif(n.bn(n.conv(x) * n.bn.weight.shape[0])),
    "complex values": lambda n, x: n.lif(n.bn(torch.fft.ifft2(torch.fft.fft2(n.conv(x))).real)),
}


@pytest.mark.parametrize("name", WIRED)
def test_what_is_wired(device, name):
    x = make_input(SHAPE, device=device)
    assert_trains_alike(lambda: Wired(WIRED[name]), x, chunks=(1, 2))


def random_branch(n, x):
    return n.lif(n.bn(n.conv(x))) if torch.rand(1) < 2 else x


def potential(n, x):
    spikes, v = n.lif(n.bn(n.conv(x)), outputs=("spikes", "v"))
    return spikes + v


def cast_part(n, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = n.conv(x)
    return n.lif(n.bn(y.float()))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (without_gradients, "its forward switches gradients or autocast on or off"),
        (cast_part, "its forward switches gradients or autocast on or off"),
        (random_branch, "its forward draws random numbers"),
        (lambda n, x: n.lif(n.bn(x), impl="reference"), "called with more than its inputs"),
        (potential, "called with more than its inputs"),
    ],
)
def test_what_can_not_be_recomputed_is_refused(device, forward, message):
    net = sf.fuse(sf.Temporal(Wired(forward), Checkpoint(2))).to(device)
    with pytest.raises(ValueError, match=message):
        net(make_input(SHAPE, device=device))


def test_fusion_reports_the_last_call(device):
    layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), sf.LIF(), nn.Conv2d(4, 4, 3)
    net = sf.fuse(sf.Temporal(nn.Sequential(*layers), memory=sf.memory.Checkpoint()))
    assert not net.fusion.called
    net.to(device)(torch.rand(3, 2, 2, 8, 8, device=device))
    assert net.fusion.called
    assert [place.neuron for place in net.fusion.fused] == ["net.2"]


@pytest.mark.parametrize("name", ["scale", "skip", "kind"])
def test_changed_attributes_of_a_network_are_followed(device, name):
    def forward(n, x):
        y = n.bn(n.conv(x)) * n.scale
        return n.lif(y if n.skip else y + (x if n.kind == "plain" else x.sin()))

    nets = [fused(lambda: Wired(forward), policy, device) for policy in (None, Checkpoint(1))]
    x, outputs = make_input(SHAPE, device=device), []
    for values in ((1.0, False, "plain"), (0.5, True, "sin")):
        for net in nets:
            vars(net.net).update(scale=1.0, skip=False, kind="plain")
            setattr(net.net, name, dict(zip(("scale", "skip", "kind"), values, strict=True))[name])
        found = [step(net, x) for net in nets]
        assert all(map(torch.equal, *found))
        outputs.append(found[0][0])
    assert not torch.equal(*outputs)


def replace_weight(n):
    n.conv.weight = nn.Parameter(2 * n.conv.weight.detach())


def drop_statistics(n):
    n.bn.running_mean = n.bn.running_var = None


@pytest.mark.parametrize("change", [replace_weight, drop_statistics])
def test_replaced_tensors_of_a_network_are_followed(device, change):
    """A norm without running statistics uses those of the whole batch, in evaluation too."""
    policies, x = (None, Checkpoint(1)), make_input(SHAPE, device=device)
    nets = [fused(lambda: Wired(WIRED["two norms"]), p, device).eval() for p in policies]
    for _ in range(2):
        default, recomputed = (step(net, x) for net in nets)
        assert all(map(torch.equal, default, recomputed))
        for net in nets:
            change(net.net)


def test_a_refused_network_does_not_switch_gradients_off(device):
    def forward(n, x):
        torch.set_grad_enabled(False)
        y = n.conv(x)
        torch.set_grad_enabled(True)
        return n.lif(n.bn(y))

    net = sf.fuse(sf.Temporal(Wired(forward), Checkpoint(2))).to(device)
    try:
        with pytest.raises(ValueError, match="switches gradients"):
            net(make_input(SHAPE, device=device))
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


class Added(nn.Module):
    def __init__(self, residual):
        super().__init__()
        self.norm, self.neuron, self.residual = nn.BatchNorm2d(4), sf.LIF(), residual
        # A bias would have a gradient of 0, but for rounding.
        self.conv = nn.Conv2d(3, 4, 3, bias=False)

    def forward(self, x):
        y = self.conv(x)
        return self.neuron(self.norm(y) + self.residual(y))


@pytest.mark.parametrize(
    "residual",
    [
        lambda y: y.mean((2, 3), keepdim=True),
        lambda y: y > 0,
        lambda y: (y > 0).int(),
        lambda y: y.bfloat16(),
    ],
    ids=["broadcast", "bool", "int", "bfloat16"],
)
def test_residuals_of_other_shapes_and_dtypes(device, residual):
    """The default policy does not fuse these norms."""
    x = make_input((4, 3, 3, 5, 5), device=device)
    expected, found = (
        train(fused(lambda: Added(residual), policy, device), x) for policy in (None, Checkpoint(2))
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Column(nn.Module):
    """A norm of one column, which the sum expands."""

    def __init__(self, channels):
        super().__init__()
        self.channels, self.norm = channels, nn.BatchNorm2d(channels)

    def forward(self, y):
        return self.norm(y[:, : self.channels, :, :1])


@pytest.mark.parametrize("channels", [1, 4])
def test_residuals_that_are_expanded_after_their_norm(device, channels):
    def net():
        added = Added(nn.BatchNorm2d(4))
        added.norm = Column(channels)
        return added

    x = make_input((4, 3, 3, 5, 5), device=device)
    expected, found = (train(fused(net, policy, device), x) for policy in (None, Checkpoint(2)))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_norm_that_its_residual_expands_is_refused(device):
    """The later norm is the one of the block."""
    net = Added(nn.Sequential(nn.AvgPool2d((1, 3)), nn.BatchNorm2d(4)))
    x = make_input((4, 3, 3, 5, 5), device=device)
    with pytest.raises(ValueError, match=r"can't run 'neuron', which reads a sum that expands"):
        fused(lambda: copy.deepcopy(net), Checkpoint(), device)(x)
    net.residual.append(Expanded(3))
    expected, found = (
        train(fused(lambda: copy.deepcopy(net), policy, device), x)
        for policy in (None, Checkpoint(1))
    )
    assert all(map(torch.equal, found, expected))


class Expanded(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width

    def forward(self, y):
        return y.expand(-1, -1, -1, self.width)


def test_a_residual_without_dimensions_is_refused(device):
    net = fused(lambda: Added(torch.mean), Checkpoint(), device)
    with pytest.raises(ValueError, match=r"can't run 'neuron', which reads a tensor without dim"):
        net(make_input((4, 3, 3, 5, 5), device=device))
