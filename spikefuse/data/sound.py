"""Sounds, and their log-mel spectrograms.

Shape legend: N samples, T time steps, M mel bands.
"""

from __future__ import annotations

import functools
import io
import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spikefuse.data.files import DataError, damaged, read_bytes

RATE = 16_000
NUM_MELS = 40
WINDOW, FFT = 400, 512  # samples: 25 ms, and the next power of two
LOWEST = 20.0  # Hz: below it, microphones record no speech
FLOOR = -100.0  # decibels, near the rounding of 16-bit samples
# Zero and full scale of samples by type, as in WAV files; readers return 24-bit samples as int32.
SCALES = {"uint8": (2**7, 2**7), "int16": (0, 2**15), "int32": (0, 2**31)}
MAX_BYTES = 1 << 24  # of a file; those of the dataset have 32,044 at most


@dataclass(frozen=True)
class Sound:
    """A recording of one microphone.

    Example::

        import numpy as np

        sound = sf.data.Sound(np.zeros(16_000, np.int16))  # a second of silence
        levels = sound.levels(num_steps=100, dt=10_000, bits=8)  # [100, 40]

    Args:
        samples: `[N]`, at 16 kHz: floating point from -1 to 1, or int16, int32 or uint8 over their
            range, with 128 as the zero of uint8.

    Raises:
        DataError: the samples have another type or shape, or a size of 2 or more.
    """

    samples: np.ndarray

    def __post_init__(self) -> None:
        samples = np.asarray(self.samples)
        object.__setattr__(self, "samples", samples)
        is_float = samples.dtype.kind == "f"
        if samples.ndim != 1 or not (is_float or samples.dtype.name in SCALES):
            raise DataError(
                f"samples are {samples.dtype} {list(samples.shape)}: expected one channel, [N], of "
                f"floating point from -1 to 1, or of {', '.join(SCALES)}"
            )
        largest = np.abs(samples).max(initial=0) if is_float else 0
        if not largest < 2:  # sounds that were filtered may exceed 1
            raise DataError(
                f"samples are up to {largest:g}: expected floating point from -1 to 1, such as "
                "those of int16, divided by 2**15"
            )

    def levels(self, num_steps: int, dt: int, bits: int) -> np.ndarray:
        """Return the log-mel spectrogram in steps of equal size, uint8 `[T, M]`.

        -100 dB and less are 0, 0 dB and more are `2**bits - 1`. With 8 bits, a step is 0.4 dB.

        Args:
            num_steps, dt: as in `log_mel`.
            bits: bits per value.
        """
        zero, full = SCALES.get(self.samples.dtype.name, (0, 1))
        samples = (self.samples.astype(np.float32) - zero) / full
        decibels = log_mel(torch.from_numpy(samples), num_steps, dt)
        share = (1 - decibels / FLOOR).clamp(0, 1)
        return (share * (2**bits - 1)).round().to(torch.uint8).numpy()


