"""What a run was made from, and making it again.

`runlock.py` writes RUN/run.lock.json from what `made_from.py` (inputs) and `stage_facts.py` (keys,
results, machines) find; `shape.py` says what a reader may rely on. `checking.py` compares a lock
with what is here, `reproduce.py` makes the run again, `rundiff.py` puts two runs side by side.
"""
