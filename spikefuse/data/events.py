"""The former name of `spikefuse.data.recordings`."""

from spikefuse.data.recordings import make_events

__all__ = ["make_events"]
