"""Images, and what it takes to run a job in one.

`exec.py` makes the command line and the environment of a process in an image, `start.py` the script
by which a run's jobs start in theirs; `sif.py` and `pins.py` say what an image file is and whether
it is the pinned one; `build.py` and `importing.py` make image files.
"""
