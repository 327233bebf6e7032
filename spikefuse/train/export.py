"""Write trained networks for programs without spikefuse: ONNX, torch.export and NIR."""

from __future__ import annotations

import json
import logging
import warnings
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
from spikefuse.transforms.quantize import quantize

#: Seconds of a time step in NIR, as SpikingJelly and snnTorch write it.
NIR_DT = 1e-4


def export(
    network: TrainedNetwork, form: str, path: Path, *, step: bool, dt: float | None, int8: bool
) -> str:
    """Write a trained network to a file, and return a description of its inputs and outputs.

    Args:
        form: onnx, pt2 (torch.export) or nir.
        step: see `spikefuse.exportable`; without it, preprocessing and mean over time are included.
        dt: of NIR, see `spikefuse.to_nir`; None for `NIR_DT`.
        int8: round the weights of `network` to 8 bits, see `spikefuse.quantize`.

    Raises:
        ConfigError: an option does not apply to the format, or the network cannot be exported.
        ModuleNotFoundError, OSError: a package is not installed, or the file cannot be written.
    """
    config = network.config
    if step and form == "nir":
        raise ConfigError("--step is given, but NIR describes neurons without steps: remove it")
    if int8 and form == "nir":
        raise ConfigError("--int8 is given, but weights in NIR are floats: remove it")
    if dt is not None and form != "nir":
        raise ConfigError(f"--dt is given, but {form} has no time constants: remove it")
    if config.encoding == "poisson" and form != "nir" and not step:
        raise ConfigError(
            "the network draws Poisson spikes, which cannot be exported: add --step, and encode "
            "inputs in front of each step"
        )
    for name in ("onnx", "onnxscript") if form == "onnx" else ():
        import_module(name)
    dtype, shape = config.example
    inputs = torch.zeros(2, *shape, dtype=dtype)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # hints of exporters, and so are those of logging
            logging.disable(logging.WARNING)
            if int8:
                x: Any = batches.encode(inputs, config)
                network.net = quantize(network.net, x, states=None)
            if form == "nir":
                return _write_nir(network, inputs, path, NIR_DT if dt is None else dt)
            return _write_program(network, inputs, path, form, step)
    except (TypeError, ValueError, RuntimeError) as error:
        wraps = isinstance(error, torch.onnx.OnnxExporterError)  # in pages about itself
        cause = (wraps and error.__cause__) or error
        raise ConfigError(f"the network cannot be exported as {form}: {cause}") from error
    finally:
        logging.disable(logging.NOTSET)


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
    if form == "onnx":
        named: dict[str, Any] = {"input_names": names, "output_names": outputs}
        options: dict[str, Any] = {"dynamic_shapes": shapes, "dynamo": True, "verbose": False}
        program: Any = torch.onnx.export(net, args, **named, **options)
        program.model.metadata_props["classes"] = json.dumps(network.classes)
        with replacing(path) as file:
            program.save(file, external_data=False)
    else:
        program = torch.export.export(net, args, dynamic_shapes=shapes)
        with replacing(path) as temporary, temporary.open("wb") as file:
            torch.export.save(program, file)
    results = net(*args)
    results = results if step else (results,)
    rows = [_described("input", n, x, n in names[1:]) for n, x in zip(names, args, strict=True)]
    rows += [_described("output", n, y) for n, y in zip(outputs, results, strict=True)]
    return "\n".join(rows)


def _write_nir(network: TrainedNetwork, inputs: Tensor, path: Path, dt: float) -> str:
    sample = batches.encode(inputs, network.config)
    if not isinstance(sample, Tensor):
        raise ValueError("NIR has no lists of events: train the model mlp")
    graph = to_nir(network.net, sample, dt=dt)
    output = network.net(sample[:1], impl="reference")
    with replacing(path) as file:
        package().write(file, graph)
    rows = _described("input", "x", sample[0]), _described("output", "y", output[0])
    return "\n".join((*rows, f"of each step of {dt:g} s, without encoding and mean over time"))


def _described(kind: str, name: str, value: Tensor, is_state: bool = False) -> str:
    sizes = ", ".join(["batch", *map(str, value.shape[1:])])
    row = f"{kind:<8}{name}: {str(value.dtype).removeprefix('torch.')} [{sizes}]"
    if not is_state:
        return row
    low, high = (f"{limit:g}" for limit in value.aminmax())
    return f"{row}, at rest {low}" + (f" to {high}" if low != high else "")
