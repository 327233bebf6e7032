"""Triton source of a recurrent scan, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

from spikefuse.compiler.adjoint import Reverse
from spikefuse.compiler.emit_triton import HEADER, Emitter, function
from spikefuse.compiler.trace import Step
from spikefuse.compiler.variables import indent

# Tensor cores multiply bfloat16 and add in float32. Other values are sums of bfloat16 pieces: a
# float32 of three, exactly. The interpreter knows no bfloat16 products.
MULTIPLY = """\
@triton.jit
def multiply(a, b, total):
    if FAST:
        total = tl.dot(a, b, total)
    else:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return total
""".splitlines()

CONSTANTS = [
    *("BLOCK_B", "BLOCK_N", "BLOCK_K", "TILES", "BLOCKS"),
    *("PIECES", "WEIGHTS", "RESIDENT", "UNIT"),
]

# A program computes BLOCK_N neurons of a head for BLOCK_B samples, and then those of its next task.
# If a head has several BLOCKS, all programs of a launch run at the same time.
EACH_TASK = """\
size = B.to(tl.int64) * N
heads = (N // width).to(tl.int32)
inner = tl.arange(0, BLOCK_K)
column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
inside = column < width
# Whether what a program multiplies is in its own registers.
REGISTERS: tl.constexpr = BLOCKS == 1 and TILES == 1
tasks = (B + BLOCK_B - 1) // BLOCK_B * heads
for task in tl.range(tl.program_id(0), tasks, tl.num_programs(0), num_stages=1):
    tile, head = task // heads, task % heads
    row = (tile * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    there = row < B
    live = there[:, None] & inside[None, :]
    neuron = head * width + column
    at = row[:, None] * N + neuron[None, :]
    sent_at = row[:, None] * N + head * width + inner[None, :]
    matrix = weight_ptr + head * width * width
    if RESIDENT:
        resident = ()
        for i in tl.static_range(TILES):
            for j in tl.static_range(WEIGHTS):
                resident = resident + (WEIGHT,)
    if REGISTERS:
        sent = tl.load(start_ptr + at, mask=live, other=0.0).to(tl.float32)
    else:
        previous = start_ptr
""".splitlines()

LOAD_SENT = """\
if REGISTERS:
    rest = sent
else:
    k = i * BLOCK_K + inner
    rest = tl.load(
        previous + sent_at + i * BLOCK_K,
        mask=there[:, None] & (k < width)[None, :],
        other=0.0,
        cache_modifier=".cg",
    ).to(tl.float32)
""".splitlines()

SPLIT = """\
pieces = ()
for p in tl.static_range(PIECES):
    piece = rest.to(tl.bfloat16)
    rest = rest - piece.to(tl.float32)
    pieces = pieces + (piece,)
""".splitlines()

# Other programs read what was stored before their barrier through the second cache.
WAIT = """\
tl.debug_barrier()
if BLOCKS > 1:
    tl.atomic_add(counter_ptr + task, 1, sem="release")
    while tl.atomic_add(counter_ptr + task, 0, sem="acquire") < (count + 1) * BLOCKS:
        pass
""".splitlines()


def source(
    step: Step,
    reverse: Reverse,
    channel_params: Sequence[str],
    tensor_params: Sequence[str],
) -> str:
    """Return a module with kernels `forward` and `backward`.

    `forward` adds the product of the weights with the first output of the previous step to the
    first input. `backward` adds the product of the transposed weights with the gradient of the
    first input of the next step to the gradient of the first output. It reads the states before
    each step.

    Args:
        channel_params: parameters with one value per channel, here per neuron.
        tensor_params: parameters with a single value, read from memory; the others are floats.
    """
    emitter = _Recurrent(step, reverse, channel_params)
    emitter.tensors = [emitter.params[name] for name in tensor_params]
    parts = [
        HEADER.format(name=f"recurrent {step.name}").splitlines(),
        MULTIPLY,
        function("step", step.graph),
        function("reverse", emitter.reverse),
        emitter.forward(),
        emitter.backward(),
    ]
    return "\n\n\n".join("\n".join(part) for part in parts) + "\n"


class _Recurrent(Emitter):
    def sweep(
        self,
        name: str,
        sequences: tuple[Sequence[str], Sequence[str]],
        pointers: Sequence[str],
        parts: tuple[Sequence[str], Sequence[str], Sequence[str]],
    ) -> list[str]:
        """Emit a kernel that walks over time.

        Args:
            sequences: those that are read, and those that are written.
            parts: the code before the first step, for each step and after the last one.
        """
        read, written = sequences
        before, step, after = parts
        integers = [f"{s}_{kind}" for s in read for kind in ("time", "outer")]
        integers += ["N", "width"]
        in_memory = [*self.channel, *self.tensors]
        floats = [p for p in self.params.values() if p not in in_memory]
        arguments = ["weight_ptr", "start_ptr", *(f"{s}_ptr" for s in (*read, *written))]
        arguments += [*pointers, "counter_ptr"]
        arguments += [
            f"{p}: tl.float32" if p in floats else f"{p}_ptr" for p in self.params.values()
        ]
        arguments += [f"{i}: tl.int64" for i in integers] + ["T: tl.int32", "B: tl.int32"]
        arguments += [f"{constant}: tl.constexpr" for constant in CONSTANTS]
        body = [f"{i} = {i} * UNIT" for i in integers]
        body += [line.replace("WEIGHT,", f"{self.weight(name)},") for line in EACH_TASK]
        body += indent(self.load_params(floats), 1)
        backwards = name == "backward"
        ahead = "t - 1" if backwards else "t + 1"
        inner = [
            f"t = {'T - 1 - count' if backwards else 'count'}",
            *(f"{s} = ahead_{s}" for s in read),
            "more = (row < tl.where(count + 1 < T, B, 0))[:, None] & inside[None, :]",
            *self.load_ahead(read, ahead, "more"),
            *self.product(name),
            *step,
        ]
        tile = [f"{s}_at = row[:, None] * {s}_outer + neuron[None, :]" for s in read]
        tile += self.load_ahead(read, "T - 1" if backwards else "0", "live")
        tile += [*before, "for count in tl.range(0, T, num_stages=1):", *indent(inner, 1), *after]
        return [
            f"@triton.jit(do_not_specialize={[*integers, 'T', 'B']!r})",
            f"def {name}(",
            *(f"    {argument}," for argument in arguments),
            "):",
            *indent([*body, *indent(tile, 1)], 1),
        ]

    def load_params(self, floats: Sequence[str]) -> list[str]:
        lines = [
            f"{p} = tl.load({p}_ptr + neuron, mask=inside, other=0.0)[None, :]"
            for p in self.channel
        ]
        lines += [f"{p} = tl.load({p}_ptr)" for p in self.tensors]
        # The interpreter passes Python floats, which are in double precision.
        lines += [f"{p} = tl.full([], {p}, tl.float32)" for p in floats]
        if not self.params:
            return lines
        # The interpreter cannot combine a condition on a scalar with one on a block.
        return [*lines, "if not FAST:", *indent(_spread([*self.params.values()]), 1)]

    def weight(self, name: str) -> str:
        """The tile of piece j of the weights for the inputs of tile i."""
        k = "(i * BLOCK_K + inner)"
        offset = f"column[None, :] * width + {k}[:, None]"
        if name == "backward":
            offset = f"{k}[:, None] * width + column[None, :]"
        mask = f"({k} < width)[:, None] & inside[None, :]"
        return f"tl.load(matrix + j * N * width + {offset}, mask={mask}, other=0.0)"

    def load_ahead(self, names: Sequence[str], t: str, mask: str) -> list[str]:
        """Load the sequences of the step after this one, whose latency this step hides."""
        return [
            f"ahead_{s} = tl.load({s}_ptr + ({t}) * {s}_time + {s}_at, mask={mask}, other=0.0)"
            for s in names
        ]

    def product(self, name: str) -> list[str]:
        """Compute `total`, the product of what was sent in the step before with the weights."""

        def pieces(weight: str) -> list[str]:
            return [
                *LOAD_SENT,
                *SPLIT,
                "for j in tl.static_range(WEIGHTS):",
                f"    tile_of_weights = {weight}",
                "    for p in tl.static_range(PIECES):",
                "        if p + j < PIECES or p + j < WEIGHTS:",
                "            total = multiply(pieces[p], tile_of_weights, total)",
            ]

        return [
            "total = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)",
            "if RESIDENT:",
            "    for i in tl.static_range(TILES):",
            *indent(pieces("resident[i * WEIGHTS + j]"), 2),
            "else:",
            "    for i in tl.range(0, TILES):",
            *indent(pieces(self.weight(name)), 2),
            # Otherwise the compiler would start the sum at what the product is added to.
            "total = tl.where(live, total, 0.0)",
        ]

    def send(self, value: str, sequence: str) -> list[str]:
        """Make `value`, which has been stored to `sequence`, that of the next product."""
        return [
            "if REGISTERS:",
            f"    sent = {value}.to({sequence}_ptr.dtype.element_ty).to(tl.float32)",
            "else:",
            f"    previous = {sequence}_ptr + t * size",
            *indent(WAIT, 1),
        ]

    def forward(self) -> list[str]:
        pointers = [f"{v}_{role}" for v in self.vs for role in ("start", "final")]
        before = []
        for v, rest in self.initial:
            before += _load_or_fill(v, f"{v}_start", rest)
        x, y = self.xs[0], self.ys[0]
        values = [f"{s}.to(tl.float32)" for s in self.xs]
        step = [
            f"{x} = {x}.to(tl.float32) + total",
            "if current_ptr is not None:",
            f"    tl.store(current_ptr + t * size + at, {x}, mask=live)",
            self.call("step", [*self.ys, *self.vs], [*values, *self.vs]),
            *_spread(self.vs),
            *(f"tl.store({s}_ptr + t * size + at, {s}, mask=live)" for s in self.ys),
            *self.send(y, y),
        ]
        after = [f"tl.store({v}_final + at, {v}, mask=live)" for v in self.vs]
        written = [*self.ys, "current"]
        return self.sweep("forward", (self.xs, written), pointers, (before, step, after))

    def backward(self) -> list[str]:
        pointers = [f"{v}_{role}" for v in self.vs for role in ("gfinal", "gstart")]
        pointers += [f"{g}_ptr" for g in self.grads]
        past = [f"{v}_past" for v in self.vs]
        read = [*self.xs, *self.gys, *past]
        before = [f"{g} = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)" for g in self.grads]
        for v, g in zip(self.vs, self.gvs, strict=True):
            before += _load_or_fill(g, f"{v}_gfinal", 0.0)
        arguments = [f"{s}.to(tl.float32)" for s in (*self.xs, *past)]
        arguments += [*self.params.values(), *(f"{g}.to(tl.float32)" for g in self.gys)]
        arguments += [*self.gvs, *self.grads]
        results = [*self.gxs, *self.gvs, *self.grads]
        gx, gy = self.gxs[0], self.gys[0]
        step = [
            f"{gy} = {gy}.to(tl.float32) + total",
            f"{', '.join(results)} = reverse({', '.join(arguments)})",
            *_spread(results),
            *(f"tl.store({s}_ptr + t * size + at, {s}, mask=live)" for s in self.gxs),
            *self.send(gx, gx),
        ]
        after = []
        for v, g in zip(self.vs, self.gvs, strict=True):
            after += [
                f"if {v}_gstart is not None:",
                f"    tl.store({v}_gstart + at, {g}, mask=live)",
            ]
        for g in self.grads:
            total = f"tl.sum(tl.where(live, {g}, 0.0), axis=0)"
            after.append(f"tl.store({g}_ptr + tile * N + neuron, {total}, mask=inside)")
        return self.sweep("backward", (read, self.gxs), pointers, (before, step, after))


def _spread(names: Sequence[str]) -> list[str]:
    """Give values the shape of a block; a result may depend on parameters only."""
    return [f"{name} = tl.broadcast_to({name}, [BLOCK_B, BLOCK_N])" for name in names]


def _load_or_fill(name: str, pointer: str, value: float) -> list[str]:
    """Load a value per neuron, or use a constant where the pointer is None."""
    return [
        f"if {pointer} is not None:",
        f"    {name} = tl.load({pointer} + at, mask=live, other=0.0)",
        "else:",
        f"    {name} = tl.full([BLOCK_B, BLOCK_N], {value!r}, tl.float32)",
    ]
