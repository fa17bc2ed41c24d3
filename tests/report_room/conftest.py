"""Helpers of this room, and the recorded traces of the benchmark's, can be imported by name."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "bench_room")]
