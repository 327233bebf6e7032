"""Losses, schedules, optimizers, and gradients by microbatches and chunks."""

from __future__ import annotations

import inspect
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spikefuse as sf
from spikefuse.train.activity import RateMonitor
from spikefuse.train.choices import LOSSES, OPTIMIZERS
from spikefuse.train.config import TrainConfig
from spikefuse.train.optimize import (
    adapt_state,
    clip,
    gradients,
    learning_rate,
    make_optimizer,
    set_learning_rate,
)
from spikefuse.train.tasks import Task, Totals

T, B = 6, 8


def classification(steps: str) -> Task:
    return Task("classification", "cross-entropy", steps, 3)


def rates(steps: int = 10, **options: object) -> list[float]:
    config = TrainConfig(lr=0.5, epochs=4, **options)  # type: ignore[arg-type]
    return [learning_rate(config, step, steps) for step in range(4 * steps)]


def test_constant_schedule() -> None:
    assert rates() == [0.5] * 40


def test_warmup_rises_to_the_rate() -> None:
    found = rates(warmup=0.5)
    assert found[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert found[5:] == [0.5] * 35


def test_cosine_schedule_decays_to_zero() -> None:
    found = rates(schedule="cosine", warmup=1)
    assert found[9] == found[10] == 0.5
    assert found[25] == pytest.approx(0.25)
    assert found[10:] == sorted(found[10:], reverse=True)
    assert found[-1] == pytest.approx(0.25 * (1 + math.cos(math.pi * 29 / 30)))


@pytest.mark.parametrize("warmup", [None, 0.0, 0.5, 2])
@pytest.mark.parametrize(("epochs", "steps"), [(4, 10), (3, 7), (5, 13), (3, 1), (4, 97)])
def test_one_cycle_is_that_of_torch(epochs: int, steps: int, warmup: float | None) -> None:
    total, optimizer = epochs * steps, torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.5)
    options = {"cycle_momentum": False, "total_steps": total}
    part = 0.3 if warmup is None else warmup / epochs
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, pct_start=part, **options)
    expected = [theirs.get_last_lr()[0]]
    for _ in range(total - 1):
        optimizer.step()
        theirs.step()
        expected.append(theirs.get_last_lr()[0])
    config = TrainConfig(lr=0.5, epochs=epochs, schedule="one-cycle", warmup=warmup)
    found = [learning_rate(config, step, steps) for step in range(total)]
    assert found == pytest.approx(expected)


