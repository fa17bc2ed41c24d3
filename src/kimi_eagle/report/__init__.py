"""What people look at: report.html of a run (`page.py`), and of several beside each other
(`compared.py`).

Reads results.json, curves.jsonl, the lock and sums over records; computes nothing of them. The
parts of a page: `acceptance.py` and `measured.py` (the benchmark's charts and tables),
`breakdown.py` (a decode step), `trained.py` (curves, read by `curves.py`), `run.py` (time, storage,
GPU hours, what it was made from). `shown.py` gives every figure its place in results.json, `svg.py`
draws, `tables.py` lays out.
"""
