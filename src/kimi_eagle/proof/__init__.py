"""`verify`: is what was written still there, byte for byte?

`run.py` a run and its records, `shards.py` the hidden states of one unit, `files.py` all other
files, `folder.py` shards that belong to no run, `report.py` what is said of it.
"""

from __future__ import annotations

from kimi_eagle.proof.folder import holds_shards, verify_folder
from kimi_eagle.proof.report import Report
from kimi_eagle.proof.run import draft_faults, verify

__all__ = ["Report", "draft_faults", "holds_shards", "verify", "verify_folder"]