def test_step_schedule() -> None:
    assert rates(schedule="step") == pytest.approx([0.5] * 20 + [0.05] * 20)
    found = rates(schedule="step", step_epochs=1, warmup=0.5)
    assert found[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert found[5::10] == pytest.approx([0.5, 0.05, 0.005, 0.0005])
    assert found[9:11] == pytest.approx([0.5, 0.05])


def test_weight_decay_spares_norms_biases_and_neurons() -> None:
    class Shaped(sf.PLIF):
        """A neuron with one decay for each channel, in three dims."""

        def __init__(self) -> None:
            super().__init__(decay=0.5)
            self.rates = nn.Parameter(torch.ones(4, 1, 1))

    conv, linear = nn.Conv2d(1, 4, 3, bias=False), nn.Linear(16, 3)
    norms = nn.BatchNorm2d(4), nn.LayerNorm((4, 2, 2))
    net = sf.fuse(sf.Temporal(nn.Sequential(conv, norms[0], Shaped(), norms[1], linear)))
    optimizer = make_optimizer(TrainConfig(weight_decay=0.1), net, torch.device("cpu"))
    decayed, spared = optimizer.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert {id(p) for p in decayed["params"]} == {id(conv.weight), id(linear.weight)}
    assert len(spared["params"]) == len(list(net.parameters())) - 2
    for group in (decayed, spared):
        assert group["lr"] == 1e-3
    adapt_state(optimizer)  # as a resumed run does
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    for options in ({}, {"weight_decay": 0.1, "decay_all": True}):
        config = TrainConfig(**options)
        assert len(make_optimizer(config, net, torch.device("cpu")).param_groups) == 1


def test_learning_rate_is_representable_in_float32() -> None:
    config = TrainConfig(lr=1e-3)
    rate = learning_rate(config, 0, 10)
    assert rate == pytest.approx(1e-3)
    assert torch.tensor(rate, dtype=torch.float32).item() == rate


@pytest.fixture
def net() -> sf.Temporal:
    """A network without batch norm, whose statistics depend on the microbatch."""
    torch.manual_seed(0)
    lif = sf.LIF(decay=0.7, threshold=0.5)
    return sf.Temporal(nn.Sequential(nn.Linear(5, 16), lif, nn.Linear(16, 3)))


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.rand(T, B, 5), torch.randint(0, 3, (B,))


def whole_batch(net, batch, loss="mean"):
    x, labels = batch
    net.zero_grad()
    outputs = net(x)
    task = classification(loss)
    value = task.loss(outputs, labels)
    value.backward()
    return value.detach(), task.predict(outputs).detach(), [p.grad for p in net.parameters()]


def spikes_in_chunks(net, x, size):
    """The outputs and the hidden spikes of a loop over time, whose states a chunk detaches."""
    first, lif, last = net.net
    v, outputs, spikes = torch.zeros(x.shape[1], 16), [], []
    for t, values in enumerate(x):
        v = v.detach() if t % size == 0 else v
        h = lif.decay * v + first(values)
        fired = lif.surrogate(h - lif.threshold)
        v = h * (1 - fired)
        outputs.append(last(fired))
        spikes.append(fired)
    return torch.stack(outputs), torch.stack(spikes)


def in_microbatches(net, batch, **options):
    x, labels = batch
    net.zero_grad()
    last = []

    def backward(loss, is_last):
        last.append(is_last)
        loss.backward()

    config = TrainConfig(batch_size=B, num_steps=T, **options)
    value, logits = gradients(net, x, labels, config, classification(config.loss).loss, backward)
    assert last[-1]
    assert not any(last[:-1])
    return value, logits, [p.grad for p in net.parameters()]


@pytest.mark.parametrize(
    ("loss", "accumulate", "tbptt"),
    [*itertools.product(LOSSES, (1, 3), (None,)), ("mean", 1, T), ("every", 1, T), ("last", 2, T)],
)
def test_microbatches_and_one_chunk_give_the_gradients_of_the_batch(
    net, batch, loss: str, accumulate: int, tbptt: int | None
) -> None:
    whole = whole_batch(net, batch, loss)
    pieces = in_microbatches(net, batch, loss=loss, accumulate=accumulate, tbptt=tbptt)
    torch.testing.assert_close(pieces, whole)


@pytest.mark.parametrize("loss", LOSSES)
def test_chunks_truncate_the_gradient(net, batch, loss: str) -> None:
    """Chunks of 4 and 2 steps equal separate losses with detached states."""
    x, labels = batch
    net.zero_grad()
    first, state = net(x[:4], return_state=True)
    second = net(x[4:], state={k: tuple(s.detach() for s in v) for k, v in state.items()})
    share = 0.0 if loss == "last" else 4 / 6
    losses = [classification(loss).loss(outputs, labels) for outputs in (first, second)]
    value = share * losses[0] + (1 - share) * losses[1]
    value.backward()
    logits = classification(loss).predict(torch.cat([first, second])).detach()
    expected = value.detach(), logits, [p.grad for p in net.parameters()]
    found = in_microbatches(net, batch, loss=loss, tbptt=4)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found[2][0], whole_batch(net, batch, loss)[2][0], rtol=1e-3)


def test_loss_every_is_the_same_in_chunks(net, batch) -> None:
    assert in_microbatches(net, batch, loss="every", tbptt=2)[0] == pytest.approx(
        whole_batch(net, batch, "every")[0].item()
    )


@pytest.mark.parametrize(("accumulate", "tbptt"), [(3, None), (1, 2), (3, 2)])
def test_pieces_of_padded_sequences_count_by_their_targets(
    net, batch, accumulate: int, tbptt: int | None
) -> None:
    """The last samples and steps have no target, so that some pieces have none."""
    x, _ = batch
    labels = torch.randint(0, 3, (B, T))
    labels[:, 4:], labels[1, 2:], labels[6:] = -100, -100, -100
    task = Task("sequence", "cross-entropy", "every", 3, 0.1)
    counted = labels.T != -100
    net.zero_grad()
    chunks, state = [], None
    for chunk in x.split(tbptt or T):
        y, state = net(chunk, state=state, return_state=True)
        state = {name: tuple(s.detach() for s in states) for name, states in state.items()}
        chunks.append(y)
    expected = F.cross_entropy(torch.cat(chunks)[counted], labels.T[counted], label_smoothing=0.1)
    expected.backward()
    options = {"task": "sequence", "criterion": "cross-entropy", "label_smoothing": 0.1}
    options |= {"batch_size": B, "num_steps": T, "accumulate": accumulate, "tbptt": tbptt}
    grads = [p.grad for p in net.parameters()]
    net.zero_grad()
    value, _ = gradients(
        net, x, labels, TrainConfig(**options), task.loss, lambda loss, last: loss.backward()
    )
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close([p.grad for p in net.parameters()], grads)


