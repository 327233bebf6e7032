"""Input that does not change over time: the same results, from layers that run once."""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spikefuse as sf
from spikefuse.models import MODELS
from spikefuse.nn.encode import direct
from tests.nn.rows import rows_seen

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


def images(batch: int = 3, channels: int = 1) -> Tensor:
    return direct(torch.rand(batch, channels, 8, 8, generator=torch.Generator().manual_seed(1)), 6)


def results(net: sf.Temporal, x: Tensor, num_calls: int = 1) -> dict[str, Tensor]:
    """Output, gradients and statistics of a network after some training calls."""
    net = copy.deepcopy(net)
    for _ in range(num_calls):
        y = net(x)
    (y * torch.arange(float(y.numel())).view(y.shape).cos()).sum().backward()
    gradients = {f"gradient of {n}": p.grad for n, p in net.named_parameters()}
    return {"output": y.detach(), **gradients, **dict(net.named_buffers())}


def assert_same(net: sf.Temporal, x: Tensor, num_calls: int = 1) -> None:
    actual, expected = results(net, x, num_calls), results(net, x.contiguous(), num_calls)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=2e-5, atol=2e-5, msg=name)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_results_are_those_of_all_steps(training: bool, momentum: float | None) -> None:
    net, x = convolutional(momentum).train(training), images()
    assert rows_seen(copy.deepcopy(net), x) == [3]
    assert rows_seen(copy.deepcopy(net), x.contiguous()) == [18]
    assert_same(net, x, num_calls=3)


def test_running_variance_of_few_values() -> None:
    """Two values per channel and step: the correction is a factor of 2 / 1 to 12 / 11."""
    torch.manual_seed(0)
    net, x = sf.Temporal(nn.Sequential(nn.BatchNorm1d(4), sf.LIF())), torch.randn(2, 4)
    net(direct(x, STEPS))
    expected = 0.9 + 0.1 * direct(x, STEPS).flatten(0, 1).var(0)
    torch.testing.assert_close(net.net[0].running_var, expected)
    assert (expected - 0.9 - 0.1 * x.var(0)).abs().max() > 0.01


def test_one_value_per_channel_is_not_shared() -> None:
    net, x = sf.Temporal(nn.Sequential(nn.BatchNorm1d(4), sf.LIF())), torch.randn(1, 4)
    assert rows_seen(net, direct(x, STEPS), nn.BatchNorm1d) == [STEPS]
    assert rows_seen(net.eval(), direct(x, STEPS), nn.BatchNorm1d) == [1]


@pytest.mark.parametrize(
    "name",
    [
        *("alexnet", "cifar_small", "conv", "mlp", "mlp2", "ms_resnet18", "qkformer", "resnet18"),
        *("sdt", "sew_resnet18", "spikformer", "vggsnn"),
    ],
)
def test_every_family_computes_its_first_layer_once(name: str) -> None:
    torch.manual_seed(0)
    net = sf.Temporal(MODELS[name](sf.LIF, 2, 5, (8, 8)))
    kind = nn.Linear if name.startswith("mlp") else nn.Conv2d
    with torch.no_grad():
        rows = rows_seen(net, images(2, 2), kind)
    assert rows[0] == 2
    assert set(rows[1:]) == {2 * STEPS}


def test_states_are_passed_in_and_returned() -> None:
    net, x = convolutional().eval(), images()
    with torch.no_grad():
        y, state = net(x[:4], return_state=True)
        z = net(x[4:], state=state)
        torch.testing.assert_close(torch.cat([y, z]), net(x.contiguous()))


def test_the_first_neuron_reads_one_step() -> None:
    net, x = convolutional(), images()
    found = sf.explain(net, x)
    seen = found.layers[0]
    assert seen.shape == (STEPS, 3, 4, 4, 4)
    kept = {row.name: row.now for row in found.saved}
    assert kept[seen.name] == 3 * 4 * 4 * 4 * 4  # bytes of one step


