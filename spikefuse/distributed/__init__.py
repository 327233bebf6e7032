"""Training on several processes: the time of a sequence shared among them."""

from spikefuse.distributed.mesh import make_mesh, steps_of
from spikefuse.distributed.time_sharding import shard_time

__all__ = ["make_mesh", "shard_time", "steps_of"]