PIECES = [(1, None), (3, None), (B, None), (1, 2), (1, 4), (3, 4)]


@pytest.mark.parametrize(("accumulate", "tbptt"), PIECES)
@pytest.mark.parametrize("loss", [*LOSSES, "padded"])
def test_pieces_have_the_penalty_of_their_samples_and_steps(
    net, batch, loss: str, accumulate: int, tbptt: int | None
) -> None:
    """Whatever their targets, of which some pieces have none."""
    x, labels = batch[0].clone(), batch[1]
    x[:, 6:] *= 3  # which spike more often
    options = {"batch_size": B, "num_steps": T, "accumulate": accumulate, "tbptt": tbptt}
    if loss == "padded":
        labels = torch.randint(0, 3, (B, T))
        labels[:, 4:], labels[1, 2:], labels[6:] = -100, -100, -100
        options |= {"task": "sequence", "criterion": "cross-entropy"}
    else:
        options["loss"] = loss
    config = TrainConfig(**options, rate_penalty=5.0)
    task = Task(config.task, "cross-entropy", config.loss, 3)

    net.zero_grad()
    outputs, spikes = spikes_in_chunks(net, x, tbptt or T)
    if loss == "mean":  # of each chunk
        chunks = outputs.split(tbptt or T)
        expected = sum(task.loss(y, labels) * len(y) / T for y in chunks)
    else:
        expected = task.loss(outputs, labels)
    expected = expected + 5 * spikes.mean()
    expected.backward()
    grads = [p.grad for p in net.parameters()]

    net.zero_grad()
    rates = RateMonitor(net.net)

    def backward(value: torch.Tensor, last: bool) -> None:
        value.backward()

    value, _ = gradients(
        net, x, labels, config, task.loss, backward, penalty=lambda: 5 * rates.penalty()
    )
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close([p.grad for p in net.parameters()], grads)


def test_chunks_without_a_loss_have_no_backward_pass_of_their_own(net, batch) -> None:
    x, labels = batch
    net.net[0].requires_grad_(False)
    rates, task, losses = RateMonitor(net.net), classification("last"), []
    net.net[1].register_forward_hook(lambda *args: losses.append(torch.is_grad_enabled()))

    def passes(**options: float) -> int:
        config, done = TrainConfig(loss="last", num_steps=T, tbptt=2, **options), []
        penalty = rates.penalty if options else lambda: None
        gradients(net, x, labels, config, task.loss, lambda y, _: done.append(y), penalty=penalty)
        return len(done)

    assert passes() == 1
    assert losses == [False, False, True]
    assert passes(rate_penalty=1.0) == 1  # the layers before the spikes are frozen
    net.net[0].requires_grad_(True)
    assert passes(rate_penalty=1.0) == 3


def test_more_microbatches_than_samples(net, batch) -> None:
    """The last batch of a loader may have fewer samples than `accumulate`."""
    few = batch[0][:, :2], batch[1][:2]
    torch.testing.assert_close(in_microbatches(net, few, accumulate=4), whole_batch(net, few))


