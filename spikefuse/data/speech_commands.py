"""Google Speech Commands: 105,829 recordings of 35 spoken words.

Warden, "Speech Commands: A Dataset for Limited-Vocabulary Speech Recognition", arXiv:1804.03209,
2018, in version 0.02.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spikefuse.data.files import DataError, class_files, damaged, find_folder, read_bytes
from spikefuse.data.recordings import RecordingSet
from spikefuse.data.sound import NUM_MELS, read_wav

PAGE = "http://download.tensorflow.org/data/speech_commands_v0.02.tar.gz"
LISTS, LIST_BYTES = ("validation_list.txt", "testing_list.txt"), 1 << 24
SIZE = (NUM_MELS,)
CLASSES = (
    *("backward", "bed", "bird", "cat", "dog", "down", "eight", "five", "follow", "forward"),
    *("four", "go", "happy", "house", "learn", "left", "marvin", "nine", "no", "off", "on", "one"),
    *("right", "seven", "sheila", "six", "stop", "three", "tree", "two", "up", "visual", "wow"),
    *("yes", "zero"),
)


def find_speech_commands(directory: Path) -> tuple[RecordingSet, ...]:
    """Find the recordings for training, validation and test in one folder of .wav files per word.

    The two lists name those for validation and for the test. Background noise is not used.

    Args:
        directory: contains the folders and lists, or a folder speech_commands or
            speech_commands_v0.02 with them.
    """
    folder = find_folder("speech_commands", LISTS, directory, PAGE, "speech_commands_v0.02")
    how = f"get the dataset from {PAGE} and unpack it there"
    files = class_files(folder, CLASSES, {".wav"}, how)
    rows = {f"{file.parent.name}/{file.name}": row for row, file in enumerate(files.paths)}
    parts = np.zeros(len(files.paths), np.int64)  # 0 for training, then the number of the list
    for part, name in enumerate(LISTS, 1):
        path = folder / name
        lines = read_bytes(path, LIST_BYTES).decode(errors="replace").splitlines()
        for number, line in enumerate(lines, 1):
            row = rows.get(line.strip())
            if row is None:
                raise damaged(path, f"line {number}: expected word/file of a file in {folder}")
            if parts[row]:
                raise damaged(path, f"line {number}: {line.strip()} is listed twice")
            parts[row] = part
        if not (parts == part).any():
            raise damaged(path, "it lists no recording")
    if parts.all():
        raise DataError(
            f"speech_commands: {' and '.join(LISTS)} in {folder} list all recordings: {how}"
        )
    return tuple(
        RecordingSet.of_files(SIZE, files.rows(parts == part), read_wav)
        for part in range(len(LISTS) + 1)
    )