def log_mel(samples: Tensor, num_steps: int, dt: int = 10_000, num_mels: int = NUM_MELS) -> Tensor:
    r"""Compute a log-mel spectrogram, in decibels.

    With the Hann window w of 400 samples (25 ms), and the first sample h_t of frame t,

        X[t, k] = Σ_n w[n] x[h_t + n] exp(-2πi k n / 512)
        L[t, m] = 10 log10(Σ_k F[m, k] |X[t, k]|² / (Σ_n w[n] / 2)²), at least -100.

    F are triangles of height 1, whose corners are equally spaced on the mel scale
    2595 log10(1 + f / 700) from 20 Hz to 8 kHz. A sine of amplitude 1 thus has about 0 dB in
    the band at its frequency. Samples after the end are 0.

    Example::

        decibels = sf.data.log_mel(torch.rand(16_000) - 0.5, num_steps=100)  # [100, 40]

    Sources: Davis and Mermelstein, "Comparison of Parametric Representations for Monosyllabic Word
    Recognition in Continuously Spoken Sentences", IEEE TASSP 28(4), 1980, for the bands;
    O'Shaughnessy, "Speech Communication: Human and Machine", 1987, for the scale.

    Args:
        samples: floating point `[N]`, from -1 to 1, at 16 kHz.
        num_steps: T; later frames are dropped.
        dt: microseconds from one frame to the next.
        num_mels: M.

    Returns:
        Decibels, float32 `[T, M]`.

    Raises:
        TypeError: the samples are not floating-point numbers.
        ValueError: the samples are not `[N]`, a number is less than 1, or so many bands that some
            are empty.
    """
    if not isinstance(samples, Tensor) or not samples.is_floating_point():
        kind = getattr(samples, "dtype", type(samples).__name__)
        raise TypeError(f"samples are {kind}: expected a tensor of floating point, from -1 to 1")
    if samples.ndim != 1:
        raise ValueError(f"samples have shape {list(samples.shape)}: expected one channel, [N]")
    if min(num_steps, dt, num_mels) < 1:
        raise ValueError(
            f"num_steps is {num_steps}, dt {dt}, num_mels {num_mels}: expected at least 1"
        )
    starts = torch.arange(num_steps) * dt * RATE // 10**6
    end = int(starts[-1]) + WINDOW
    padded = torch.nn.functional.pad(samples.float()[:end], (0, max(0, end - len(samples))))
    frames = padded[starts.unsqueeze(1) + torch.arange(WINDOW)]
    window = torch.hann_window(WINDOW)
    power = torch.fft.rfft(frames * window, FFT).abs().square() / (window.sum() / 2) ** 2
    return 10 * (power @ _triangles(num_mels)).clamp(min=10 ** (FLOOR / 10)).log10()


@functools.cache
@torch.inference_mode(False)  # for callers of any mode
def _triangles(num_mels: int) -> Tensor:
    """Return the bands F as `[FFT / 2 + 1, M]`."""
    ends = 2595 * torch.log10(1 + torch.tensor([LOWEST, RATE / 2], dtype=torch.float64) / 700)
    mels = torch.linspace(float(ends[0]), float(ends[1]), num_mels + 2, dtype=torch.float64)
    corners = 700 * (10 ** (mels / 2595) - 1)
    f = torch.arange(FFT // 2 + 1, dtype=torch.float64).unsqueeze(1) * RATE / FFT
    rise = (f - corners[:-2]) / (corners[1:-1] - corners[:-2])
    fall = (corners[2:] - f) / (corners[2:] - corners[1:-1])
    bands = torch.minimum(rise, fall).clamp(min=0).float()
    if not bands.any(0).all():
        raise ValueError(f"num_mels is {num_mels}: some bands lie between two frequencies")
    return bands


def read_wav(path: Path) -> Sound:
    """Read a WAV file of at most one second: 16 kHz, one channel, 16-bit PCM."""
    content = read_bytes(path, MAX_BYTES)
    try:
        with wave.open(io.BytesIO(content)) as file:
            form = file.getnchannels(), 8 * file.getsampwidth(), file.getframerate()
            count = file.getnframes()
            data = file.readframes(count) if count <= RATE else b""
    except Exception as error:  # RuntimeError among others
        raise damaged(path, f"not a WAV file of PCM: {str(error) or 'wrong chunks'}") from error
    if form != (1, 16, RATE):
        raise DataError(
            f"{path} has {form[0]} channels of {form[1]} bits at {form[2]} Hz: expected 1 of 16 "
            f"bits at {RATE} Hz; convert the file"
        )
    if not 0 < count <= RATE:
        raise DataError(f"{path} has {count} samples: expected 1 to {RATE}, one second; cut it")
    if len(data) != 2 * count:
        raise damaged(path, f"it ends after {len(data) // 2} of {count} samples")
    return Sound(np.frombuffer(data, np.int16).copy())
