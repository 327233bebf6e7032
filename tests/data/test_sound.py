"""Log-mel spectrograms and WAV files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from spikefuse import data
from spikefuse.data.sound import Sound, log_mel, read_wav
from tests.data.writing import wav_bytes

NOISE = np.random.default_rng(0).normal(0, 3000, 16_000).astype(np.int16)


def mel(f: np.ndarray | float) -> np.ndarray:
    return 2595 * np.log10(1 + np.asarray(f) / 700)


def spectrum(samples: np.ndarray, start: int, num_mels: int) -> np.ndarray:
    """One frame in float64, term by term."""
    n, k = np.arange(400), np.arange(257)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * n / 400)
    frame = np.zeros(400)
    part = samples[start : start + 400]
    frame[: len(part)] = part
    x = np.exp(-2j * np.pi * np.outer(k, n) / 512) @ (window * frame)
    corners = 700 * (10 ** (np.linspace(mel(20), mel(8000), num_mels + 2) / 2595) - 1)
    bands = [np.interp(k * 31.25, corners[m : m + 3], [0, 1, 0]) for m in range(num_mels)]
    energy = np.array(bands) @ (np.abs(x) ** 2) / (window.sum() / 2) ** 2
    return 10 * np.log10(np.maximum(energy, 1e-10))


@pytest.mark.parametrize(("num_mels", "dt"), [(40, 10_000), (20, 14_030)])
def test_log_mel_equals_its_definition(num_mels: int, dt: int) -> None:
    samples = NOISE / 2**15
    ours = log_mel(torch.from_numpy(samples), 80, dt, num_mels)
    assert ours.shape == (80, num_mels)
    assert ours.dtype == torch.float32
    for step in (0, 1, 7, 70, 79):  # the last is silent for 14 ms, as are others before the end
        expected = spectrum(samples, step * dt * 16 // 1000, num_mels)
        np.testing.assert_allclose(ours[step].numpy(), expected, atol=1e-3)


def test_silence_loudness_and_length() -> None:
    silent = log_mel(torch.zeros(16_000), 3)
    assert (silent == -100).all()
    tone = torch.sin(2 * torch.pi * 1000 * torch.arange(8000) / 16_000)
    levels = log_mel(tone, 100)
    middle = 700 * (10 ** (np.linspace(mel(20), mel(8000), 42)[1:-1] / 2595) - 1)
    assert (levels[:40].argmax(1) == np.abs(middle - 1000).argmin()).all()
    assert (levels[:40].amax(1).abs() < 3).all()
    assert (levels[50:] == -100).all()  # from half a second on
    assert torch.equal(log_mel(tone, 20), levels[:20])


def test_levels() -> None:
    sound = Sound(NOISE)
    decibels = log_mel(torch.from_numpy(NOISE / 2**15), 100)
    for bits in (1, 4, 8):
        steps = sound.levels(100, 10_000, bits) / (2**bits - 1)
        assert np.abs(100 * steps - 100 - decibels.numpy()).max() <= 50 / (2**bits - 1) + 1e-3
    loud = np.resize(np.array([32767, 32767, -32768, -32768], np.int16), 16_000)
    assert Sound(loud).levels(1, 10_000, 8).max() == 255
    assert not Sound(np.zeros(16_000, np.int16)).levels(2, 10_000, 8).any()
    cut = data.Slicing("duration", 50, dt=20_000)
    np.testing.assert_array_equal(data.to_frames(sound, cut), sound.levels(50, 20_000, 8))
    for by in ("number", "time"):
        with pytest.raises(data.DataError, match=f"by is '{by}', but sounds have no events"):
            data.to_frames(sound, data.Slicing(by, 50))


@pytest.mark.parametrize(
    ("dtype", "scale", "zero"),
    [
        *((kind, 1.0, 0.0) for kind in ("float16", "float32", "float64", ">f4")),
        *(("int16", 2**15, 0), (">i2", 2**15, 0), ("int32", 2**31, 0), ("uint8", 2**7, 2**7)),
    ],
)
def test_samples_of_each_type_have_the_same_scale(dtype: str, scale: float, zero: float) -> None:
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    sound = Sound((tone * scale + zero).astype(dtype))
    decibels = 100 * sound.levels(98, 10_000, 8).astype(float) / 255 - 100
    assert decibels.max(1) == pytest.approx(-6.0 * np.ones(98), abs=0.5)
    silence = Sound(np.full(16_000, zero, dtype))
    assert not silence.levels(98, 10_000, 8).any()


@pytest.mark.parametrize(
    ("samples", "what"),
    [
        (np.zeros(9, np.int64), r"samples are int64 \[9\]: expected one channel, .*uint8, int16"),
        (np.zeros(9, np.uint16), r"samples are uint16 \[9\]"),
        (np.zeros(9, bool), r"samples are bool \[9\]"),
        (np.zeros((2, 9), np.int16), r"samples are int16 \[2, 9\]: expected one channel"),
        (NOISE.astype(np.float32), r"samples are up to \d+: expected floating point from -1 to 1"),
        (np.array([0.0, np.nan]), r"samples are up to nan: expected"),
    ],
)
def test_other_samples_are_refused(samples: np.ndarray, what: str) -> None:
    with pytest.raises(data.DataError, match=what):
        Sound(samples)


def test_reads_its_samples(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    for samples in (NOISE, NOISE[:1], NOISE[:777]):
        for others in (b"", b"LIST" + (6).to_bytes(4, "little") + b"abcdef"):
            path.write_bytes(wav_bytes(samples, others=others))
            np.testing.assert_array_equal(read_wav(path).samples, samples)


GOOD = wav_bytes(NOISE[:100])


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (wav_bytes(NOISE, rate=44_100), "1 channels of 16 bits at 44100 Hz: expected 1 of 16"),
        (wav_bytes(NOISE, channels=2), "2 channels of 16 bits at 16000 Hz: expected 1 of 16"),
        (wav_bytes(NOISE, bits=8), "1 channels of 8 bits at 16000 Hz: expected 1 of 16 bits"),
        (wav_bytes(NOISE, bits=32), "1 channels of 32 bits at 16000 Hz: expected 1 of 16 bits"),
        (wav_bytes(NOISE, form=3), r"is damaged \(not a WAV file of PCM: unknown format: 3"),
        (wav_bytes(np.resize(NOISE, 16_001)), "16001 samples: expected 1 to 16000, one second"),
        (wav_bytes(NOISE[:0]), "0 samples: expected 1 to 16000"),
        (GOOD[:-1], r"is damaged \(it ends after 99 of 100 samples"),
        (GOOD[:44], r"is damaged \(it ends after 0 of 100 samples"),
        (GOOD[:40], r"is damaged \(not a WAV file of PCM"),
        (b"", r"is damaged \(not a WAV file of PCM: wrong chunks"),
        (b"fLaC" + GOOD[4:], r"is damaged \(not a WAV file of PCM: file does not start with RIFF"),
        (GOOD[:16] + b"\xff\xff\xff\x7f" + GOOD[20:], r"is damaged .*PCM"),
        (GOOD[:40] + b"\xff\xff\xff\x7f" + GOOD[44:], "1073741823 samples: expected 1 to 16000"),
    ],
)
def test_other_and_damaged_files_are_named(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    with pytest.raises(data.DataError, match=rf"a\.wav .*{what}"):
        read_wav(path)


def test_missing_and_huge_files(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"cannot read .*none\.wav"):
        read_wav(tmp_path / "none.wav")
    with (tmp_path / "huge.wav").open("wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(data.DataError, match=r"huge\.wav is damaged .*more than 16777216 bytes"):
        read_wav(tmp_path / "huge.wav")


def test_one_channel_is_expected() -> None:
    with pytest.raises(ValueError, match=r"samples have shape \[2, 100\]: expected one channel"):
        log_mel(torch.zeros(2, 100), 4)
    with pytest.raises(TypeError, match="samples are float64: expected a tensor"):
        log_mel(np.zeros(100), 4)
