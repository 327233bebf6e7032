"""Training on several processes: the time of a sequence shared among them."""

from spikefuse.distributed.faults import RankLost
from spikefuse.distributed.mesh import connect, make_mesh, steps_of
from spikefuse.distributed.outputs import (
    carry_state,
    gather_steps,
    last_step,
    mean_over_steps,
    reduce_gradients,
)
from spikefuse.distributed.plan import Plan, plan
from spikefuse.distributed.time_sharding import shard_time

__all__ = [
    "Plan",
    "RankLost",
    "carry_state",
    "connect",
    "gather_steps",
    "last_step",
    "make_mesh",
    "mean_over_steps",
    "plan",
    "reduce_gradients",
    "shard_time",
    "steps_of",
]
