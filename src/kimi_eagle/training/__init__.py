"""Training of the draft model: speculators' Eagle3 classes and Trainer over our shards.

draft_config.py  shape of the draft, as an Eagle3SpeculatorConfig
backend.py       the `shards` hidden-states backend and the arrow view that it reads by
patches.py       what speculators and torch need on a machine without an accelerator
checkpoints.py   checkpoints that are whole or not there
curves.py        the metrics of a run: curves.jsonl beside speculators' own TensorBoard log
loop.py          `train`: the run, put together
export.py        `export`: a checkpoint as the directory that vLLM loads

Everything here imports torch and speculators at the top: import these modules inside functions
of the stages only. This file imports nothing.
"""
