"""Training on several processes that share the time of a sequence or the neurons of a network."""

from spikefuse.distributed.faults import RankLost
from spikefuse.distributed.mesh import connect, disconnect, make_mesh, steps_of
from spikefuse.distributed.neuron_sharding import NeuronShard, Replicated, shard_neurons
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
    "NeuronShard",
    "Plan",
    "RankLost",
    "Replicated",
    "carry_state",
    "connect",
    "disconnect",
    "gather_steps",
    "last_step",
    "make_mesh",
    "mean_over_steps",
    "plan",
    "reduce_gradients",
    "shard_neurons",
    "shard_time",
    "steps_of",
]
