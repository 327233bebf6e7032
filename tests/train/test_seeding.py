"""Random choices depend only on the seed, the purpose and the index."""

from __future__ import annotations

import itertools

import torch

from spikefuse.train.seeding import Purpose, derive, order, reseed


def test_seeds_differ() -> None:
    seeds = [derive(s, p, i) for s, p, i in itertools.product(range(5), Purpose, range(20))]
    assert len(set(seeds)) == len(seeds)


def test_order_is_a_permutation_of_seed_and_epoch() -> None:
    first = order(100, seed=3, epoch=2)
    assert first.sort().values.tolist() == list(range(100))
    torch.manual_seed(9)
    assert torch.equal(first, order(100, seed=3, epoch=2))
    assert not torch.equal(first, order(100, seed=3, epoch=3))
    assert not torch.equal(first, order(100, seed=4, epoch=2))


def test_reseed_sets_torch() -> None:
    reseed(1, Purpose.STEP, 7)
    first = torch.rand(3)
    torch.rand(5)
    reseed(1, Purpose.STEP, 7)
    assert torch.equal(first, torch.rand(3))