def test_parts_of_a_batch_count_by_their_targets(net, batch) -> None:
    """As those of several processes, whose gradients are averaged."""
    x, labels = batch[0], torch.randint(0, 3, (B, T))
    labels[0, 1:], labels[5:] = -100, -100
    options = {"task": "sequence", "criterion": "cross-entropy", "batch_size": B, "num_steps": T}
    config = TrainConfig(**options, rate_penalty=5.0)
    task, rates, sums = config.make_task(), RateMonitor(net.net), []

    def part(rows: slice, parts: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        net.zero_grad()
        whole = labels, parts

        def backward(value: torch.Tensor, last: bool) -> None:
            value.backward()

        value, predictions = gradients(
            net, x[:, rows], labels[rows], config, task.loss, backward, whole, rates.penalty
        )
        totals = Totals(task)
        totals.add(predictions, labels[rows], value, task.num_samples(labels) / parts)
        sums.append(totals.sums)
        return value, [p.grad for p in net.parameters()]

    (expected, wanted), (first, a), (second, b), (third, c) = (
        part(slice(None), 1),
        part(slice(3), 3),
        part(slice(3, 6), 3),
        part(slice(6, None), 3),
    )
    assert 0 < third < 1  # no target, but a penalty
    torch.testing.assert_close((first + second + third) / 3, expected)
    found = [(g + h + i) / 3 for g, h, i in zip(a, b, c, strict=True)]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(sum(sums[1:]), sums[0])


def test_a_batch_without_targets_has_no_gradient(net, batch) -> None:
    x, labels = batch[0], torch.full((B, T), -100)
    for pieces in ({}, {"accumulate": 2, "tbptt": 3}):
        options = {"task": "sequence", "criterion": "cross-entropy", "label_smoothing": 0.1}
        config = TrainConfig(**options, **pieces, batch_size=B, num_steps=T)
        net.zero_grad()
        task = config.make_task()

        def loss(outputs: torch.Tensor, labels: torch.Tensor, task: Task = task) -> torch.Tensor:
            return task.loss(outputs, labels) + 0.01 * outputs.square().mean()

        value, _ = gradients(net, x, labels, config, loss, lambda loss, last: loss.backward())
        assert value == 0
        assert not any(p.grad.any() for p in net.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(net, batch, name: str) -> None:
    config = TrainConfig(optimizer=name, lr=0.1, weight_decay=0.01, decay_all=True)
    optimizer = make_optimizer(config, net, torch.device("cpu"))
    assert type(optimizer).__name__.lower() == name
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.01)
    assert group.get("momentum", 0.9) == (0 if name == "rmsprop" else 0.9)
    recorded = inspect.signature(type(optimizer)).parameters
    assert {"capturable", "fused"} & recorded.keys()  # what a CUDA graph needs
    set_learning_rate(optimizer, 0.0)
    before = [p.clone() for p in net.parameters()]
    whole_batch(net, batch)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    adapt_state(optimizer)
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_is_by_default_that_of_the_optimizer(name: str) -> None:
    config = TrainConfig(optimizer=name)
    optimizer = make_optimizer(config, nn.Linear(5, 3), torch.device("cpu"))
    decay = OPTIMIZERS[name](nn.Linear(5, 3).parameters(), lr=0.1).defaults["weight_decay"]
    assert optimizer.param_groups[0]["weight_decay"] == config.weight_decay == decay
    assert decay == (0.01 if name == "adamw" else 0)
    stored = TrainConfig.from_dict({**config.to_dict(), "weight_decay": 0.0})  # as before
    optimizer = make_optimizer(stored, nn.Linear(5, 3), torch.device("cpu"))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0]


def test_learning_rate_in_a_tensor_is_updated_in_place(net) -> None:
    optimizer = make_optimizer(TrainConfig(), net, torch.device("cpu"))
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    set_learning_rate(optimizer, 0.25)
    assert rate.item() == 0.25
    assert optimizer.param_groups[0]["lr"] is rate


def test_clip(net, batch) -> None:
    optimizer = make_optimizer(TrainConfig(), net, torch.device("cpu"))

    def norm() -> float:
        return float(torch.cat([p.grad.flatten() for p in net.parameters()]).norm())

    whole_batch(net, batch)
    whole = norm()
    clip(optimizer, None)
    clip(optimizer, 2 * whole)
    assert norm() == pytest.approx(whole)
    clip(optimizer, 0.5 * whole)
    assert norm() == pytest.approx(0.5 * whole, rel=1e-4)


def test_adapt_state_converts_state_of_another_device() -> None:
    conv = nn.Conv2d(4, 8, 3)
    optimizer = make_optimizer(TrainConfig(), conv, torch.device("cpu"))
    conv(torch.rand(1, 4, 5, 5)).sum().backward()
    optimizer.step()
    (group,) = optimizer.param_groups
    group.update(fused=True, capturable=True, lr=torch.tensor(0.5))
    state = optimizer.state[conv.weight]
    average = state["exp_avg"]
    state["exp_avg"] = average.contiguous(memory_format=torch.channels_last)
    adapt_state(optimizer)
    assert (group["fused"], group["capturable"], group["lr"]) == (None, False, 0.5)
    assert state["exp_avg"].stride() == conv.weight.stride()
    assert torch.equal(state["exp_avg"], average)
    optimizer.step()
