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
                resident = resident + ({weight},)
    if REGISTERS:
        sent = tl.load(start_ptr + at, mask=live, other=0.0).to(tl.float32)
    else:
        previous = start_ptr
"""

# Tensor cores multiply bfloat16 and add in float32. Other values are sums of bfloat16 pieces: a
# float32 of three, exactly.
MULTIPLY = """\
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
pieces = ()
for p in tl.static_range(PIECES):
    piece = rest.to(tl.bfloat16)
    rest = rest - piece.to(tl.float32)
    pieces = pieces + (piece,)
for j in tl.static_range(WEIGHTS):
    tile_of_weights = {weight}
    for p in tl.static_range(PIECES):
        if p + j < PIECES or p + j < WEIGHTS:
            total = multiply(pieces[p], tile_of_weights, total)
"""

# Passes a stored value on to the next product. After a barrier, other programs read it through the
# L2 cache.
SEND = """\
if REGISTERS:
    # Lanes without a neuron may hold NaN, such as 0 / 0, which a product with 0 would spread.
    sent = tl.where(live, {s}, 0.0).to({s}_ptr.dtype.element_ty).to(tl.float32)
else:
    previous = {s}_ptr + t * size
    tl.debug_barrier()
    if BLOCKS > 1:
        tl.atomic_add(counter_ptr + task, 1, sem="release")
        while tl.atomic_add(counter_ptr + task, 0, sem="acquire") < (count + 1) * BLOCKS:
            pass
"""


class RecurrentTritonEmitter(emit_triton.TritonEmitter):
    """A scan with feedback.

    `forward` adds the product of the weights with the first output of the previous step to the
    first input. `backward` adds the product of the transposed weights with the gradient of the
    first input of the next step to the gradient of the first output. It reads the states before
    each step. A channel is a neuron.
    """

    title = "recurrent {}, forward and backward over all time steps"
    shape, offset = "[BLOCK_B, BLOCK_N]", "at"
    channel_value = "tl.load({}_ptr + neuron, mask=inside, other=0.0).to(tl.float32)[None, :]"

    def functions(self) -> dict[str, Graph]:
        return {"step": self.step.graph, "reverse": self.reverse}

    def kernel(
        self, name: str, sequences: Sequence[str], pointers: Sequence[str], body: Sequence[str]
    ) -> list[str]:
        """Emit a kernel that reads sequences, where `body` is for a tile of samples and neurons."""
        units = [*(f"{s}_{kind}" for s in sequences for kind in ("time", "outer")), "N", "width"]
        integers = [*(f"{i}: tl.int64" for i in units), "T: tl.int32", "B: tl.int32"]
        lines = [f"{i} = {i} * UNIT" for i in units]
        lines += EACH_TASK.format(weight=self.weight(name)).splitlines()
        tile = self.load_params(self.params)
        tile += [f"{s}_at = row[:, None] * {s}_outer + neuron[None, :]" for s in sequences]
        tile += self.load_ahead(sequences, "0" if name == "forward" else "T - 1", "live")
        lines += indent([*tile, *body], 1)
        pointers = ["weight_ptr", "start_ptr", *(f"{s}_ptr" for s in sequences), *pointers]
        return self.jit(name, [*pointers, "counter_ptr"], integers, CONSTANTS, lines)

    def each_step(self, name: str, sequences: Sequence[str], step: Sequence[str]) -> list[str]:
        """Emit the loop over time."""
        t, ahead = ("count", "t + 1") if name == "forward" else ("T - 1 - count", "t - 1")
        body = [
            f"t = {t}",
            *(f"{s} = ahead_{s}" for s in sequences),
            "more = (row < tl.where(count + 1 < T, B, 0))[:, None] & inside[None, :]",
            *self.load_ahead(sequences, ahead, "more"),
            *self.product(name),
            *step,
        ]
        return ["for count in tl.range(0, T, num_stages=1):", *indent(body, 1)]

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
        weights = "resident[i * WEIGHTS + j]", self.weight(name)
        resident, loaded = (MULTIPLY.format(weight=weight).splitlines() for weight in weights)
        return [
            "total = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)",
            "if RESIDENT:",
            "    for i in tl.static_range(TILES):",
            *indent(resident, 2),
            "else:",
            "    for i in tl.range(0, TILES):",
            *indent(loaded, 2),
            # Otherwise the compiler would start the sum at what the product is added to.
            "total = tl.where(live, total, 0.0)",
        ]

    def forward(self) -> list[str]:
        x = self.xs[0]
        values = [f"{s}.to(tl.float32)" for s in self.xs]
        step = [
            f"{x} = {x}.to(tl.float32) + total",
            "if current_ptr is not None:",
            f"    tl.store(current_ptr + t * size + at, {x}, mask=live)",
            self.call("step", [*self.ys, *self.vs], [*values, *self.vs]),
            *self.spread(self.vs),
            *(f"tl.store({s}_ptr + t * size + at, {s}, mask=live)" for s in self.ys),
            *SEND.format(s=self.ys[0]).splitlines(),
        ]
        body = [*self.initial_states(), *self.each_step("forward", self.xs, step)]
        body += self.each_state("tl.store({v}_final + at, {v}, mask=live)")
        pointers = [*(f"{y}_ptr" for y in self.ys), "current_ptr"]
        pointers += self.each_state("{v}_start", "{v}_final")
        return self.kernel("forward", self.xs, pointers, body)

    def backward(self) -> list[str]:
        past = [f"{v}_past" for v in self.vs]
        read = [*self.xs, *self.gys, *past]
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
            *SEND.format(s=self.gxs[0]).splitlines(),
        ]
        body = self.zeros(self.grads) + self.final_gradients()
        body += self.each_step("backward", read, step) + self.store_states("gstart", "{g}")
        for g in self.grads:
            total = f"tl.sum(tl.where(live, {g}, 0.0), axis=0)"
            body.append(f"tl.store({g}_ptr + tile * N + neuron, {total}, mask=inside)")
        pointers = [f"{g}_ptr" for g in self.gxs] + self.each_state("{v}_gfinal", "{v}_gstart")
        pointers += [f"{g}_ptr" for g in self.grads]
        return self.kernel("backward", read, pointers, body)
