"""The former name of `spikefuse.train.seeding`."""

from spikefuse.train.seeding import Purpose, derive, order, reseed

__all__ = ["Purpose", "derive", "order", "reseed"]
