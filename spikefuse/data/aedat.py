"""Read AEDAT files of jAER and cAER: version 2.0 of a DVS128, and polarity events of 3.1.

Source: iniVation, "AEDAT file formats",
https://docs.inivation.com/software/software-advanced-usage/file-formats
For the addresses of a DVS128: the extractor of jAER's class DVS128, and dvs128.c of libcaer.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from spikefuse.data.files import damaged, read_bytes
from spikefuse.data.recordings import Columns, check_memory

END = b"#!END-HEADER"
# eventType, eventSource, eventSize, eventTSOffset, eventTSOverflow, eventCapacity, eventNumber,
# eventValid
PACKET = struct.Struct("<hhiiiiii")
POLARITY = 1
# Addresses of a DVS128 in AEDAT 2.0.
EXTERNAL = 1 << 15  # marks an event of the input pin, not of a pixel
LAST = 127  # row and column


def read_aedat2(path: Path) -> Columns:
    """Read the events of a DVS128, upright, as the viewers of jAER and libcaer show them.

    A word has the polarity in bit 0, where 0 is an increase, the X address in bits 1 to 7, counted
    from the right, and Y in bits 8 to 14, counted from below. Times of 32 bits may wrap around.
    """
    content, start = _header(path, b"2.0")
    if (len(content) - start) % 8:
        raise damaged(path, f"{len(content) - start} bytes are not a multiple of 8, one event")
    words = np.frombuffer(content, ">u4", offset=start).reshape(-1, 2)
    words = words[words[:, 0] & EXTERNAL == 0]
    address, t = words[:, 0], np.unwrap(words[:, 1].astype(np.int64), period=1 << 32)
    if len(wide := address[address > EXTERNAL]):
        raise damaged(path, f"address {wide[0]:#x} does not fit a DVS128")
    return LAST - (address >> 1 & LAST), LAST - (address >> 8 & LAST), 1 - (address & 1), t


def read_aedat3(path: Path) -> Columns:
    """Read all valid polarity events of an AEDAT 3.1 file; other packets are skipped."""
    content, at = _header(path, b"3.1")
    packets: list[np.ndarray] = []
    while at < len(content):
        if at + PACKET.size > len(content):
            raise damaged(path, "it ends inside the header of a packet")
        kind, _, size, _, overflow, capacity, number, valid = PACKET.unpack_from(content, at)
        at += PACKET.size
        if size <= 0 or overflow < 0 or not 0 <= valid <= number <= capacity:
            raise damaged(path, f"invalid packet header before byte {at}")
        if kind == POLARITY and size != 8:
            raise damaged(path, f"polarity events of {size} bytes, expected 8")
        if at + size * capacity > len(content):
            raise damaged(path, "it ends inside a packet of events")
        if kind == POLARITY:
            words = np.frombuffer(content, "<u4", 2 * number, at).reshape(-1, 2).astype(np.int64)
            words = words[words[:, 0] & 1 == 1]
            if len(words) != valid:
                raise damaged(
                    path, f"a packet has {len(words)} valid events, its header says {valid}"
                )
            if (words[:, 1] >= 1 << 31).any():
                raise damaged(path, "the time of an event has 32 bits, expected 31")
            words[:, 1] |= overflow << 31
            packets.append(words)
        at += size * capacity
    words = np.concatenate(packets) if packets else np.zeros((0, 2), np.int64)
    data = words[:, 0]
    return (data >> 17) & 0x7FFF, (data >> 2) & 0x7FFF, (data >> 1) & 1, words[:, 1]


def _header(path: Path, version: bytes) -> tuple[bytes, int]:
    """Return the content of a file and the length of its header."""
    content = read_bytes(path)
    check_memory(path, len(content) // 8)
    mark = b"#!AER-DAT" + version
    if not content.startswith(mark):
        raise damaged(path, f"it does not begin with {mark.decode()}")
    at = 0
    while content[at : at + 1] == b"#":
        line_end = content.find(b"\n", at)
        if line_end < 0:
            raise damaged(path, "it ends inside its header")
        line, at = content[at:line_end], line_end + 1
        if line.startswith(END):
            break
    return content, at
