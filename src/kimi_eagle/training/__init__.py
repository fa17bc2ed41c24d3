"""Training of the draft model: speculators' Eagle3 classes and Trainer over our shards.

shape.py         shape of the draft as plain values, without transformers
draft_config.py  the same as an Eagle3SpeculatorConfig
draftkind.py     what kind of draft a config describes, and vLLM's method for it
draftfiles.py    a draft directory as it lies, without torch
start.py         a draft trained earlier as the start
dataset.py       samples straight from the shards: dataset, batch sampler and loader
tensors.py       arrays of the shards as tensors, without a copy
damage.py        samples that are not what was written: named and skipped, or the end
backend.py       the `shards` plug-in of speculators' own command line, with its arrow view
attention.py     attention of the unrolled draft on a CPU
patches.py       what torch and speculators need on a machine without an accelerator
checkpoints.py   checkpoints that are whole or not there
states.py        what they hold of model, optimizers and random numbers, for any ranks
trainer.py       speculators' Trainer with those checkpoints and a stop between steps
steps.py         its epoch: accumulation, the guard of loss and gradient
watchdog.py      who hangs, who lags
estimate.py      the acceptance that a server will show, told from validation samples
curves.py        the metrics of a run: curves.jsonl beside speculators' own TensorBoard log
nodes.py         torchrun over several nodes of a job
loop.py          `train`: the run, put together
export.py        `export`: a checkpoint as the directory that vLLM loads

Everything but shape.py, draftkind.py, draftfiles.py and watchdog.py imports torch and speculators
at the top: import these modules inside functions of the stages only. This file imports nothing
heavy; it sets the one thing that must be in the environment before torch is loaded.
"""

import os

# Threads that wait for each other sleep instead of spinning. Where other work shares the cores a
# training step took 2.3 s instead of 6.8 s (2 cores, load 4.6). OpenMP reads it once, when torch
# is loaded; a value that the user set stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
