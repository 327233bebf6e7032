"""Repeat launches bypass Triton's dispatcher, shown on a kernel that records its launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import spikefuse as sf
from spikefuse.kernels import triton_runtime
from spikefuse.scan import launch_triton
from spikefuse.scan.layout import layout_of
from spikefuse.scan.program import Variant

pytest.importorskip("triton")
import triton
from triton import knobs
from triton.compiler import CompiledKernel

STREAM = 77


class Compiled:
    """A compiled kernel as of Triton 3.7."""

    function, packed_metadata = 5, (4, 1, 0)

    def __init__(self) -> None:
        self.runs: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.runs.append(arguments)

    def _init_handles(self) -> None:
        pass

    def launch_metadata(self, grid: tuple[int, ...], stream: int, *arguments: Any) -> str:
        return "metadata"

    __getitem__ = CompiledKernel.__getitem__


class Launcher:
    """Triton's launcher as of 3.6."""

    num_ctas = global_scratch_align = profile_scratch_align = 1
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, runs: list[tuple[Any, ...]]) -> None:
        self.runs, self.calls = runs, 0

    def launch(self, *arguments: Any) -> None:
        self.runs.append(arguments)

    def __call__(self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any):
        self.calls += 1

        def allocate_scratch(size: int) -> str | None:
            return f"scratch of {size}" if size > 0 else None

        scratch = map(allocate_scratch, (self.global_scratch_size, self.profile_scratch_size))
        flags = self.launch_cooperative_grid, self.launch_pdl
        self.launch(gridX, gridY, gridZ, stream, function, *flags, *scratch, *args)


class Launched(Compiled):
    """A compiled kernel as of Triton 3.6."""

    launcher: type[Launcher] = Launcher

    def __init__(self) -> None:
        super().__init__()
        self.run = self.launcher(self.runs)


class Scratching(Launcher):
    global_scratch_size = 64


class Kernel:
    """A kernel as Triton decorates it."""

    __name__ = "forward"

    def __init__(self, compiled: type[Compiled]) -> None:
        self.compiled, self.dispatched = compiled(), 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def dispatch(*arguments: Any, **options: Any) -> Compiled:
            self.dispatched += 1
            self.options = options
            return self.compiled

        return dispatch


@pytest.fixture
def driver(monkeypatch):
    """Triton's driver of a known version, on machines without a GPU."""
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: STREAM)
    monkeypatch.setattr("triton.runtime.driver._active", active)
    monkeypatch.setattr(triton_runtime, "_triton_version", lambda: (3, 9))


def launch(kind: type[Compiled] = Compiled) -> tuple[Kernel, Any, list[Any]]:
    x, y, saved = torch.zeros(4, 1, 32), torch.zeros(4, 1, 32), torch.zeros(1, 32)
    kernel = Kernel(kind)
    made = launch_triton.prepare(
        kernel, layout_of([(x.shape, x.stride())]), [x, y], Variant(), False, False
    )
    return kernel, made, [x, y, None, None, saved, 0.5]


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("version", [(3, 7), (3, 9)])
def test_repeat_launches_bypass_the_dispatcher(version, monkeypatch):
    monkeypatch.setattr(triton_runtime, "_triton_version", lambda: version)
    kernel, made, tensors = launch()
    made._launch(tensors)
    assert (kernel.dispatched, kernel.compiled.runs) == (1, [])
    made._launch(tensors)
    x, y, saved = (tensors[i].data_ptr() for i in (0, 1, 4))
    head = (*made.grid, STREAM, Compiled.function, Compiled.packed_metadata, None, None, None)
    assert kernel.dispatched == 1
    assert kernel.compiled.runs == [(*head, x, y, None, None, saved, 0.5, *made.integers)]


@pytest.mark.usefixtures("driver")
def test_the_known_launcher_is_bypassed(monkeypatch):
    monkeypatch.setattr(triton_runtime, "_triton_version", lambda: (3, 6))
    kernel, made, tensors = launch(Launched)
    made._launch(tensors)
    made._launch(tensors)
    (direct,) = kernel.compiled.runs
    assert kernel.compiled.run.calls == 0
    kernel.compiled.run(*made.grid, STREAM, Launched.function, Launched.packed_metadata)
    # The arguments that the launcher adds are in the same places.
    (_, by_triton), num = kernel.compiled.runs, len(made.grid) + 7
    assert direct[:num] == by_triton
    assert direct[num : num + 3] == (None, None, None)
    assert direct[num + 3] == tensors[0].data_ptr()
    assert direct[-len(made.integers) :] == made.integers


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(("hip", "launcher"), [(None, Scratching), ("7.0", Launcher)])
def test_other_launchers_are_called(hip, launcher, monkeypatch):
    """Where the kernel needs scratch memory, and on AMD GPUs, whose launcher differs."""
    monkeypatch.setattr(triton_runtime, "_triton_version", lambda: (3, 6))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(Launched, "launcher", launcher)
    kernel, made, tensors = launch(Launched)
    made._launch(tensors)
    made._launch(tensors)
    assert kernel.compiled.run.calls == 1
    (arguments,) = kernel.compiled.runs
    assert ("scratch of 64" in arguments) == (launcher is Scratching)


