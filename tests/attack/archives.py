"""Zip archives that lie: other names, sizes, checksums and contents, and several in one file."""

from __future__ import annotations

import bz2
import io
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from tests.data.readers import mutated

SIZES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1)
LONG = b"\x8a\x05\0\0\0\0\1"  # 4 Gi
#: Pickles that PyTorch reads, and that allocate 4 GiB where they are let to.
CLAIMS = (
    b"\x80\x02cbuiltins\nbytearray\n" + LONG + b"\x85R.",
    b"\x80\x02ctorch\nTensor\n" + LONG + b"\x85R.",
    b"\x80\x02ctorch\nTensor\n" + LONG + b"\x85\x81.",
)


def deflated(content: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(content) + packer.flush()


@dataclass
class Entry:
    """An entry, and what replaces its checksum and sizes in the local and the central header."""

    name: bytes
    content: bytes
    method: int = 0
    local: dict[str, int] = field(default_factory=dict)
    central: dict[str, int] = field(default_factory=dict)

    def pack(self, offset: int) -> tuple[bytes, bytes]:
        """Return the entry, and its row in the directory."""
        content = {0: bytes, 8: deflated, 12: bz2.compress}[self.method](self.content)
        true = {"crc": zlib.crc32(self.content), "packed": len(content), "size": len(self.content)}
        headers = []
        for changes in (self.local, self.central):
            values = {**true, **changes}.values()
            fields = 20, 0, self.method, 0, 33, *values, len(self.name), 0
            headers.append(struct.pack("<5H3L2H", *fields))
        row = headers[1] + struct.pack("<3H2L", 0, 0, 0, 0, offset)
        return (
            b"PK\3\4" + headers[0] + self.name + content,
            b"PK\1\2\x14\0" + row + self.name,
        )


def packed(entries: list[Entry]) -> bytes:
    content, rows = b"", b""
    for entry in entries:
        part, row = entry.pack(len(content))
        content, rows = content + part, rows + row
    count = len(entries)
    return content + rows + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(rows),
                                        len(content), 0)  # fmt: skip


def unpacked(content: bytes) -> list[Entry]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [Entry(e.filename.encode(), archive.read(e)) for e in archive.infolist()]


def legacy(rng: random.Random) -> bytes:
    """Return what PyTorch reads before it looks for an archive."""
    file = io.BytesIO()
    torch.save({"w": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
    return rng.choice((*CLAIMS, file.getvalue(), pickle.dumps({}), rng.randbytes(9)))


def renamed(entries: list[Entry], rng: random.Random) -> bool:
    entry = rng.choice(entries)
    root, _, rest = entry.name.partition(b"/")
    forms = (b"%s/%s" % (root, rest.swapcase()), b"%s/%s" % (root.upper() + b"X", rest))
    forms += (b"%s/x/%s" % (root, rest), b"../" + entry.name, b"/" + entry.name, rest)
    forms += (b"%s//%s" % (root, rest), b"%s/./%s" % (root, rest), b"%s\\%s" % (root, rest))
    forms += (entry.name + b"/", entry.name + b"\xff", b"\0" + entry.name)
    entry.name = rng.choice([form for form in forms if form != entry.name])
    return True


def doubled(entries: list[Entry], rng: random.Random) -> bool:
    entry = rng.choice(entries)
    other = rng.choice((entry.content, rng.choice(CLAIMS), b""))
    entries.insert(rng.randint(0, len(entries)), replace(entry, content=other))
    return True


def compressed(entries: list[Entry], rng: random.Random) -> bool:
    chosen = rng.choice(entries)
    chosen.method, chosen.content = rng.choice((8, 12)), chosen.content + bytes(1 << 20)
    return True


def claiming(entries: list[Entry], rng: random.Random) -> bool:
    entry = next((e for e in entries if e.name.lower().endswith(b"data.pkl")), entries[0])
    entry.content = rng.choice(CLAIMS)
    return True


def other_sizes(entries: list[Entry], rng: random.Random) -> bool:
    entry = rng.choice(entries)
    header = rng.choice((entry.local, entry.central))
    for name in rng.choice((["size"], ["packed"], ["size", "packed"])):
        header[name] = rng.choice((*SIZES, len(entry.content) + 1, max(len(entry.content) - 1, 0)))
    return False  # where both readers ignore it


def other_checksum(entries: list[Entry], rng: random.Random) -> bool:
    entry = rng.choice(entries)
    entry.central["crc"] = zlib.crc32(entry.content) ^ 1 << rng.randrange(32)
    return True


def left_out(entries: list[Entry], rng: random.Random) -> bool:
    entries.remove(rng.choice(entries))
    return False


def added(entries: list[Entry], rng: random.Random) -> bool:
    root = entries[0].name.partition(b"/")[0]
    name = rng.choice((b"data/999", b"code/a.py", b"constants.pkl", b"data.pkl.x", b"x"))
    entries.append(Entry(root + b"/" + name, rng.choice(CLAIMS)))
    return name != b"data/999"


def other_order(entries: list[Entry], rng: random.Random) -> bool:
    rng.shuffle(entries)
    return False


#: Each changes the entries, and returns whether nobody may read the result. Later ones undo none.
CHANGES: tuple[Callable[[list[Entry], random.Random], bool], ...] = (
    *(left_out, renamed, doubled, compressed, claiming, added),
    *(other_sizes, other_checksum, other_order),
)


def restructured(good: bytes, rng: random.Random) -> tuple[bytes, bool, bool]:
    """Return another archive, whether it must be refused, and whether its content is the same."""
    entries, refused, same = unpacked(good), False, True
    chosen = rng.sample(CHANGES, rng.choice((1, 1, 2)))
    for change in sorted(chosen, key=CHANGES.index):
        refused |= change(entries, rng)
    if rng.random() < 0.2:  # with the right checksum
        entry = rng.choice(entries)
        entry.content, same = mutated(entry.content or b"0", rng), False
    content = packed(entries)
    form = rng.random()
    if form < 0.1:
        return rng.choice((legacy(rng), good)) + content, True, same
    if form < 0.2:
        return content + rng.choice((b"\0", good, packed(entries[:1]))), True, same
    return content, refused, same
