"""Running a job in an image: the command line and environment of a process in one (`exec.py`), and
the script by which a run's jobs start in theirs (`start.py`). Which image, the room images says."""
