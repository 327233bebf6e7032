"""Calls that differ between ranks raise an error on all of them and do not hang."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import spikefuse as sf
from spikefuse.distributed import RankLost, shard_time
from spikefuse.distributed.agreement import Agreement, _difference
from spikefuse.distributed.faults import RankWatchdog
from spikefuse.testing import make_input
from tests.distributed.processes import Group

X = make_input((4, 3, 6))

# What the last rank passes while the others pass X.
WRONG: dict[str, Callable[[], Tensor]] = {
    "steps": lambda: X[:2],
    "batch": lambda: X[:, :2],
    "dtype": lambda: X.bfloat16(),
    "memory": lambda: X.transpose(1, 2).contiguous().transpose(1, 2),
    "gradient": lambda: X.clone().requires_grad_(),
}


def messages(axis: DeviceMesh, what: str) -> list[str]:
    """The errors of two wrong calls between good ones: ranks stay in step."""
    net, found = shard_time(sf.Temporal(sf.LIF()), axis), []
    is_last = axis.get_local_rank() == axis.size() - 1
    net(X)
    for _ in range(2):
        with pytest.raises(ValueError, match="the ranks of a time axis") as caught:
            net(WRONG[what]() if is_last else X)
        found.append(str(caught.value))
    net(X)
    return found


@pytest.mark.parametrize("what", WRONG)
def test_a_different_call_on_one_rank_raises_on_all(group: Group, what: str) -> None:
    answers = group(messages, what, size=4)
    assert len({answer[0] for answer in answers}) == 1
    for number, text in enumerate(answers[0], 2):
        assert text.startswith(f"in call {number}, the ranks of a time axis ")
    if what == "steps":
        assert "hold [4, 4, 4, 2] steps: expected [3, 4, 3, 4] of T = 14" in answers[0][0]
    else:
        assert "rank 0: 4 steps of [T, 3, 6] float32" in answers[0][0]
        assert "rank 3: 4 steps of [T" in answers[0][0]


def test_a_comparison_that_cannot_start_names_the_lost_rank() -> None:
    watchdog = mock.Mock(RankWatchdog, count=0, **{"diagnose.return_value": "rank 1 has ended"})
    agreement = Agreement(mock.Mock(), True, watchdog)
    lost = RuntimeError("Connection closed by peer")
    gather = mock.patch("spikefuse.distributed.agreement.begin_gather", side_effect=lost)
    with gather, pytest.raises(RankLost, match="rank 1 has ended") as caught:
        agreement.compare(X, "training")
    assert caught.value.__cause__ is lost


def modes(axis: DeviceMesh) -> str:
    net = shard_time(sf.Temporal(nn.Sequential(nn.Linear(6, 6), sf.LIF())), axis)
    with pytest.raises(ValueError, match="must make the same calls") as caught:
        net.train(axis.get_local_rank() > 0)(X)
    with (
        torch.set_grad_enabled(axis.get_local_rank() > 0),
        pytest.raises(ValueError, match="without gradients"),
    ):
        net.train()(X)
    return str(caught.value)


def test_different_modes_raise(group: Group) -> None:
    text = group(modes, size=2)[0]
    assert "in evaluation with gradients" in text
    assert "in training with gradients" in text


def statistics(axis: DeviceMesh) -> str:
    how = "exact" if axis.get_local_rank() else "shard"
    net = shard_time(sf.Temporal(nn.Sequential(nn.BatchNorm1d(6), sf.LIF())), axis, statistics=how)
    with pytest.raises(ValueError, match="must make the same calls") as caught:
        net(X)
    return str(caught.value)


def test_different_statistics_raise(group: Group) -> None:
    text = group(statistics, size=2)[0]
    assert "exact statistics" in text
    assert "shard statistics" in text


def test_shares_may_differ_by_a_step() -> None:
    assert not _difference((b"2 steps x", b"2 steps x", b"3 steps x"))
    different = _difference((b"3 steps x", b"2 steps x"))
    assert different.startswith("hold [3, 2] steps: expected [2, 3] of T = 5")
