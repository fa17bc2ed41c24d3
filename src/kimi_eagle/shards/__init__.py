"""The hidden-state store: one safetensors file and one small Parquet index a unit (FORMAT.md).

`layout.py` and `index.py` say what the bytes mean, `codecs.py` encodes states, `writer.py` makes
shards, `reader.py` maps one, `store.py` many. No torch at import.
"""

from __future__ import annotations

from kimi_eagle.shards.reader import Fault, Shard
from kimi_eagle.shards.store import ShardSet
from kimi_eagle.shards.writer import ShardWriter

__all__ = ["Fault", "Shard", "ShardSet", "ShardWriter"]
