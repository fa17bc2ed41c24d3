"""From bfloat16 states to the bytes of a shard and back: raw, lossless, fp8.

Pure functions on arrays; nothing is read or written. numpy, zstd and torch release the GIL here,
so threads encode and decode side by side.

lossless: the high byte of each bfloat16 (sign and most of the exponent) carries some 3.3 bits of
information, the low byte (mantissa) all 8. So the two byte planes are taken apart, the low one is
kept as it is and the high one is compressed by zstd (level 1; higher levels look for repetitions
that are not there and came out larger). libzstd comes with pyarrow. Beside it, measured by
tests/bench/bench_store_write.py: blosc2's shuffle + zstd has the same idea, but hands both planes
to zstd and takes twice the time; zipnn is a little slower than this with all its checks, and needs
torch and a format of its own, for 0.0005 of the size.

fp8: e4m3 with a float32 scale for each token and layer, so that one layer's outliers (values reach
25,000 in SmolLM2) or one token's do not cost the others their precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from kimi_eagle.shards.layout import digest64

ZSTD_LEVEL = 1
PIECE = 1 << 20
"""Values in one zstd frame: both planes of a piece stay in a core's cache."""
CHECK = 1 << 17
"""Values looked at together by `finite`, for the same reason."""

TOKENS = 64
"""Tokens that fp8 works on together: float32 copies of a long sample would take gigabytes."""

BF16_INFINITY = np.uint16(0x7F80)
"""Exponent bits of bfloat16; all of them set means inf or NaN."""
E4M3_MAX = 448.0
"""Largest finite e4m3 value (OCP 8-bit floating point, 2023, table 1)."""


@dataclass(frozen=True)
class Encoded:
    """One sample as it is stored. parts: the bytes of its states, in file order; scales (fp8):
    float32 [T, L]. xxh3 and stored_xxh3: see FORMAT.md; the latter is lossless's alone."""

    parts: list[Any]
    xxh3: str
    stored_xxh3: str = ""
    scales: np.ndarray | None = None
    error: ErrorReport | None = None

    @property
    def n_bytes(self) -> int:
        return sum(memoryview(p).nbytes for p in self.parts)


def encode(codec: str, bits: np.ndarray, token_ids: np.ndarray, mask: np.ndarray) -> Encoded:
    """bits uint16 [T, L, H], token_ids int32 [T], mask uint8 [T]; all contiguous and finite."""
    if codec == "raw":
        return Encoded([bits], digest64([bits, token_ids, mask]))
    if codec == "lossless":
        block = compress(bits)
        return Encoded(
            block,
            xxh3=digest64([bits, token_ids, mask]),
            stored_xxh3=digest64([*block, token_ids, mask]),
        )
    values, scales, error = quantise(bits)
    return Encoded(
        [values], digest64([values, scales, token_ids, mask]), scales=scales, error=error
    )


def finite(bits: np.ndarray) -> bool:
    """No inf and no NaN among bfloat16 bits (uint16, any shape, contiguous)."""
    values = bits.reshape(-1)
    room = np.empty(min(CHECK, values.size), np.uint16)
    for start in range(0, values.size, CHECK):
        piece = values[start : start + CHECK]
        exponents = np.bitwise_and(piece, BF16_INFINITY, out=room[: piece.size])
        if exponents.max() == BF16_INFINITY:
            return False
    return True


def compress(bits: np.ndarray) -> list[Any]:
    """Low bytes of all values (uint8 array), then zstd frames of the high bytes."""
    import pyarrow as pa

    zstd = pa.Codec("zstd", compression_level=ZSTD_LEVEL)
    values = bits.reshape(-1)
    low = np.empty(values.size, np.uint8)
    high = np.empty(min(PIECE, values.size), np.uint8)
    room = np.empty(min(PIECE, values.size), np.uint16)
    frames = []
    for start in range(0, values.size, PIECE):
        piece = values[start : start + PIECE]
        low[start : start + PIECE] = piece  # the cast keeps the low byte
        high[: piece.size] = np.right_shift(piece, 8, out=room[: piece.size])
        # As bytes: the memoryview of a pyarrow 26.0 buffer is as long as its capacity.
        frames.append(zstd.compress(high[: piece.size], asbytes=True))
    return [low, *frames]


def decompress(block: memoryview | np.ndarray, count: int) -> np.ndarray:
    """uint16 [count] from what `compress` gave, end to end. ValueError for other bytes."""
    import pyarrow as pa

    stored = np.frombuffer(block, np.uint8)
    bits = np.empty(count, np.uint16)
    if count == 0:
        return bits
    try:
        # One-shot zstd takes frames end to end.
        high = pa.Codec("zstd").decompress(memoryview(stored[count:]), decompressed_size=count)
    except (OSError, pa.ArrowException) as e:
        raise ValueError(f"zstd: {e}") from None
    plane = np.frombuffer(high, np.uint8)
    if plane.size != count:
        raise ValueError(f"{plane.size} high bytes, expected {count}")
    for start in range(0, count, CHECK):
        piece = bits[start : start + CHECK]
        piece[:] = plane[start : start + CHECK]
        np.left_shift(piece, 8, out=piece)
        np.bitwise_or(piece, stored[start : start + piece.size], out=piece)
    return bits


