"""Input that does not change over time: the same results, from layers that run once."""

from __future__ import annotations

import copy
import pickle
import threading
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spikefuse as sf
from spikefuse.models import MODELS
from spikefuse.nn.encode import direct
from spikefuse.nn.temporal import constant

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


def rows_seen(net: sf.Temporal, x: Tensor, kind: type = nn.Conv2d, **options) -> list[int]:
    """The rows that layers of a kind receive in a call."""
    found, forward = [], kind.forward

    def watched(module, y):
        found.append(y.shape[0])
        return forward(module, y)

    with mock.patch.object(kind, "forward", watched):
        net(x, **options)
    return found


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


# Those that are large, or take spikes only, are left out.
LARGE = {"resnet34", "sew_resnet34", "resnet50"}
SOME = sorted(name for name in {*MODELS} - LARGE if not name.startswith("event-mlp"))


@pytest.mark.parametrize("name", SOME)
def test_every_model_computes_its_first_layer_once(name: str) -> None:
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


def linears(num: int = 1) -> list[nn.Module]:
    torch.manual_seed(0)
    return [*(nn.Linear(6, 6) for _ in range(num)), sf.LIF(0.5, 0.2), sf.LIF(0.5, 0.4)]


# Together with the rows that their first linear layer sees of 3 samples and 6 steps.
NETWORKS = {
    "own class": (3, lambda n, x: n.layers[1](F.relu(n.layers[0](x)))),
    "two neurons": (3, lambda n, x: n.layers[1](y := n.layers[0](x)) + n.layers[2](y)),
    "flatten": (3, lambda n, x: n.layers[1](n.layers[0](torch.flatten(x, 1)))),
    "residual before": (3, lambda n, x: n.layers[1](n.layers[0](x) + x)),
    "residual around": (18, lambda n, x: n.layers[1](y := n.layers[0](x)) + y),
    "joined": (18, lambda n, x: torch.cat([n.layers[1](y := n.layers[0](x)), y], 1)),
    "nothing spikes": (18, lambda n, x: n.layers[0](x)),
    "added": (18, lambda n, x: (y := n.layers[0](x), n.layers[1](y))[1] + 0 * y),
    "mean over rows": (18, lambda n, x: n.layers[1](n.layers[0](x) * x.mean(0))),
    "control flow": (18, lambda n, x: n.layers[1](n.layers[0](x if x.sum() > 0 else -x))),
    "makes a tensor": (18, lambda n, x: n.layers[1](n.layers[0](x + torch.ones(6)))),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_any_structure(name: str, batch: int) -> None:
    rows, forward = NETWORKS[name]
    net = sf.Temporal(Wrapped(forward, *linears()))
    x = direct(torch.rand(batch, 6, generator=torch.Generator().manual_seed(1)), STEPS)
    assert rows_seen(net, x, nn.Linear)[0] == rows * batch // 3
    assert_same(net, x)
    assert not [name for name in vars(net.net) if "constant" in name]


def test_random_layers_draw_at_each_step() -> None:
    net = sf.Temporal(nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), sf.IF(0.01)))
    x = direct(torch.rand(2, 6), STEPS)
    assert rows_seen(net, x, nn.Linear) == [12]
    assert rows_seen(net.eval(), x, nn.Linear) == [2]
    assert rows_seen(net.train(), x, nn.Linear) == [12]
    functional = Wrapped(lambda n, x: n.layers[1](F.dropout(n.layers[0](x))), *linears())
    assert rows_seen(sf.Temporal(functional), x, nn.Linear) == [12]


def test_a_changed_network_is_analysed_again() -> None:
    net, x = convolutional(), images()
    assert rows_seen(net, x) == [3]
    net.net[1] = nn.Dropout(0.5)
    assert rows_seen(net, x) == [18]


def test_gradients_and_hooks_receive_all_steps() -> None:
    net, x = convolutional(), images()
    assert rows_seen(net, images().requires_grad_()) == [18]
    assert rows_seen(net, x[:1]) == [3]  # one step is one step
    seen = []
    handle = net.net[1].register_forward_hook(lambda m, x, y: seen.append(y.shape[0]))
    assert rows_seen(net, x) == seen == [18]
    handle.remove()
    assert rows_seen(net, x) == [3]


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
def test_copies_have_plans_of_their_own(duplicate) -> None:
    net, x = convolutional(), images()
    net(x)
    other = duplicate(net)
    assert rows_seen(other, x) == [3]
    statistics = net.net[1].running_var.clone()
    other(x)
    assert torch.equal(net.net[1].running_var, statistics)
    assert list(other.state_dict()) == list(net.state_dict())


def test_analysis_leaves_hooks_and_random_state_unchanged() -> None:
    net, x = convolutional(), images()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    net(x)
    assert torch.equal(torch.rand(4), expected)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    with mock.patch.object(constant, "make_plan", side_effect=AssertionError):
        net(x)


def test_threads() -> None:
    """Each analyses its network while the others run theirs."""
    nets, x = [convolutional().eval() for _ in range(8)], images()
    expected = nets[0](x).detach()
    found: list[str] = []

    def work(net: sf.Temporal) -> None:
        try:
            for _ in range(10):
                net._plan = None
                assert torch.equal(net(x), expected)
        except BaseException as error:
            found.append(repr(error))

    threads = [threading.Thread(target=work, args=[net]) for net in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == []


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