class Wrapped(nn.Module):
    """Layers, and how they are put together."""

    def __init__(self, forward, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.function = nn.ModuleList(layers), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Doubled(torch.autograd.Function):
    """A function that autograd calls without asking the tensor's class."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        assert x.shape == grad.shape
        return 2 * grad


def linears(num: int = 1) -> list[nn.Module]:
    torch.manual_seed(0)
    return [*(nn.Linear(6, 6) for _ in range(num)), sf.LIF(0.5, 0.2), sf.LIF(0.5, 0.4)]


# Together with the rows that their first linear layer computes of 3 samples and 6 steps.
NETWORKS = {
    "own class": (3, lambda n, x: n.layers[1](F.relu(n.layers[0](x)))),
    "two neurons": (3, lambda n, x: n.layers[1](y := n.layers[0](x)) + n.layers[2](y)),
    "flatten": (3, lambda n, x: n.layers[1](n.layers[0](torch.flatten(x, 1)))),
    "residual before": (3, lambda n, x: n.layers[1](n.layers[0](x) + x)),
    "residual around": (3, lambda n, x: n.layers[1](y := n.layers[0](x)) + y),
    "joined": (3, lambda n, x: torch.cat([n.layers[1](y := n.layers[0](x)), y], 1)),
    "nothing spikes": (3, lambda n, x: n.layers[0](x)),
    "added": (3, lambda n, x: (y := n.layers[0](x), n.layers[1](y))[1] + 0 * y),
    "mean over rows": (3, lambda n, x: n.layers[1](n.layers[0](x) * x.mean(0))),
    "control flow": (3, lambda n, x: n.layers[1](n.layers[0](x if x.sum() > 0 else -x))),
    "keyword": (3, lambda n, x: n.layers[1](F.linear(input=x, weight=n.layers[0].weight))),
    "scaled": (3, lambda n, x: n.layers[1](2 * n.layers[0](x) * x[:1].detach() - 0.1)),
    "per row": (3, lambda n, x: n.layers[1](n.layers[0](x) + torch.arange(len(x))[:, None] / 9)),
    "square": (3, lambda n, x: n.layers[1](n.layers[0](x).square())),
    "changed in place": (3, lambda n, x: n.layers[1](n.layers[0](x).mul_(2))),
    "changed under another name": (
        3,
        lambda n, x: n.layers[1]((y := n.layers[0](x), y.add_(1))[0]),
    ),
    "changed by a view": (3, lambda n, x: n.layers[1]((y := n.layers[0](x), y[1:].zero_())[0])),
    "in-place layer": (3, lambda n, x: n.layers[1](F.relu(n.layers[0](x), inplace=True))),
    "own function": (3, lambda n, x: n.layers[1](Doubled.apply(n.layers[0](x)))),
    "makes a tensor": (3, lambda n, x: n.layers[1](n.layers[0](x + torch.ones(6)))),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_any_structure(name: str, batch: int) -> None:
    rows, forward = NETWORKS[name]
    net = sf.Temporal(Wrapped(forward, *linears()))
    x = direct(torch.rand(batch, 6, generator=torch.Generator().manual_seed(1)), STEPS)
    if name != "keyword":
        assert rows_seen(net, x, nn.Linear)[0] == rows * batch // 3
    assert_same(net, x)


def test_random_layers_draw_at_each_step() -> None:
    net = sf.Temporal(nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), sf.LIF(0.0, 0.01)))
    x = direct(torch.rand(2, 6), STEPS)
    assert distinct_steps(net(x)) > 1
    assert distinct_steps(net.eval()(x)) == 1
    assert distinct_steps(net.train()(x)) > 1
    functional = Wrapped(lambda n, x: n.layers[1](F.dropout(n.layers[0](x))), *linears())
    assert distinct_steps(sf.Temporal(functional)(x)) > 1


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
    net, x = sf.Temporal(Noisy()), images()
    assert distinct_steps(net(x)) == 1
    net.net.noise = 1.0
    assert distinct_steps(net(x)) == STEPS
    net.net.noise = 0.0
    assert distinct_steps(net(x)) == 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("source", ["torch", "python"])
def test_random_branches_do_not_depend_on_the_seed(seed: int, source: str) -> None:
    """Each call draws its own branch, whichever the first call took."""
    draw = {"torch": lambda: torch.rand(1).item(), "python": random.random}[source]
    taken: list[bool] = []

    def forward(n: Wrapped, x: Tensor) -> Tensor:
        x = n.layers[0](x)
        taken.append(draw() < 0.5)
        return n.layers[1](x + torch.randn_like(x) if taken[-1] else x)

    torch.manual_seed(0)
    net = sf.Temporal(Wrapped(forward, nn.Linear(6, 50), sf.LIF(0.0, 0.2)))
    x = direct(torch.rand(3, 6), STEPS)
    torch.manual_seed(seed)
    random.seed(seed)
    found = [distinct_steps(net(x)) > 1 for _ in range(20)]
    assert found == taken
    assert 0 < sum(found) < 20


def test_contexts_of_the_network_hold() -> None:
    def without_gradients(n: Wrapped, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = n.layers[0](x)
        return n.layers[2](n.layers[1](x))

    net = sf.Temporal(Wrapped(without_gradients, *linears(2)[:2], sf.LIF(0.5, 0.2)))
    x = direct(torch.rand(3, 6), STEPS)
    net(x).sum().backward()
    assert net.net.layers[0].weight.grad is None
    assert net.net.layers[1].weight.grad is not None

    def cast(n: Wrapped, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = n.layers[0](x)
        dtypes.append(x.dtype)
        return n.layers[1](x.float())

    dtypes: list[torch.dtype] = []
    net = sf.Temporal(Wrapped(cast, *linears()))
    assert rows_seen(net, x, nn.Linear) == [3]
    assert torch.equal(net(x), net(x.contiguous()))
    assert {*dtypes} == {torch.bfloat16}


def test_code_of_the_network_sees_all_rows() -> None:
    def forward(n: Wrapped, x: Tensor) -> Tensor:
        y = n.layers[0](x)
        assert y.shape == (18, 6)
        assert len(y) == y.size(0) == 18
        assert y.detach().numpy().shape == (18, 6)
        assert len(y.tolist()) == 18
        assert copy.deepcopy(y.detach()).shape == (18, 6)
        assert y.data.mean() == y.mean()
        assert repr(y).startswith("tensor(")
        return n.layers[1](y)

    net, x = sf.Temporal(Wrapped(forward, *linears())), direct(torch.rand(3, 6), STEPS)
    assert rows_seen(net, x, nn.Linear) == [3]
    assert_same(net, x)


def test_gradients_of_values_before_the_first_neuron() -> None:
    """Hooks and `retain_grad` on a value get the gradients of all rows."""
    found: dict[str, list[Tensor]] = {"hook": [], "retained": []}

    def forward(n: Wrapped, x: Tensor) -> Tensor:
        y = n.layers[0](x)
        y.register_hook(found["hook"].append)
        y.retain_grad()
        found["retained"].append(y)
        return n.layers[1](y)

    net, x = sf.Temporal(Wrapped(forward, *linears())), direct(torch.rand(3, 6), STEPS)
    assert_same(net, x)
    for a, b in (found["hook"], [y.grad for y in found["retained"]]):
        assert a.shape == b.shape == (18, 6)
        torch.testing.assert_close(a, b)


def test_a_change_in_place_of_what_has_a_view_is_refused() -> None:
    def forward(n: Wrapped, x: Tensor) -> Tensor:
        y = n.layers[0](x)
        z = y.flatten(1)
        z += 1
        return n.layers[1](y)

    net = sf.Temporal(Wrapped(forward, *linears()))
    with pytest.raises(RuntimeError, match="that has a view in place: change a copy"):
        net(direct(torch.rand(3, 2, 6), STEPS))


def test_modes_without_gradients() -> None:
    net, x = convolutional().eval(), images()
    expected = net(x.contiguous())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert rows_seen(net, x) == [3]
            torch.testing.assert_close(net(x), expected)


def test_compiled_modules_get_all_rows() -> None:
    net, x = convolutional().eval(), images()
    expected = net(x.contiguous())
    net.net[0].compile(backend="eager")
    seen = []
    net.net[1].register_forward_pre_hook(lambda m, args: seen.append(type(args[0])))
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected)
    assert seen == [Tensor]


def test_a_changed_network() -> None:
    net, x = convolutional(), images()
    assert rows_seen(net, x) == [3]
    net.net[0] = nn.Sequential(nn.Dropout(0.5), *net.net[0])
    assert rows_seen(net, x) == [18]


def test_gradients_and_hooks_receive_all_steps() -> None:
    net, x = convolutional(), images()
    assert rows_seen(net, images().requires_grad_()) == [18]
    assert rows_seen(net, x[:1]) == [3]  # one step is one step
    seen = []
    net.net[1].register_forward_hook(lambda m, x, y: seen.append(y.shape[0]))
    net.net[1].register_full_backward_hook(lambda m, x, y: seen.append(y[0].shape[0]))
    net(x).sum().backward()
    assert seen == [18, 18]
    assert_same(net, x)


def test_gradients_of_each_step_of_the_input() -> None:
    net = convolutional().eval()
    x = images().detach().requires_grad_()
    net(x)[0].sum().backward()
    assert x.grad[0].any()
    assert not x.grad[1:].any()


def test_checkpoint() -> None:
    """The part that is computed again in backward has the first neuron."""
    plain, x = sf.Temporal(nn.Sequential(*linears())), direct(torch.rand(3, 6), STEPS)
    inside = Wrapped(
        lambda n, x: checkpoint(
            lambda y: n.layers[2](n.layers[1](n.layers[0](y))), x, use_reentrant=False
        ),
        *linears(),
    )
    expected = results(plain, x).values()
    for y in (x, x.contiguous()):
        for a, e in zip(results(sf.Temporal(inside), y).values(), expected, strict=True):
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(duplicate) -> None:
    net, x = convolutional(), images()
    net(x)
    other = duplicate(net)
    assert rows_seen(other, x) == [3]
    statistics = net.net[1].running_var.clone()
    other(x)
    assert torch.equal(net.net[1].running_var, statistics)
    assert list(other.state_dict()) == list(net.state_dict())


def test_no_random_numbers_are_drawn() -> None:
    net, x = convolutional(), images()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    net(x)
    assert torch.equal(torch.rand(4), expected)


def test_backends_agree(backends) -> None:
    net, x = convolutional().eval().to(backends.device), images().to(backends.device)
    expected = net(x, impl="reference")
    assert expected.any()
    for impl in backends.impls:
        assert torch.equal(net(x, impl=impl), expected)


def test_saved_memory_does_not_grow_with_steps() -> None:
    """What autograd keeps of the layers before the first neuron does not grow with T."""
    torch.manual_seed(0)
    net = sf.Temporal(nn.Sequential(nn.Linear(6, 1000), nn.BatchNorm1d(1000), sf.LIF()))

    def kept(x: Tensor) -> int:
        sizes: dict[int, int] = {}

        def pack(y: Tensor) -> Tensor:
            sizes[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
            return y

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
            net(x)
        return sum(sizes.values())

    x = torch.rand(8, 6)
    few, many = (kept(direct(x, steps)) for steps in (32, 64))
    assert many - few <= 64 * 1000 * 4  # a state every few steps, at most
    assert kept(direct(x, 64).contiguous()) > 2 * many
