"""Turn a network of another library's modules into one of ours."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

from spikefuse._torch import children_of, hooks_of, is_compiled, registries, separate
from spikefuse.kernels.norm import BatchNorm
from spikefuse.neurons.definition import Neuron
from spikefuse.nn.activations import ACTIVATIONS
from spikefuse.nn.checkpoint import require_temporal
from spikefuse.nn.neuron import check_module
from spikefuse.nn.temporal import FOREIGN, RECURRENT, Temporal
from spikefuse.transforms.converters import norse, snntorch, spikingjelly
from spikefuse.transforms.converters.common import (
    FOLDED,
    SEQUENCE,
    STEP,
    Library,
    Refusal,
    Rule,
    begin_call,
    end_call,
)
from spikefuse.transforms.converters.forward_code import CodeReader, GraphReader, Roles
from spikefuse.transforms.converters.over_time import over_time, refuse_temporal
from spikefuse.transforms.copies import copied
from spikefuse.transforms.tables import aligned

MakeModule = Callable[[Any], nn.Module]

LIBRARIES: tuple[Library, ...] = (spikingjelly.LIBRARY, snntorch.LIBRARY, norse.LIBRARY)

#: Characters of a module in a table.
MAX_TEXT = 72

# Layers of torch that compute the same on [T, B, ...] and on [T*B, ...].
_TRAILING = (
    *(nn.Linear, nn.Identity, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Softmax),
    *ACTIVATIONS,
)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_STEP_NORM = (
    "in training, its statistics are of all steps of a call; they were of one step. Equal in "
    "evaluation"
)
_EXAMPLE = """Write `forward` for one time step and without states, such as

    def forward(self, x):                          # x: [B, ...]
        spikes = self.lif1(self.fc1(x))
        return self.lif2(self.fc2(spikes))

