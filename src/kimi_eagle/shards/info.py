"""What a shard, or many together, hold: from the indexes alone, 10,000 of them in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle.errors import RunError
from kimi_eagle.shards.codecs import ErrorReport
from kimi_eagle.shards.layout import OWN_KEYS
from kimi_eagle.shards.store import ShardSet

QUANTILES = (0, 50, 90, 99, 100)
TOKEN_BYTES = 5
"""int32 id and mask byte, which every codec stores alike."""


def describe(shards: Sequence[tuple[Path, str | None]]) -> dict[str, Any]:
    """Counts, sizes in bytes and what the states are; JSON-able.

    shards: files with the digest that each index must have, where it is known. Verifier and engine
    are those of the first shard whose header can be read: the only states file that is opened.
    """
    import json

    store = ShardSet([s for s, _ in shards], [d for _, d in shards])
    if not store.shards:
        raise RunError("no shards")
    tokens, size = int(store.lengths.sum(dtype=np.int64)), sum(s.index.bytes for s in store.shards)
    raw_a_token = len(store.layers) * store.hidden_size * 2 + TOKEN_BYTES
    stored = sum(s.tokens for s in store.shards)
    codecs: dict[str, dict[str, int]] = {}
    error = ErrorReport()
    for shard in store.shards:
        mix = codecs.setdefault(shard.codec, {"shards": 0, "tokens": 0, "bytes": 0})
        mix["shards"] += 1
        mix["tokens"] += shard.tokens
        mix["bytes"] += shard.index.bytes
        if shard.codec == "fp8":
            error.add(ErrorReport.from_sums(json.loads(shard.index.meta["error"])))
    return {
        "shards": len(store.shards),
        "samples": len(store),
        "repeated": sum(len(s) for s in store.shards) - len(store),
        "tokens": tokens,
        "bytes": size,
        "bytes_per_token": round(size / stored, 1) if stored else None,
        "share_of_raw": round(size / (stored * raw_a_token), 4) if stored else None,
        "codecs": codecs,
        "layers": list(store.layers),
        "hidden_size": store.hidden_size,
        **_made_by(store),
        "lengths": _quantiles(store.lengths),
        "fp8_error": error.layers(store.layers) if error.values.size else [],
    }


def lines(found: dict[str, Any]) -> list[str]:
    """`describe` for people."""
    mix = ", ".join(f"{k} {v['shards']:,}" for k, v in sorted(found["codecs"].items()))
    out = {
        "shards": f"{found['shards']:,}  ({mix})",
        "samples": f"{found['samples']:,}"
        + (f"  ({found['repeated']:,} more are repeated)" if found["repeated"] else ""),
        "tokens": f"{found['tokens']:,}",
        "bytes": f"{found['bytes']:,}  ({found['bytes'] / 1e9:,.2f} GB, "
        f"{_shown(found['bytes_per_token'], ',.1f')} a token, "
        f"{_shown(found['share_of_raw'], '.1%')} of raw)",
        "layers": f"{', '.join(map(str, found['layers']))}  (hidden size {found['hidden_size']:,})",
        "verifier": found["verifier_id"] or "not named",
        "engine": found["engine"] or "not named",
        "lengths": "  ".join(f"{k} {v:,}" for k, v in found["lengths"].items()) or "-",
    }
    for entry in found["fp8_error"]:
        out[f"fp8 layer {entry['layer']}"] = (
            f"SQNR {_shown(entry['sqnr_db'], '.1f')} dB, "
            f"largest error {_shown(entry['max_error'], 'g')}, "
            f"became zero {entry['zeros']:.2%}"
        )
    return [f"{name:<13} {text}" for name, text in out.items()]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _made_by(store: ShardSet) -> dict[str, Any]:
    for shard in store.shards[:10]:
        try:
            meta = shard.meta
        except RunError:  # an index may be there without its states, as after `clean --hidden`
            continue
        return {
            "verifier_id": meta.get("verifier_id", ""),
            "engine": meta.get("engine", ""),
            "more": {
                k: v for k, v in meta.items() if k not in (*OWN_KEYS, "verifier_id", "engine")
            },
        }
    return {"verifier_id": "", "engine": "", "more": {}}


def _quantiles(lengths: np.ndarray) -> dict[str, int]:
    if not len(lengths):
        return {}
    values = np.percentile(lengths, QUANTILES, method="nearest").astype(int)
    names = ("min", "p50", "p90", "p99", "max")
    return dict(zip(names, values.tolist(), strict=True))
