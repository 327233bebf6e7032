"""Networks over several processes, on torch.distributed: one technique per file."""

from spikefuse.distributed.neuron_sharding import NeuronShard, Replicated, shard_neurons

__all__ = ["NeuronShard", "Replicated", "shard_neurons"]
