"""Write trained networks for programs without spikefuse: ONNX, torch.export and NIR."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spikefuse.data.files import replacing
from spikefuse.train import batches
from spikefuse.train.fields import ConfigError
from spikefuse.train.predict import TrainedNetwork
from spikefuse.transforms.export import exportable
from spikefuse.transforms.nir_layers import package
from spikefuse.transforms.nir_write import to_nir

#: Seconds of a time step in NIR, as SpikingJelly and snnTorch write it.
NIR_DT = 1e-4

Signature = list[tuple[str, str, Tensor]]  # "input" or "output", name, example


def export(network: TrainedNetwork, form: str, path: Path, *, step: bool, dt: float | None) -> str:
    """Write a trained network to a file, and return a description of its inputs and outputs.

    ONNX and torch.export get the network with its preprocessing and its mean over time, or with
    `step` one step of the `Temporal` in it, whose states are inputs and outputs; the batch size may
    be any. NIR gets the layers of the `Temporal`.

    Args:
        form: onnx, pt2 (torch.export) or nir.
        path: is replaced if it exists.
        step: see `spikefuse.exportable`.
        dt: of NIR, see `spikefuse.to_nir`; None for `NIR_DT`.

    Raises:
        ConfigError: an option does not apply to the format, or the network cannot be exported.
        ModuleNotFoundError: a package that the format needs is not installed.
        OSError: the file cannot be written.
    """
    config = network.config
    if step and form == "nir":
        raise ConfigError("--step is given, but NIR describes neurons without steps: remove it")
    if dt is not None and form != "nir":
        raise ConfigError(f"--dt is given, but {form} has no time constants: remove it")
    if config.encoding == "poisson" and form != "nir" and not step:
        raise ConfigError(
            "the network draws Poisson spikes, which cannot be exported: add --step, and encode "
            "inputs in front of each step"
        )
    for name in ("onnx", "onnxscript") if form == "onnx" else ():
        import_module(name)
    sizes = config.data.shape if config.data.kind == "images" else (config.num_steps,)
    if config.data.kind != "images":
        sizes += config.data.shape
    dtype = torch.float32 if config.data.kind == "series" else torch.uint8
    inputs = torch.zeros(2, *sizes, dtype=dtype)
    try:
        with _quiet(), torch.no_grad():
            if form == "nir":
                return _write_nir(network, inputs, path, NIR_DT if dt is None else dt)
            return _write_program(network, inputs, path, form, step)
    except (TypeError, ValueError, RuntimeError) as error:
        wraps = isinstance(error, torch.onnx.OnnxExporterError)  # in pages about itself
        cause = (wraps and error.__cause__) or error
        raise ConfigError(f"the network cannot be exported as {form}: {cause}") from error


def _write_program(
    network: TrainedNetwork, inputs: Tensor, path: Path, form: str, step: bool
) -> str:
    """Write ONNX, or a program of torch.export."""
    net: Any = exportable(network, step)
    args, names, outputs = (inputs,), ("inputs",), ("predictions",)
    shapes: tuple[Any, ...] = ({0: torch.export.Dim("batch")},)
    if step:
        encoded = batches.encode(inputs, network.config)
        assert isinstance(encoded, Tensor)
        states = net.initial_states(encoded[0])
        args, names, outputs = (encoded[0], *states), net.input_names, net.output_names
        if states:
            shapes = (*shapes, shapes * len(states))  # of x and of *states
    results = net(*args)
    signature = [("input", *pair) for pair in zip(names, args, strict=True)]
    results = results if isinstance(results, tuple) else (results,)
    signature += [("output", *pair) for pair in zip(outputs, results, strict=True)]
    if form == "onnx":
        program: Any = torch.onnx.export(
            net,
            args,
            input_names=names,
            output_names=outputs,
            dynamic_shapes=shapes,
            dynamo=True,
            verbose=False,
        )
        program.model.metadata_props["classes"] = json.dumps(network.classes)
        with replacing(path) as file:
            program.save(file, external_data=False)
    else:
        program = torch.export.export(net, args, dynamic_shapes=shapes)
        with replacing(path) as temporary, temporary.open("wb") as file:
            torch.export.save(program, file)
    return _described(signature, names[1:])


def _write_nir(network: TrainedNetwork, inputs: Tensor, path: Path, dt: float) -> str:
    sample = batches.encode(inputs, network.config)
    if not isinstance(sample, Tensor):
        raise ValueError("NIR has no lists of events: train the model mlp")
    graph = to_nir(network.net, sample, dt=dt)
    output = network.net(sample[:1], impl="reference")
    with replacing(path) as file:
        package().write(file, graph)
    signature = [("input", "x", sample[0]), ("output", "y", output[0])]
    return f"{_described(signature)}\nof each step of {dt:g} s, without encoding and mean over time"


def _described(signature: Signature, rests: Collection[str] = ()) -> str:
    """Return lines with the names, dtypes and shapes, and the values of the states at rest."""
    rows = []
    for kind, name, value in signature:
        sizes = ", ".join(["batch", *map(str, value.shape[1:])])
        row = f"{kind:<8}{name}: {str(value.dtype).removeprefix('torch.')} [{sizes}]"
        if name in rests:
            low, high = (f"{limit:g}" for limit in value.aminmax())
            row += f", at rest {low}" + (f" to {high}" if low != high else "")
        rows.append(row)
    return "\n".join(rows)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the hints of exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
