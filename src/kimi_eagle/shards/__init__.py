"""The hidden-state store: one safetensors file and one small Parquet index a unit.

`layout.py` says what the bytes mean, `writer.py` makes them, `reader.py` maps them. No torch.
"""

from __future__ import annotations

from kimi_eagle.shards.reader import Shard, ShardSet
from kimi_eagle.shards.writer import ShardWriter

__all__ = ["Shard", "ShardSet", "ShardWriter"]
