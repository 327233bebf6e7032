"""Convert a trained network of ReLUs into a spiking one, and write it as a checkpoint."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from spikefuse.data import Examples
from spikefuse.data.files import replacing
from spikefuse.train import batches, own
from spikefuse.train.batches import EvalBatches
from spikefuse.train.checkpoint import KEY, LoadedRun, entry, load_weights
from spikefuse.train.choices import ACTIVATIONS
from spikefuse.train.config import RunOptions
from spikefuse.train.converted import per_channel
from spikefuse.train.fields import ConfigError
from spikefuse.train.output import show
from spikefuse.train.predict import TrainedNetwork, find_device, threads
from spikefuse.train.seeding import order
from spikefuse.train.tasks import Totals
from spikefuse.transforms.from_ann import from_ann
from spikefuse.transforms.tables import aligned


def convert(loaded: LoadedRun, how: Namespace, options: RunOptions, out: Path) -> None:
    """Convert a network, print the report of `from_ann` and the accuracy on the test examples
    over the steps, and write a checkpoint for `load`.

    Args:
        how: num_steps, share and per_channel of `from_ann`, and the number of training samples.

    Raises:
        ConfigError, DataError, OSError: the network spikes already or cannot be converted, examples
            cannot be read, or the checkpoint cannot be written.
    """
    if loaded.config.neuron not in ACTIVATIONS or loaded.config.converted:
        names = " or ".join(ACTIVATIONS)
        raise ConfigError(f"the network of {loaded.path} spikes: train one with --neuron {names}")
    device = find_device(options.device)
    config, parts = batches.load_examples(loaded.config, options.data_dir, options.download)
    own.check_examples(config, parts)
    original = TrainedNetwork(replace(config, fuse=False))
    load_weights(original, loaded)
    original.to(device).eval()
    rows = order(len(parts[0]), config.seed, 0)[: how.samples]
    chunks = rows.chunk(-(-len(rows) // config.batch_size))
    data = [parts[0][chosen].pixels.to(device) / 255 for chosen in chunks]
    options_of = {"share": how.share, "per_channel": how.per_channel}
    try:
        net = from_ann(original.net.net, data, how.num_steps, **options_of)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{loaded.path} cannot be converted: {error}") from error
    config = replace(config, num_steps=how.num_steps, converted=True, loss="mean")
    result = TrainedNetwork(config).to(device).eval()
    result.net.load_state_dict(per_channel(net).state_dict())
    show(f"{net.conversion}\n")
    counts = [t for t in range(1, how.num_steps + 1) if t & (t - 1) == 0 or t == how.num_steps]
    described = [*_by_steps(result, parts[-1], counts), *_by_steps(original, parts[-1], [1])]
    heads = "steps", *map(str, counts), "original"
    show("\n".join(aligned([*zip(heads, ("on the test samples", *described), strict=True)], 2)))
    content = {KEY: entry(config, []), "state_dict": result.cpu().state_dict()}
    with replacing(out) as path:
        torch.save(content, path)
    show(f"wrote {out}")


@torch.no_grad()
def _by_steps(network: TrainedNetwork, examples: Examples, counts: Sequence[int]) -> list[str]:
    """Describe the metrics after these numbers of steps."""
    task, config = network.task, network.config
    totals = [Totals(task) for _ in counts]
    device = next(network.parameters()).device
    with threads(config):
        for inputs, labels in EvalBatches(examples, config.batch_size, device):
            y = network.net(batches.encode(inputs, config))
            for t, total in zip(counts, totals, strict=True):
                total.add(task.predict(y[:t]), labels)
    return [task.describe(total.mean()) for total in totals]