@pytest.mark.usefixtures("driver")
def test_alignments_and_missing_tensors_are_dispatched_separately():
    kernel, made, tensors = launch()
    odd = torch.zeros(4, 1, 33).flatten()[1:129].view(4, 1, 32)
    assert odd.data_ptr() % 16
    for changed in ({}, {0: odd}, {2: torch.zeros(32)}, {2: torch.zeros(32), 4: None}):
        given = [changed.get(i, x) for i, x in enumerate(tensors)]
        before = kernel.dispatched
        made._launch(given)
        made._launch(given)
        assert kernel.dispatched == before + 1


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("num_steps", "registers", "limit"),
    [(16, 80, None), (16, 90, 80), (16, 105, None), (8, 90, None)],
)
def test_kernels_just_over_the_register_limit(monkeypatch, num_steps, registers, limit):
    """Backward kernels in half precision over several chunks; decided for each alignment."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    x = torch.zeros(num_steps, 1, 32, dtype=torch.bfloat16)
    kernel = Kernel(Compiled)
    kernel.__name__, kernel.compiled.n_regs = "backward", registers
    made = launch_triton.prepare(
        kernel, layout_of([(x.shape, x.stride())]), [x, x, x], Variant(), False, False
    )
    made._launch([x, x, x])
    assert kernel.options.get("maxnreg") == limit
    assert kernel.dispatched == (1 if limit is None else 2)
    kernel.compiled.n_regs = 200
    made._launch([x, x, x.flatten()[1:]])
    assert "maxnreg" not in kernel.options


@pytest.mark.parametrize("repairs", [False, True])
def test_kernels_that_add_to_gradients_run_once(repairs):
    """A kernel that is compiled again with fewer registers runs twice."""
    x = torch.zeros(16, 2, 32, dtype=torch.bfloat16)
    kernel = Kernel(Compiled)
    kernel.__name__ = "backward"
    made = launch_triton.prepare(
        kernel, layout_of([(x.shape, x.stride())]), [x, x, x], Variant(repair=repairs), False, False
    )
    assert made.tight is not repairs


@pytest.mark.usefixtures("driver")
def test_empty_saved_states_use_the_same_kernel():
    kernel, made, tensors = launch()
    made._launch(tensors)
    tensors[4] = torch.empty(0)
    made._launch(tensors)
    assert (kernel.dispatched, len(kernel.compiled.runs)) == (1, 1)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_profilers_see_launches(hook, monkeypatch):
    kernel, made, tensors = launch()
    made._launch(tensors)
    monkeypatch.setattr(knobs.runtime, hook, lambda metadata: None)
    made._launch(tensors)
    (run,) = kernel.compiled.runs
    assert run[6] == "metadata"
    assert getattr(knobs.runtime, hook) in run[7:9]
    assert isinstance(run[9], Tensor)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("version", [(3, 5), (3, 10), (4, 0)])
def test_unknown_versions_use_the_public_launch(version, monkeypatch):
    monkeypatch.setattr(triton_runtime, "_triton_version", lambda: version)
    kernel, made, tensors = launch()
    made._launch(tensors)
    made._launch(tensors)
    assert kernel.dispatched == 1
    (run,) = kernel.compiled.runs
    assert run[6] == "metadata"
    assert isinstance(run[9], Tensor)


def test_the_version_of_triton():
    version = triton_runtime._triton_version()
    assert triton.__version__.startswith("{}.{}.".format(*version))


@pytest.mark.parametrize("shape", [(4, 6, 48, 5, 5), (8, 3, 40, 4, 4), (2, 300, 7), (11, 9, 64, 3)])
def test_a_program_takes_blocks_of_the_same_channels(monkeypatch, shape):
    """Gradients of a parameter per channel are summed over all blocks of a program."""
    small = launch_triton.Shape(1, 1)
    monkeypatch.setattr(launch_triton, "PROGRAMS", 1)
    monkeypatch.setattr(launch_triton, "SUMMING", 1)
    monkeypatch.setattr(launch_triton, "BACKWARD", small)
    monkeypatch.setattr(launch_triton, "FORWARD", {4: small})
    x, channels = torch.randn(shape), shape[2]
    layout = layout_of([(x.shape, x.stride())])
    ((num_sums,), _) = launch_triton.sums_shape(layout, 4, x.device, True)
    assert num_sums < layout.num_neurons
    assert num_sums % (channels * layout.channel_inner) == 0
    grads = []
    for impl in ("triton", "reference"):
        neuron, leaf = sf.PLIF(0.7, channels=channels), x.clone().requires_grad_()
        y = neuron(leaf, impl=impl)
        grads.append(torch.autograd.grad((y * x).sum(), [leaf, *neuron.parameters()]))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
