"""How a launch seen before passes Triton's dispatch by, shown on a kernel that only notes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spikefuse.kernels import triton_runtime
from spikefuse.scan import launch_triton
from spikefuse.scan.layout import layout_of
from spikefuse.scan.program import Variant

pytest.importorskip("triton")
from triton import knobs
from triton.compiler import CompiledKernel

STREAM = 77


class Compiled:
    """A compiled kernel whose launcher is known."""

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


class Reordered(Compiled):
    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, stream=None: self.run(stream, *grid, *arguments)


class Launcher:
    """Triton's launcher as of 3.6, around one that is known."""

    num_ctas = global_scratch_align = profile_scratch_align = 1
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, runs: list[tuple[Any, ...]]) -> None:
        self.runs, self.calls = runs, 0

    def launch(self, *arguments: Any) -> None:
        self.runs.append(arguments)

    def __call__(self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any):
        self.calls = getattr(self, "calls", 0) + 1

        def allocate_scratch(size: int) -> str | None:
            return f"scratch of {size}" if size > 0 else None

        scratch = map(allocate_scratch, (self.global_scratch_size, self.profile_scratch_size))
        flags = self.launch_cooperative_grid, self.launch_pdl
        self.launch(gridX, gridY, gridZ, stream, function, *flags, *scratch, *args)


class Launched(Compiled):
    launcher: type[Launcher] = Launcher

    def __init__(self) -> None:
        super().__init__()
        self.run = self.launcher(self.runs)


class Scratching(Launcher):
    global_scratch_size = 64


class Annotating(Launcher):
    """One that passes on more than is known."""

    def __call__(self, *arguments: Any) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        self.launch(*arguments, "annotation")


class Failing(Compiled):
    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        raise AttributeError("handles")


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
    """Triton's driver and PyTorch's stream, where there is no GPU."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: STREAM, raising=False)
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: STREAM)
    monkeypatch.setattr("triton.runtime.driver._active", active)


def launch(kind: type[Compiled] = Compiled) -> tuple[Kernel, Any, list[Any]]:
    x, y, saved = torch.zeros(4, 1, 32), torch.zeros(4, 1, 32), torch.zeros(1, 32)
    kernel = Kernel(kind)
    made = launch_triton.prepare(kernel, layout_of([x]), [x, y], Variant())
    return kernel, made, [x, y, None, None, saved, 0.5]


@pytest.mark.usefixtures("driver")
def test_a_launch_seen_before_runs_directly():
    kernel, made, tensors = launch()
    made._launch(tensors)
    assert (kernel.dispatched, kernel.compiled.runs) == (1, [])
    made._launch(tensors)
    x, y, saved = (tensors[i].data_ptr() for i in (0, 1, 4))
    head = (*made.grid, STREAM, Compiled.function, Compiled.packed_metadata, None, None, None)
    assert kernel.dispatched == 1
    assert kernel.compiled.runs == [(*head, x, y, None, None, saved, 0.5, *made.integers)]


@pytest.mark.usefixtures("driver")
def test_a_launcher_that_is_known_is_passed_by():
    kernel, made, tensors = launch(Launched)
    made._launch(tensors)
    made._launch(tensors)
    (seen,) = kernel.compiled.runs
    assert kernel.compiled.run.calls == 0
    kernel.compiled.run(*made.grid, STREAM, Launched.function, Launched.packed_metadata)
    # What it adds stands where the launcher itself adds it.
    (_, by_triton), num = kernel.compiled.runs, len(made.grid) + 7
    assert seen[:num] == by_triton
    assert seen[num : num + 3] == (None, None, None)
    assert seen[num + 3] == tensors[0].data_ptr()
    assert seen[-len(made.integers) :] == made.integers


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("launcher", [Scratching, Annotating])
def test_other_launchers_are_called(launcher, monkeypatch):
    """Those that do more than is known, and those of kernels that need scratch memory."""
    monkeypatch.setattr(Launched, "launcher", launcher)
    kernel, made, tensors = launch(Launched)
    made._launch(tensors)
    made._launch(tensors)
    assert kernel.compiled.run.calls == 1
    (seen,) = kernel.compiled.runs
    assert ("scratch of 64" in seen) == (launcher is Scratching)
    assert ("annotation" in seen) == (launcher is Annotating)


@pytest.mark.usefixtures("driver")
def test_what_triton_compiles_for_is_told_apart():
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
    [(8, 80, None), (8, 90, 80), (8, 105, None), (4, 90, None)],
)
def test_some_kernels_are_given_fewer_registers(monkeypatch, num_steps, registers, limit):
    """Those of backward, in half precision and long chunks, that need just a few too many; and
    only for alignments of which this is so."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    x = torch.zeros(num_steps, 1, 32, dtype=torch.bfloat16)
    kernel = Kernel(Compiled)
    kernel.__name__, kernel.compiled.n_regs = "backward", registers
    made = launch_triton.prepare(kernel, layout_of([x]), [x, x, x], Variant())
    made._launch([x, x, x])
    assert kernel.options.get("maxnreg") == limit
    assert kernel.dispatched == (1 if limit is None else 2)
    kernel.compiled.n_regs = 200
    made._launch([x, x, x.flatten()[1:]])
    assert "maxnreg" not in kernel.options


@pytest.mark.parametrize("repairs", [False, True])
def test_what_adds_to_gradients_runs_once(repairs):
    """A kernel that is compiled again for fewer registers runs a second time."""
    x = torch.zeros(16, 2, 32, dtype=torch.bfloat16)
    kernel = SimpleNamespace(__name__="backward")
    made = launch_triton.prepare(kernel, layout_of([x]), [x, x, x], Variant(repair=repairs))
    assert made.tight is not repairs


@pytest.mark.usefixtures("driver")
def test_stored_states_of_no_rows_are_the_same_kernel():
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
def test_an_unknown_launcher_is_left_to_triton():
    kernel, made, tensors = launch(Reordered)
    made._launch(tensors)
    made._launch(tensors)
    assert kernel.dispatched == 1
    ((stream, *_),) = kernel.compiled.runs
    assert stream is None


@pytest.mark.usefixtures("driver")
def test_which_launchers_are_known():
    assert triton_runtime._runs_directly(Compiled())
    assert not triton_runtime._runs_directly(Reordered())
    assert not triton_runtime._runs_directly(Failing())
    assert not triton_runtime._runs_directly(object())
