"""kimi-eagle: train and benchmark an EAGLE-3 draft model for Kimi-K2.5 on a Slurm cluster.

Start at `stages/` (one page a stage: the story of the data) or at `cli/app.py` (the commands).
"""

__version__ = "0.1.0"
