"""Input that does not change over time: the same results, from layers that compute one step."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.nn.encode import direct
from tests.graph.rows import LINEAR, NORMS, rows_seen

STEPS = 6


def convolutional(momentum: float | None = 0.1) -> sf.Temporal:
    torch.manual_seed(0)
    return sf.Temporal(
        nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.MaxPool2d(2)),
            nn.BatchNorm2d(4, momentum=momentum),
            sf.LIF(0.5, 0.3),
            nn.Flatten(),
            nn.Linear(64, 5),
            nn.BatchNorm1d(5),
            sf.PLIF(0.6, 0.2, channels=5),
            nn.Dropout(0.0),
        )
    )


def image(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def images(batch: int = 3, steps: int = STEPS) -> Tensor:
    return direct(image(batch, 1, 8, 8), steps)


class Wrapped(nn.Module):
    """Layers, and how they are put together."""

    def __init__(self, forward, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.function = nn.ModuleList(layers), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def linear(forward) -> sf.Temporal:
    """A network of a linear layer and two neurons."""
    torch.manual_seed(0)
    neurons = sf.LIF(0.5, 0.2), sf.LIF(0.5, 0.4)
    return sf.Temporal(Wrapped(forward, nn.Linear(6, 6), *neurons))


def results(net: nn.Module, x: Tensor, num_calls: int) -> dict[str, Tensor | None]:
    """Output, gradients and statistics of a network after some calls."""
    for _ in range(num_calls):
        y = net(x)
    (y * torch.arange(float(y.numel())).view(y.shape).cos()).sum().backward()
    gradients = {f"gradient of {n}": p.grad for n, p in net.named_parameters()}
    return {"output": y.detach(), **gradients, **dict(net.named_buffers())}


def compare(net: nn.Module, x: Tensor, num_calls: int = 1) -> nn.Module:
    """Check that the fused copy of a network computes the same of `x`, and return it."""
    net, fused = copy.deepcopy(net), sf.fuse(copy.deepcopy(net))
    actual, expected = results(fused, x, num_calls), results(net, x.contiguous(), num_calls)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-4, msg=name)
    return fused


@pytest.mark.parametrize("training", [True, False])
def test_results_are_those_of_all_steps(training: bool) -> None:
    net, x = convolutional().train(training), images()
    assert rows_seen(copy.deepcopy(net), x) == [3]
    assert rows_seen(copy.deepcopy(net), x.contiguous()) == [18]
    assert len(compare(net, x, num_calls=3).fusion.fused) == 2


def test_a_mean_of_all_batches() -> None:
    compare(convolutional(momentum=None), images(), num_calls=3)


def test_unfused_networks_compute_all_steps() -> None:
    net, seen = convolutional(), []
    net.net[0][0].register_forward_hook(lambda m, x, y: seen.append(len(y)))
    net(images())
    assert seen == [18]


def test_running_variance_of_few_values() -> None:
    """Two values per channel and step: the correction is a factor of 2 / 1 to 12 / 11."""
    for reader in (sf.LIF(), nn.ReLU()):
        torch.manual_seed(0)
        net = sf.Temporal(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), reader))
        x = 5 * torch.randn(2, 4)
        assert rows_seen(net, direct(x, STEPS), NORMS) == [2]
        net.net[1].reset_running_stats()
        sf.fuse(net)(direct(x, STEPS))
        y = net.net[0](x)
        expected = 0.9 + 0.1 * direct(y, STEPS).flatten(0, 1).var(0)
        torch.testing.assert_close(net.net[1].running_var, expected)
        assert (expected - 0.9 - 0.1 * y.var(0)).abs().max() > 0.01


def test_one_value_per_channel_is_normalized_by_all_steps() -> None:
    net = sf.Temporal(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), sf.LIF()))
    x = direct(torch.randn(1, 4), STEPS)
    assert rows_seen(net, x, NORMS) == [STEPS]
    compare(net, x)
    net.eval()
    assert rows_seen(net, x, LINEAR) == [1]
    compare(net, x)


def test_states_are_passed_in_and_returned() -> None:
    net, x = convolutional().eval(), images()
    fused = sf.fuse(net)
    with torch.no_grad():
        y, state = fused(x[:4], return_state=True)
        z = fused(x[4:], state=state)
        torch.testing.assert_close(torch.cat([y, z]), net(x))


def other_view(n: Wrapped, x: Tensor) -> Tensor:
    y = n.layers[0](x)
    z = torch.flatten(y, 1)
    z += 1
    return n.layers[1](y)


def other_view_later(n: Wrapped, x: Tensor) -> Tensor:
    y = n.layers[0](x)
    z = torch.flatten(y, 1)
    spikes = n.layers[1](torch.relu(z))
    y.add_(1)
    return spikes + n.layers[2](z)


# Together with the rows that their first linear layer computes of 3 samples and 6 steps.
NETWORKS = {
    "two neurons": (3, lambda n, x: n.layers[1](y := n.layers[0](x)) + n.layers[2](y)),
    "flatten": (3, lambda n, x: n.layers[1](n.layers[0](torch.flatten(x, 1)))),
    "residual before": (3, lambda n, x: n.layers[1](n.layers[0](x) + x)),
    "residual around": (3, lambda n, x: n.layers[1](F.relu(y := n.layers[0](x))) + y),
    "joined": (3, lambda n, x: torch.cat([n.layers[1](y := n.layers[0](x)), y], 1)),
    "nothing spikes": (3, lambda n, x: n.layers[0](x)),
    "mean over rows": (3, lambda n, x: n.layers[1](n.layers[0](x) * x.mean(0))),
    "keyword": (18, lambda n, x: n.layers[1](F.linear(input=x, weight=n.layers[0].weight))),
    "scaled": (3, lambda n, x: n.layers[1](2 * n.layers[0](x) * x[:1].detach() - 0.1)),
    "changed in place": (3, lambda n, x: n.layers[1](n.layers[0](x).mul_(2))),
    "changed under another name": (
        3,
        lambda n, x: n.layers[1]((y := n.layers[0](x), y.add_(1))[0]),
    ),
    "changed by a view": (3, lambda n, x: n.layers[1]((y := n.layers[0](x), y[1:].zero_())[0])),
    "changed as another view": (3, other_view),
    "changed after a reader": (3, other_view_later),
    "in-place layer": (3, lambda n, x: n.layers[1](F.relu(n.layers[0](x), inplace=True))),
    "random": (3, lambda n, x: n.layers[1](F.dropout(n.layers[0](x), 0.0))),
    "unknown": (18, lambda n, x: n.layers[1](n.layers[0](x.sort(0).values))),
    "makes a tensor": (18, lambda n, x: n.layers[1](n.layers[0](x + torch.ones(6)))),
    "without gradients": (3, lambda n, x: n.layers[1](n.layers[0](x).detach() * n.layers[0].bias)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_any_structure(name: str) -> None:
    rows, forward = NETWORKS[name]
    net, x = linear(forward), direct(image(3, 6), STEPS)
    assert rows_seen(net, x, LINEAR)[0] == rows
    compare(net, x)


@pytest.mark.parametrize("name", [n for n in NETWORKS if "change" in n or "residual" in n])
def test_a_single_sample(name: str) -> None:
    """A repeated step of one sample could be a view, which cannot be changed in place."""
    compare(linear(NETWORKS[name][1]), direct(image(1, 6), STEPS))


def test_random_layers_draw_at_each_step() -> None:
    torch.manual_seed(0)
    net = sf.fuse(sf.Temporal(nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), sf.LIF(0.0, 0.01))))
    x = direct(torch.rand(2, 6), STEPS)
    assert distinct_steps(net(x)) > 1
    assert distinct_steps(net.eval()(x)) == 1
    assert distinct_steps(net.train()(x)) > 1


def distinct_steps(y: Tensor) -> int:
    return len({tuple(step.flatten().tolist()) for step in y})


class Noisy(nn.Module):
    """A layer that adds noise while it is switched on, and a neuron without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.noise = nn.Conv2d(1, 4, 3, padding=1), 0.0
        self.lif = sf.LIF(0.0, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.noise:
            x = x + self.noise * torch.randn_like(x)
        return self.lif(x)


def test_noise_that_is_switched_on_later() -> None:
    torch.manual_seed(0)
    net, x = sf.fuse(sf.Temporal(Noisy())), images()
    assert distinct_steps(net(x)) == 1
    net.net.noise = 1.0
    assert distinct_steps(net(x)) == STEPS
    net.net.noise = 0.0
    assert distinct_steps(net(x)) == 1


def test_random_branches() -> None:
    """Each call draws its own branch, whichever the first call took."""
    taken: list[bool] = []

    def forward(n: Wrapped, x: Tensor) -> Tensor:
        x = n.layers[0](x)
        taken.append(random.random() < 0.5)
        return n.layers[1](x + torch.randn_like(x) if taken[-1] else x)

    torch.manual_seed(0)
    random.seed(0)
    net = sf.fuse(sf.Temporal(Wrapped(forward, nn.Linear(6, 50), sf.LIF(0.0, 0.2))))
    x = direct(torch.rand(3, 6), STEPS)
    found = [distinct_steps(net(x)) > 1 for _ in range(20)]
    assert found == taken
    assert 0 < sum(found) < 20


def test_modes_that_the_network_sets() -> None:
    """Layers inside a mode compute all steps."""

    def without_gradients(n: Wrapped, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = n.layers[0](x)
        return n.layers[1](y + n.layers[0](x))

    def cast(n: Wrapped, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = n.layers[0](x)
        return n.layers[1](y.float())

    for forward in (without_gradients, cast):
        compare(linear(forward), direct(image(3, 6), STEPS))


def test_modes_around_the_network() -> None:
    net, x = convolutional().eval(), images()
    fused, expected = sf.fuse(net), net(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert rows_seen(net, x) == [3]
            torch.testing.assert_close(fused(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert rows_seen(net, x) == [3]
        assert torch.equal(fused(x), net(x))


def test_hooks_get_all_rows() -> None:
    net, x, seen = sf.fuse(convolutional()), images(), []
    net.net[1].register_forward_hook(lambda m, x, y: seen.append(y.shape[0]))
    net(x).sum().backward()
    net.net[1].register_full_backward_hook(lambda m, x, y: seen.append(y[0].shape[0]))
    net(x).sum().backward()
    assert seen == [18, 18, 18]


def test_gradient_hooks_get_all_rows() -> None:
    seen: list[Tensor] = []

    def forward(n: Wrapped, x: Tensor) -> Tensor:
        y = n.layers[0](x)
        y.register_hook(seen.append)
        return n.layers[1](F.relu(y))

    compare(linear(forward), direct(image(3, 6), STEPS))
    assert [g.shape for g in seen] == [(18, 6)] * 2
    torch.testing.assert_close(*seen)


def test_gradients_with_respect_to_what_is_returned() -> None:
    def forward(n: Wrapped, x: Tensor) -> Tensor:
        n.last = n.layers[0](x)
        return n.layers[1](F.relu(n.last))

    net, x = linear(forward), direct(image(3, 6), STEPS)
    gradients = []
    for model in (net, sf.fuse(net)):
        spikes = model(x)
        gradients += torch.autograd.grad(spikes.sum(), model.net.last)
    assert gradients[0].any()
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("steps", [1, STEPS])
def test_what_is_returned_can_be_changed(steps: int) -> None:
    net = sf.fuse(linear(lambda n, x: (n.layers[1](F.relu(y := n.layers[0](x))), y)))
    _, y = net(direct(image(1, 6), steps))
    y.detach().add_(torch.arange(float(steps)).view(-1, 1, 1))
    assert distinct_steps(y) == steps


def test_gradients_of_each_step_of_the_input() -> None:
    net, x = convolutional().eval(), images().detach().requires_grad_()
    assert rows_seen(net, x) == [18]
    sf.fuse(net)(x)[0].sum().backward()
    assert x.grad[0].any()
    assert not x.grad[1:].any()


def test_another_number_of_steps_or_samples() -> None:
    """TorchDynamo captures other shapes with symbols in place of numbers."""
    net = convolutional()
    fused = sf.fuse(copy.deepcopy(net))
    for batch, steps in ((3, 6), (3, 4), (5, 4), (2, 7), (1, 7), (3, 1)):
        x = images(batch, steps)
        for model in (net, fused):
            model.train()
        torch.testing.assert_close(fused(x), net(x.contiguous()), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(fused(x.contiguous()), net(x), rtol=1e-4, atol=1e-4)
        for a, b in zip(fused.buffers(), net.buffers(), strict=True):
            torch.testing.assert_close(a, b)
    assert rows_seen(net, images(3, 1)) == [3]


class Published(nn.Module):
    """A network that repeats an image itself, and folds time into the batch."""

    def __init__(self, repeat) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.repeat, self.conv = repeat, nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.bn, self.lif = nn.BatchNorm2d(4), sf.LIF(0.5, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.repeat(x)
        T, B, _, H, W = x.shape
        x = self.bn(self.conv(x.flatten(0, 1))).reshape(T, B, -1, H, W).contiguous()
        return self.lif(x)


REPEATS = {
    "repeat": (3, lambda x: x.unsqueeze(0).repeat(STEPS, 1, 1, 1, 1)),
    "repeat by a tuple": (18, lambda x: x.unsqueeze(0).repeat((STEPS, 1, 1, 1, 1))),
    "expand": (3, lambda x: x[None].expand(STEPS, -1, -1, -1, -1)),
    "expand by a tuple": (3, lambda x: x[None].expand((STEPS, *x.shape))),
    "changed before": (3, lambda x: x.clone().mul_(2).unsqueeze(0).repeat(STEPS, 1, 1, 1, 1)),
    "changed": (18, lambda x: x.unsqueeze(0).repeat(STEPS, 1, 1, 1, 1).mul_(2)),
    "one step changed": (
        18,
        lambda x: ((y := x.unsqueeze(0).repeat(STEPS, 1, 1, 1, 1)), y[0].zero_())[0],
    ),
    "batch repeated": (18, lambda x: x[:1].expand(18, -1, -1, -1).unflatten(0, (STEPS, 3))),
}


@pytest.mark.parametrize("name", REPEATS)
def test_networks_that_repeat_an_image(name: str) -> None:
    rows, repeat = REPEATS[name]
    net, x = Published(repeat), image(3, 1, 8, 8).requires_grad_()
    assert rows_seen(net, x) == [rows]
    fused = compare(net, x)
    assert len(fused.fusion.fused) == 1
    gradients = [torch.autograd.grad(m(x).sum(), x)[0] for m in (net, fused)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_a_counter_is_no_constant() -> None:
    """Batch norms count batches by additions of an integer in place, which are known."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.lif = nn.Embedding(9, 4), sf.LIF(0.5, 0.3)
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            indices = torch.zeros(1, 3, 2, dtype=torch.int64).repeat(4, 1, 1)
            indices.add_(1)
            y = self.embedding(indices.flatten(0, 1)).mean(1)
            return self.lif(self.linear(y).unflatten(0, (4, 3)) + x)

    compare(Table(), torch.rand(4, 3, 4))


def test_checkpoint() -> None:
    """The part that is recomputed in backward has the first neuron."""
    forward = lambda n, x: n.layers[2](n.layers[1](n.layers[0](x)))  # noqa: E731
    inside = linear(lambda n, x: sf.checkpoint(lambda y: forward(n, y), x))
    segments = linear(forward)
    segments.memory = sf.memory.Checkpoint()
    for net in (inside, segments):
        compare(net, direct(image(3, 6), STEPS))


def test_no_random_numbers_are_drawn() -> None:
    net, x = sf.fuse(convolutional()), images()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    net(x)
    assert torch.equal(torch.rand(4), expected)


def test_saved_memory_does_not_grow_with_steps() -> None:
    """What autograd saves of the layers before the first neuron does not grow with T."""
    torch.manual_seed(0)
    net = sf.fuse(sf.Temporal(nn.Sequential(nn.Linear(6, 1000), nn.BatchNorm1d(1000), sf.LIF())))

    def saved(x: Tensor) -> int:
        sizes: dict[int, int] = {}

        def pack(y: Tensor) -> Tensor:
            sizes[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
            return y

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
            net(x)
        return sum(sizes.values())

    x = torch.rand(8, 6)
    few, many = (saved(direct(x, steps)) for steps in (32, 64))
    assert many - few <= 64 * 1000 * 4  # a state every few steps, at most
    assert saved(direct(x, 64).contiguous()) > 2 * many


def test_triton(backends) -> None:
    net, x = convolutional().eval().to(backends.device), images().to(backends.device)
    fused, expected = sf.fuse(net), net(x, impl="reference")
    assert expected.any()
    for impl in backends.impls:
        assert torch.equal(fused(x, impl=impl), expected)
