"""Runs as Slurm jobs: which jobs, their sbatch texts, submitting, watching, ending them.

    jobs.py      which jobs a recipe needs (no Slurm is asked)
    sbatch.py    a job as sbatch text, through submitit
    submit.py    gates at submit, the lock, the book, adoption
    queue.py     the only place that calls Slurm's commands
    status.py, use.py, control.py    looking at a run, what it used, cancel and logs
    siteinit.py, sitecheck.py        site files from and against a real Slurm

On the node `slurm/host.sh` takes over; nothing here runs inside a job.
"""
