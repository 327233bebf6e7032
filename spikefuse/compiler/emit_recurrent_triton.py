"""Triton source of a recurrent scan, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

from spikefuse.compiler import emit_triton
from spikefuse.compiler.graph import Graph
from spikefuse.compiler.variables import indent

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

# Tensor cores multiply bfloat16 and add in float32. Other values are sums of bfloat16 pieces: a
# float32 of three, exactly.
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


class Emitter(emit_triton.Emitter):
    """A scan with feedback.

    `forward` adds the product of the weights with the first output of the previous step to the
    first input. `backward` adds the product of the transposed weights with the gradient of the
    first input of the next step to the gradient of the first output. It reads the states before
    each step. A channel is a neuron.
    """

    title = "recurrent {}, forward and backward over all time steps"
    shape, offset = "[BLOCK_B, BLOCK_N]", "at"
    channel_value = "tl.load({}_ptr + neuron, mask=inside, other=0.0)[None, :]"

    def functions(self) -> dict[str, Graph]:
        return {"step": self.step.graph, "reverse": self.reverse}

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
        units = [*(f"{s}_{kind}" for s in read for kind in ("time", "outer")), "N", "width"]
        integers = [*(f"{i}: tl.int64" for i in units), "T: tl.int32", "B: tl.int32"]
        arguments = ["weight_ptr", "start_ptr", *(f"{s}_ptr" for s in (*read, *written))]
        body = [f"{i} = {i} * UNIT" for i in units]
        body += [line.replace("WEIGHT,", f"{self.weight(name)},") for line in EACH_TASK]
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
        tile = self.load_params(self.params)
        tile += [f"{s}_at = row[:, None] * {s}_outer + neuron[None, :]" for s in read]
        tile += self.load_ahead(read, "T - 1" if backwards else "0", "live")
        tile += [*before, "for count in tl.range(0, T, num_stages=1):", *indent(inner, 1), *after]
        body += indent(tile, 1)
        return self.jit(name, [*arguments, *pointers, "counter_ptr"], integers, CONSTANTS, body)

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

    def send(self, sequence: str) -> list[str]:
        """Make a value, which has been stored to its sequence, that of the next product."""
        return [
            "if REGISTERS:",
            f"    sent = {sequence}.to({sequence}_ptr.dtype.element_ty).to(tl.float32)",
            "else:",
            f"    previous = {sequence}_ptr + t * size",
            *indent(WAIT, 1),
        ]

    def forward(self) -> list[str]:
        x, y = self.xs[0], self.ys[0]
        values = [f"{s}.to(tl.float32)" for s in self.xs]
        step = [
            f"{x} = {x}.to(tl.float32) + total",
            "if current_ptr is not None:",
            f"    tl.store(current_ptr + t * size + at, {x}, mask=live)",
            self.call("step", [*self.ys, *self.vs], [*values, *self.vs]),
            *self.spread(self.vs),
            *(f"tl.store({s}_ptr + t * size + at, {s}, mask=live)" for s in self.ys),
            *self.send(y),
        ]
        after = self.each_state("tl.store({v}_final + at, {v}, mask=live)")
        sequences, pointers = (
            (self.xs, [*self.ys, "current"]),
            self.each_state("{v}_start", "{v}_final"),
        )
        return self.sweep("forward", sequences, pointers, (self.initial_states(), step, after))

    def backward(self) -> list[str]:
        past = [f"{v}_past" for v in self.vs]
        before = self.zeros(self.grads) + self.final_gradients()
        arguments = [f"{s}.to(tl.float32)" for s in (*self.xs, *past)]
        arguments += [*self.params, *(f"{g}.to(tl.float32)" for g in self.gys)]
        arguments += [*self.gvs, *self.grads]
        results = [*self.gxs, *self.gvs, *self.grads]
        gy = self.gys[0]
        step = [
            f"{gy} = {gy}.to(tl.float32) + total",
            f"{', '.join(results)} = reverse({', '.join(arguments)})",
            *self.spread(results),
            *(f"tl.store({s}_ptr + t * size + at, {s}, mask=live)" for s in self.gxs),
            *self.send(self.gxs[0]),
        ]
        after = self.store_states("gstart", "{g}")
        for g in self.grads:
            total = f"tl.sum(tl.where(live, {g}, 0.0), axis=0)"
            after.append(f"tl.store({g}_ptr + tile * N + neuron, {total}, mask=inside)")
        sequences = [*self.xs, *self.gys, *past], self.gxs
        pointers = self.each_state("{v}_gfinal", "{v}_gstart") + [f"{g}_ptr" for g in self.grads]
        return self.sweep("backward", sequences, pointers, (before, step, after))
