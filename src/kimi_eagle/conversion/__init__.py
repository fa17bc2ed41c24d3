"""`shards convert`: hidden states from one kind of files into another, streamed and proven.

`opening.py` says what a path holds; `sources.py` reads our shards, `speculators_files.py` the files
of speculators 0.9, `dumps.py` those of 0.3; `to_shards.py` and `to_speculators.py` write.
"""
