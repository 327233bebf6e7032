"""While a CUDA graph is recorded, no work is queried and all sends are waited for."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import spikefuse as sf
from spikefuse.distributed import agreement, faults, links, shard_time, time_sharding
from spikefuse.distributed.links import PeerLink
from spikefuse.distributed.time_sharding import TimeShard
from spikefuse.testing import make_input
from tests.distributed.processes import Group


class Work:
    """Work as NCCL returns it: recorded work can be waited for only in the recording, and not
    queried."""

    def __init__(self, recorded: bool) -> None:
        self.recorded, self.waited = recorded, False

    def wait(self) -> None:
        assert self.recorded == Place.recording
        self.waited = True

    def is_completed(self) -> bool:
        assert not self.recorded
        return False


class Place:
    """Whether a graph is being recorded, and what was sent."""

    recording = False
    works: list[Work]

    @classmethod
    def isend(cls, *_: object) -> Work:
        cls.works.append(Work(cls.recording))
        return cls.works[-1]


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> PeerLink:
    monkeypatch.setattr(Place, "works", [], raising=False)
    monkeypatch.setattr(Place, "recording", False)
    monkeypatch.setattr(links, "recording", lambda: Place.recording)
    monkeypatch.setattr(dist, "isend", Place.isend)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    return PeerLink(1, mock.Mock(), faults.RankWatchdog([0], mock.Mock(), 1.0))


def test_flush_waits_for_the_last_recorded_send(link: PeerLink) -> None:
    Place.recording = True
    link.send([torch.ones(2)] * 2)
    link.send([torch.ones(2)])
    link.flush()
    assert [work.waited for work in Place.works] == [False, False, True]  # sends complete in order
    link.flush()
    Place.recording = False
    link.flush()


def test_recorded_flush_skips_eager_sends(link: PeerLink) -> None:
    link.send([torch.ones(2)])
    Place.recording = True
    link.send([torch.ones(2)])
    link.flush()
    assert [work.waited for work in Place.works] == [False, True]


def test_eager_flush_skips_recorded_sends(link: PeerLink) -> None:
    Place.recording = True
    link.send([torch.ones(2)])
    Place.recording = False
    link.flush()
    link.send([torch.ones(2)])  # which queries earlier work
    link.flush()
    assert [work.waited for work in Place.works] == [False, True]


def test_recorded_work_is_not_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    watch = faults.RankWatchdog([0], mock.Mock(), 1.0)
    monkeypatch.setattr(faults, "recording", lambda: True)
    watch.expect(mock.Mock())
    assert not watch.pending
    monkeypatch.setattr(faults, "recording", lambda: False)
    watch.expect(mock.Mock(**{"is_completed.return_value": False}))
    assert len(watch.pending) == 1


def pending_sends(axis: DeviceMesh, make: Callable[[], sf.Temporal], x: Tensor) -> list[list[int]]:
    """The numbers of pending sends in both directions after a forward pass, a backward pass, and a
    forward pass without gradients, as if they were recorded."""
    net = shard_time(make(), axis, chunks=2)
    shard = net.passing
    assert isinstance(shard, TimeShard)
    both = [link for link in (shard.before, shard.after) if link is not None]
    waits = shard.agreement.waits
    for link in both:
        link.blocks = False
    shard.agreement.waits = False
    found = []

    def look() -> None:
        assert shard.agreement._pending is None  # the calls have been compared
        found.append([len(link._sent) for link in both])

    with (
        mock.patch.object(links, "recording", return_value=True),
        mock.patch.object(agreement, "recording", return_value=True),
        mock.patch.object(time_sharding, "recording", return_value=True),
    ):
        for _ in range(2):  # the second call repeats the first
            y = net(x)
            look()
            y.sum().backward()
            look()
        with torch.no_grad():
            net(x)
        look()
    shard.agreement.waits = waits
    dist.barrier(axis.get_group())  # sends must arrive before their memory is freed
    return found


def layers() -> sf.Temporal:
    torch.manual_seed(0)
    return sf.Temporal(nn.Sequential(nn.Linear(6, 5), sf.LIF(), nn.Linear(5, 4), sf.ALIF()))


def fused() -> sf.Temporal:
    torch.manual_seed(0)
    return sf.fuse(sf.Temporal(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), sf.LIF())))


@pytest.mark.parametrize("make", [layers, fused])
def test_no_send_is_pending_after_a_recorded_call(
    group: Group, make: Callable[[], sf.Temporal]
) -> None:
    answers = group(pending_sends, make, make_input((4, 6, 6)), size=3)
    for rank, found in enumerate(answers):
        assert found == [[0] * (1 if rank != 1 else 2)] * 5