def quantise(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray, ErrorReport]:
    """e4m3 uint8 [T, L, H], scales float32 [T, L], and what was lost.

    Needs torch (its e4m3 rounds to nearest, ties to even); the scale is the largest magnitude of
    the token's layer / 448, so that nothing overflows.
    """
    import torch

    stored = np.empty(bits.shape, np.uint8)
    scales = np.empty(bits.shape[:2], np.float32)
    error = ErrorReport()
    least = torch.finfo(torch.float32).tiny * E4M3_MAX
    for t in range(0, len(bits), TOKENS):
        part = slice(t, t + TOKENS)
        values = torch.from_numpy(_float32(bits[part]))
        scale = values.abs().amax(-1).clamp(min=least) / E4M3_MAX
        e4m3 = (values / scale[..., None]).to(torch.float8_e4m3fn)
        stored[part], scales[part] = e4m3.view(torch.uint8).numpy(), scale.numpy()
        back = torch.from_numpy(_float32(dequantise(stored[part], scales[part])))
        error.add(ErrorReport.of(values, back))
    return stored, scales, error


def _float32(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits as the float32 values that they stand for."""
    values = bits.astype(np.uint32)
    values <<= np.uint32(16)
    return values.view(np.float32)


def dequantise(stored: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint16 [T, L, H] bfloat16 bits of stored * scale, rounded to nearest, ties to even."""
    out = np.empty(stored.shape, np.uint16)
    table = _e4m3()
    for t in range(0, len(stored), TOKENS):
        values = table[stored[t : t + TOKENS]]
        values *= scales[t : t + TOKENS, :, None]
        word = values.view(np.uint32)
        word += ((word >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
        np.right_shift(word, np.uint32(16), out=out[t : t + TOKENS], casting="unsafe")
    return out


def finite_fp8(stored: np.ndarray, scales: np.ndarray) -> bool:
    """No inf and no NaN would come out of `dequantise`, found without decoding."""
    # e4m3 has no inf; its two NaNs are the bytes with all bits set below the sign.
    if stored.size and int((stored & np.uint8(0x7F)).max()) == 0x7F:
        return False
    largest = np.full((len(scales), scales.shape[1], 1), 0x7E, np.uint8)
    return bool(np.isfinite(scales).all()) and finite(dequantise(largest, scales))


@cache
def _e4m3() -> np.ndarray:
    """float32 [256]: the value of every e4m3 byte (no infinities; 0x7F and 0xFF are NaN)."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    value[(byte & 0x7F) == 0x7F] = np.nan
    return np.where(byte & 0x80, -value, value).astype(np.float32)


@dataclass
class ErrorReport:
    """What fp8 lost, a layer: sums over values, in float64, so that reports add up."""

    signal: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Sum of squares of the states."""
    noise: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Sum of squares of the differences."""
    largest: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Largest difference, in the states' own units."""
    lost: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Values that were not 0 and became 0."""
    values: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, before: Any, after: Any) -> ErrorReport:
        """before, after: torch float32 [T, L, H]."""
        import torch

        error = before - after
        return cls(
            signal=before.square().sum((0, 2), dtype=torch.float64).numpy(),
            noise=error.square().sum((0, 2), dtype=torch.float64).numpy(),
            largest=error.abs().amax((0, 2)).double().numpy(),
            lost=((after == 0) & (before != 0)).sum((0, 2)).double().numpy(),
            values=np.full(before.shape[1], float(before.shape[0] * before.shape[2])),
        )

    def add(self, other: ErrorReport) -> None:
        """Take in the sums of other tokens."""
        if not self.values.size:
            self.__dict__.update(other.__dict__)
            return
        self.signal, self.noise = self.signal + other.signal, self.noise + other.noise
        self.largest = np.maximum(self.largest, other.largest)
        self.lost, self.values = self.lost + other.lost, self.values + other.values

    def sums(self) -> dict[str, list[float]]:
        """For the index; `from_sums` takes it back."""
        return {k: v.tolist() for k, v in self.__dict__.items()}

    @classmethod
    def from_sums(cls, sums: dict[str, Sequence[float]]) -> ErrorReport:
        return cls(**{k: np.asarray(v, np.float64) for k, v in sums.items()})

    def layers(self, ids: Sequence[int]) -> list[dict[str, float | None]]:
        """For people, one a layer: sqnr_db (signal to quantisation noise), max_error, zeros (share
        of values that became 0). None for what is no number: squares of huge values are inf."""
        noise = np.maximum(self.noise, np.finfo(np.float64).tiny)
        with np.errstate(invalid="ignore", divide="ignore"):
            sqnr = 10 * np.log10(np.maximum(self.signal, np.finfo(np.float64).tiny) / noise)
        share = self.lost / np.maximum(self.values, 1)
        return [
            {
                "layer": int(k),
                "sqnr_db": round(float(sqnr[i]), 2) if np.isfinite(sqnr[i]) else None,
                "max_error": float(self.largest[i]) if np.isfinite(self.largest[i]) else None,
                "zeros": float(share[i]),
            }
            for i, k in enumerate(ids)
        ]
