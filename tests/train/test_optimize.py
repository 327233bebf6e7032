"""Losses, schedules, optimizers, and gradients by microbatches and chunks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spikefuse as sf
from spikefuse.train.config import LOSSES, OPTIMIZERS, TrainConfig
from spikefuse.train.optimize import (
    adapt_state,
    clip,
    gradients,
    learning_rate,
    make_optimizer,
    readout,
    sequence_loss,
    set_learning_rate,
)

T, B = 6, 8


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses(smoothing: float) -> None:
    torch.manual_seed(0)
    outputs, labels = torch.randn(5, 3, 7), torch.tensor([6, 0, 2])

    def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
        target = F.one_hot(labels, 7) * (1 - smoothing) + smoothing / 7
        return -(target * logits.log_softmax(1)).sum(1).mean()

    expected = {
        "mean": cross_entropy(outputs.mean(0)),
        "last": cross_entropy(outputs[-1]),
        "every": torch.stack([cross_entropy(y) for y in outputs]).mean(),
    }
    assert set(expected) == set(LOSSES)
    for name, value in expected.items():
        torch.testing.assert_close(sequence_loss(outputs, labels, name, smoothing), value)


def test_readout_matches_the_loss() -> None:
    outputs = torch.randn(5, 3, 7, dtype=torch.bfloat16)
    assert torch.equal(readout(outputs, "last"), outputs[-1].float())
    for name in ("mean", "every"):
        torch.testing.assert_close(readout(outputs, name), outputs.float().mean(0))


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
    value = sequence_loss(outputs, labels, loss)
    value.backward()
    return value.detach(), readout(outputs, loss).detach(), [p.grad for p in net.parameters()]


def in_microbatches(net, batch, **options):
    x, labels = batch
    net.zero_grad()
    last = []

    def backward(loss, is_last):
        last.append(is_last)
        loss.backward()

    config = TrainConfig(batch_size=B, num_steps=T, **options)
    value, logits = gradients(net, x, labels, config, backward)
    assert last[-1]
    assert not any(last[:-1])
    return value, logits, [p.grad for p in net.parameters()]


@pytest.mark.parametrize(
    ("loss", "accumulate", "tbptt"),
    [*itertools.product(LOSSES, (1, 3), (None,)), ("mean", 1, T), ("every", 1, 99), ("last", 2, T)],
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
    losses = [sequence_loss(outputs, labels, loss) for outputs in (first, second)]
    value = share * losses[0] + (1 - share) * losses[1]
    value.backward()
    logits = readout(torch.cat([first, second]), loss).detach()
    expected = value.detach(), logits, [p.grad for p in net.parameters()]
    found = in_microbatches(net, batch, loss=loss, tbptt=4)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found[2][0], whole_batch(net, batch, loss)[2][0], rtol=1e-3)


def test_loss_every_is_the_same_in_chunks(net, batch) -> None:
    assert in_microbatches(net, batch, loss="every", tbptt=2)[0] == pytest.approx(
        whole_batch(net, batch, "every")[0].item()
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(net, batch, name: str) -> None:
    config = TrainConfig(optimizer=name, lr=0.1, weight_decay=0.01)
    optimizer = make_optimizer(config, net.parameters(), torch.device("cpu"))
    assert type(optimizer).__name__.lower() == name
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.01)
    assert group.get("momentum", 0.9) == 0.9
    set_learning_rate(optimizer, 0.0)
    before = [p.clone() for p in net.parameters()]
    whole_batch(net, batch)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_learning_rate_in_a_tensor_is_updated_in_place(net) -> None:
    optimizer = make_optimizer(TrainConfig(), net.parameters(), torch.device("cpu"))
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    set_learning_rate(optimizer, 0.25)
    assert rate.item() == 0.25
    assert optimizer.param_groups[0]["lr"] is rate


def test_clip(net, batch) -> None:
    optimizer = make_optimizer(TrainConfig(), net.parameters(), torch.device("cpu"))

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
    optimizer = make_optimizer(TrainConfig(), conv.parameters(), torch.device("cpu"))
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