and run it by spikefuse.Temporal(spikefuse.convert(net))(x) with x [T, B, ...]."""


@dataclass(frozen=True)
class Row:
    """How one module was converted.

    Attributes:
        name: of the module in the network.
        before, after: the module before and after, as text.
        note: what to know about it, or "".
    """

    name: str
    before: str
    after: str
    note: str = ""


@dataclass
class Conversion:
    """How `convert` converted the modules of a network. It prints as a table.

    Attributes:
        rows: a row for each module that was replaced, or has a note.
    """

    rows: list[Row] = field(default_factory=list)

    def __str__(self) -> str:
        cells = [("module", "was", "is", "note")]
        cells += [(r.name or "(the network)", r.before, r.after, r.note) for r in self.rows]
        return "\n".join(aligned(cells))


def convert(
    model: nn.Module, copy: bool = False, extra: Mapping[type, MakeModule] | None = None
) -> nn.Module:
    """Return a network of SpikingJelly, snnTorch or Norse as one of ours, to be run by `Temporal`.

    Neurons, and layers that know of time, are replaced by ours and by those of `torch.nn`; the code
    of the network runs as it is. The result computes one time step, so that
    `Temporal(convert(model))(x)` gives what `model` gives for the sequence `x` `[T, B, ...]`, run
    step by step from rest or, with SpikingJelly's `step_mode="m"`, at once. A call outside
    `Temporal` raises an error.

    Modules keep their names, and state dicts load both ways. The original is not changed.

    Equal spikes mean: equal in exact arithmetic. In float32, a potential within rounding of its
    threshold may spike in one library only.

    Nothing is converted by guess. An error lists all modules without an equivalent, and the lines
    of a `forward` that, read as source, loop over time or pass states. A converted neuron that is
    called a second time in one call of the network, as in a loop that reading does not find, raises
    a ValueError there. Code for both of SpikingJelly's step modes, `if self.conv.step_mode == "s":
    ...`, runs in step mode "s".

    Inside `Temporal`, code for one step sees T*B rows: where it reduces over the batch or the whole
    tensor, as in `y / y.norm()` or `y - y.mean(0)`, it mixes steps, without an error.

    Modules of torch around a network are looked into, such as `nn.DataParallel`, `AveragedModel`,
    and `fx.GraphModule`; of a compiled module, the network in it is converted.

    Code that counts dims of `[T, B, ...]`, such as `x.flatten(0, 1)` or `x.mean(0)`, runs on
    sequences only. If a network has such code, the result is written for sequences, too: call it as
    the original, without `Temporal`. The table names the first such line.

    Example::

        import snntorch as snn

        model = nn.Sequential(nn.Linear(784, 10), snn.Leaky(beta=0.9, init_hidden=True))
        net = sf.Temporal(sf.convert(model))
        spikes = net(torch.rand(8, 32, 784))
        print(net.net.conversion)

    Args:
        model: a network of SpikingJelly 2.0.0 or 0.0.0.0.12, snnTorch 1.0.0 or Norse 1.1.0.
        copy: if False, the result shares parameters, buffers and unchanged layers with `model`, so
            that an optimizer of either trains both; if True, it has copies. Move a model to its
            device and dtype before it is shared.
        extra: for classes without an equivalent, and for other classes of yours, a function from
            the module to its replacement, which computes one time step, or the whole sequence if
            the code of the network is written for sequences.

    Returns:
        The converted network; its attribute `conversion` says how each module was converted (a
        single neuron has none).

    Raises:
        TypeError: `model` is not a module.
        ValueError: a module or the code of the network can't be converted.
    """
    check_module("model", model)
    if any(isinstance(m, Temporal) for m in model.modules()):
        raise ValueError("the model has a Temporal in it: convert the network, then wrap it")
    source, replacements = copied(model, plain=False) if copy else model, dict(extra or {})
    conversion = _Converter(source, replacements)
    result = conversion.result()
    if conversion.time_line:
        conversion = _Converter(source, replacements, conversion.time_line)
        result = conversion.result()
    conversion.check()
    if not isinstance(result, Neuron):  # whose attributes are its constants
        result.__dict__["conversion"] = conversion.table
    return result


def library_of(module: nn.Module) -> Library | None:
    """Return the library that a module's code comes from; None for networks of its layers."""
    return next((lib for lib in LIBRARIES if lib.class_of(module) is not None), None)


class _Converter:
    """One conversion: the converted modules, and the reasons for those that were refused."""

    def __init__(
        self, model: nn.Module, extra: dict[type, MakeModule], time_line: str = ""
    ) -> None:
        self.model, self.extra = model, extra
        # Whether the result takes [T, B, ...], and a line of the code for which it must.
        self.keeps_time, self.time_line = bool(time_line), time_line
        self.table = Conversion()
        self.refused: list[str] = []
        self.needs_step = False  # whether code must be rewritten for one step
        self.made: dict[nn.Module, nn.Module] = {}
        self.places: dict[nn.Module, str] = {}
        self.roles = Roles(
            has_neurons=lambda m: any(map(self.is_neuron, m.modules())),
            is_neuron=self.is_neuron,
            returns_state=_returns_state,
            is_foreign=_is_foreign,
        )

    def result(self) -> nn.Module:
        modes = {mode for module in _outside_containers(self.model) if (mode := _mode_of(module))}
        context = SEQUENCE if SEQUENCE in modes else STEP
        result = self.build(self.model, "", context)
        if self.keeps_time:
            if result in self.places:  # a module of the original
                result = copying.copy(result)
                separate(result)
            result.register_forward_pre_hook(refuse_temporal)
            result.register_forward_pre_hook(begin_call)
            result.register_forward_hook(end_call, always_call=True)
            kind = type(self.model).__name__
            note = f"call it as the original, without Temporal: {self.time_line}"
            self.table.rows.append(Row("", kind, kind, note))
        elif (
            result not in self.places
            and not isinstance(result, Neuron)  # which may be called on its own
            and any(isinstance(module, Neuron) for module in result.modules())
        ):
            result.register_forward_pre_hook(require_temporal)
        if not self.refused:
            self.check_result(result)
        order = {name: i for i, (name, _) in enumerate(self.model.named_modules())}
        self.table.rows.sort(key=lambda row: order[row.name])
        return result

    def check(self) -> None:
        """Raise an error if something was refused."""
        known = (library_of(m) is not None or type(m) in self.extra for m in self.model.modules())
        if not self.refused and not any(known):
            self.refused.append(
                f"{type(self.model).__name__} has no module of SpikingJelly, snnTorch or Norse; "
                "for the activations of an ordinary network use spikefuse.spiking"
            )
        if self.refused:
            lines = "".join(f"\n- {line}" for line in self.refused)
            hint = f"\n{_EXAMPLE}" if self.needs_step else ""
            raise ValueError(f"the network can't be converted:{lines}{hint}")

    def check_result(self, result: nn.Module) -> None:
        """Refuse neurons of other libraries that are left, such as in what `extra` returned."""
        for name, module in result.named_modules():
            bases = ((c.__module__.split(".")[0], c.__name__) for c in type(module).__mro__)
            is_foreign = any(base in FOREIGN.get(library, ()) for library, base in bases)
            if is_foreign or (self.is_neuron(module) and library_of(module) is not None):
                self.refuse(name, module, "it is left in the result: replace it by one of ours")

    def is_neuron(self, module: nn.Module) -> bool:
        if isinstance(module, Neuron) or type(module) in self.extra:
            return True
        rule = _rule_of(module)
        return rule is not None and rule.is_stateful

    def refuse(self, name: str, module: nn.Module, reason: str) -> None:
        self.refused.append(f"{_label(name, module)}: {reason}")

    def build(self, module: nn.Module, name: str, context: str) -> nn.Module:
        if module in self.made:
            if self.roles.has_neurons(module):
                first = self.places[module] or "the network"
                self.refuse(name, module, f"it is also '{first}', with one state: use two modules")
            return self.made[module]
        self.places[module] = name
        try:
            made, note = self._build(module, name, context)
        except Refusal as refusal:
            self.refuse(name, module, str(refusal))
            made, note = module, ""
        self.made[module] = made
        if made is not module:
            made.training = module.training
            rule = _rule_of(module)
            for child in made.modules() if rule is not None and rule.is_stateful else ():
                child.training = module.training
                if isinstance(child, Neuron):
                    child.__dict__["_converted_from"] = _label(name, module)
            if type(module) in self.extra and isinstance(made, Neuron):
                made.__dict__["_converted_from"] = _label(name, module)
        if type(made) is not type(module) or note:
            self.table.rows.append(Row(name, _text(module), _text(made), note))
        return made

    def _build(self, module: nn.Module, name: str, context: str) -> tuple[nn.Module, str]:
        if type(module) in self.extra:
            made = self.extra[type(module)](module)
            if isinstance(made, nn.Module):
                return made, "by extra"
            kind = type(made).__name__
            raise Refusal(f"extra returned a {kind}: expected a torch.nn.Module")
        if isinstance(module, Neuron):
            return module, ""
        library = library_of(module)
        if library is not None:
            return self.of_library(library, module, name, context)
        is_of_torch = type(module).__module__.startswith("torch.")
        if is_of_torch and not isinstance(module, fx.GraphModule):
            return self.of_torch(module, name, context)
        self.check_code(module, name, context)
        return self.copied(module, name, context), ""

    def of_library(
        self, library: Library, module: nn.Module, name: str, context: str
    ) -> tuple[nn.Module, str]:
        cls, rule = library.class_of(module), _rule_of(module)
        assert cls is not None
        if rule is None:
            unknown = f"no equivalent of {cls.__name__} is known"
            reason = library.refused.get(cls.__name__, unknown)
            raise Refusal(f"{reason}. extra={{...}} takes a replacement of your own")
        changed = _overrides(type(module), cls)
        if changed:
            raise Refusal(
                f"it overrides {', '.join(changed)} of {cls.__name__}, so that it may "
                "compute anything; extra={...} takes a replacement of your own"
            )
        mode = library.mode(module)
        is_layer = self.keeps_time and not rule.is_stateful and not rule.inside
        folds = context == FOLDED or is_layer  # in code such as self.conv(x.flatten(0, 1))
        if mode and mode != context and not (folds and mode == STEP):
            raise Refusal(_wrong_mode(library, mode, context))
        if rule.is_stateful and context == FOLDED:
            raise Refusal("it has a state, and its container folds time into the batch")
        has_hooks = any(hooks_of([module]))
        if rule.is_stateful and has_hooks:
            raise Refusal("it has hooks: register them after the conversion")
        try:
            if rule.inside:
                inside = context if rule.inside == "same" else rule.inside
                made, note = rule.make(self.copied(module, name, inside))
            else:
                made, note = rule.make(module)
        except (TypeError, ValueError) as error:
            raise Refusal(str(error)) from error
        if "_step_mode" in vars(module) and not isinstance(made, Neuron):
            made.__dict__["step_mode"] = module.step_mode if self.keeps_time else "s"
        if self.keeps_time and mode == SEQUENCE == context:
            made = over_time(made)
        if isinstance(made, BatchNorm) and context == STEP:
            note = "; ".join(filter(None, (note, _STEP_NORM)))
        return made, note

    def of_torch(self, module: nn.Module, name: str, context: str) -> tuple[nn.Module, str]:
        if isinstance(module, RECURRENT):
            raise Refusal(
                "it has a memory of its own: run it beside a Temporal, see "
                "docs/how-to/recurrent-layers.md"
            )
        if isinstance(module, DistributedDataParallel):
            raise Refusal("it holds the network as it is: convert the network in it, its `module`")
        if is_compiled(module):
            ((key, inner),) = children_of(module).items()
            made = self.build(inner, f"{name}.{key}".lstrip("."), context)
            return made, "was compiled: compile the result"
        if isinstance(module, _CONTAINERS) or any(map(library_of, module.modules())):
            return self.copied(module, name, context), ""
        if context == SEQUENCE and not self.keeps_time:
            return _of_sequence(module)
        return module, _STEP_NORM if isinstance(module, BatchNorm) and context == STEP else ""

    def copied(self, module: nn.Module, name: str, context: str) -> nn.Module:
        """A module with converted children: itself if nothing changes, or a shallow copy."""
        changed = {
            key: made
            for key, child in children_of(module).items()
            if (made := self.build(child, f"{name}.{key}" if name else key, context)) is not child
        }
        has_mode = "_step_mode" in vars(module)
        if not (has_mode or changed):
            return module
        result = copying.copy(module)
        separate(result)
        for key, child in changed.items():
            result.add_module(key, child)
        if has_mode and not self.keeps_time:
            result.__dict__["_step_mode"] = "s"
        return result

    def check_code(self, module: nn.Module, name: str, context: str) -> None:
        """Refuse code of a network that does not run on one step."""
        own = {k: v for k, v in vars(module).items() if k not in registries()}
        hidden = [key for key, value in own.items() if _holds_modules(value)]
        if hidden:
            self.refuse(
                name,
                module,
                f"it keeps modules in {', '.join(hidden)}, where PyTorch does not see "
                "them: use nn.ModuleList or nn.ModuleDict",
            )
        is_sequence = context == SEQUENCE
        if str(type(module).forward.__module__).startswith("torch."):
            return
        must_read = is_sequence or self.roles.has_neurons(module)
        step_mode = "m" if is_sequence and self.keeps_time else "s"
        code: CodeReader | GraphReader
        if isinstance(module, fx.GraphModule):
            code = GraphReader(module, self.roles)
        else:
            code = CodeReader(module, self.roles, is_sequence, must_read, step_mode)
        if is_sequence and not self.time_line and code.counting:
            self.time_line = code.counting[0]
        for line in code.findings:
            if not any(other.endswith(f": {line}") for other in self.refused):
                self.refuse(name, module, line)
        self.needs_step = self.needs_step or bool(code.findings)


def _of_sequence(module: nn.Module) -> tuple[nn.Module, str]:
    """A layer of torch that gets `[T, B, ...]`."""
    if isinstance(module, nn.Flatten):
        start, end = module.start_dim, module.end_dim
        if start in (0, 1) or end in (0, 1):
            raise Refusal("it flattens time or batch: use start_dim=2")
        if start > 0 or end > 0:
            return nn.Flatten(start - (start > 0), end - (end > 0)), "dims of one step"
    elif not isinstance(module, _TRAILING) or _counts_dims(module):
        raise Refusal(
            "it takes [B, ...], and here it gets [T, B, ...]: use the library's "
            "layer for sequences, such as spikingjelly.activation_based.layer."
            f"{type(module).__name__}(step_mode='m')"
        )
    return module, ""


def _label(name: str, module: nn.Module) -> str:
    kind = type(module)
    library = kind.__module__.split(".")[0]
    known = any(lib.name == library for lib in LIBRARIES)
    return f"'{name}' ({library + '.' if known else ''}{kind.__name__})" if name else kind.__name__


def _text(module: nn.Module) -> str:
    text = type(module).__name__
    if library_of(module) is None and not isinstance(module, Neuron):
        return text
    text = " ".join(f"{text}({module.extra_repr()})".split())
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."


def _rule_of(module: nn.Module) -> Rule | None:
    library = library_of(module)
    return None if library is None else library.rules.get(library.name_of(module))


def _mode_of(module: nn.Module) -> str:
    rule, library = _rule_of(module), library_of(module)
    return "" if library is None or rule is None else library.mode(module)


def _returns_state(module: nn.Module) -> bool:
    library = library_of(module)
    return library is not None and _rule_of(module) is not None and library.returns_state(module)


def _is_foreign(function: Any) -> bool:
    path = str(getattr(function, "__module__", "")).split(".")
    return any(path[0] == lib.name and not set(path) & set(lib.networks) for lib in LIBRARIES)


def _outside_containers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are called as the network is, not inside containers of steps."""
    yield model
    rule = _rule_of(model)
    if rule is None or rule.inside == "same":
        for child in model.children():
            yield from _outside_containers(child)


def _overrides(kind: type, cls: type) -> list[str]:
    """Return the methods that the classes in front of a library's class define."""
    ours = kind.__mro__[: kind.__mro__.index(cls)]
    harmless = ("__init__", "extra_repr", "__repr__")
    names = [n for c in ours for n, v in vars(c).items() if callable(v) or isinstance(v, property)]
    return sorted({n for n in names if n not in harmless and not n.startswith("__annot")})


def _holds_modules(value: Any) -> bool:
    """Whether a list, tuple or dict holds modules of a library, also inside others of them or
    inside other modules."""
    if not isinstance(value, list | tuple | dict):
        return False
    for held in value.values() if isinstance(value, dict) else value:
        modules = held.modules() if isinstance(held, nn.Module) else ()
        if any(library_of(m) is not None for m in modules) or _holds_modules(held):
            return True
    return False


def _counts_dims(module: nn.Module) -> bool:
    dim = getattr(module, "dim", -1)
    return dim is None or dim >= 0 or getattr(module, "num_parameters", 1) > 1


def _wrong_mode(library: Library, mode: str, context: str) -> str:
    fix = "use one kind throughout"
    if library.name == "spikingjelly":
        fix = f"call functional.set_step_mode(net, '{'m' if context == SEQUENCE else 's'}')"
    kinds = {SEQUENCE: "sequences [T, B, ...]", STEP: "single steps [B, ...]"}
    called = kinds.get(context, "steps folded into the batch, [T*B, ...]")
    return f"it takes {kinds[mode]}, and is called here with {called}: {fix}"
