"""Runs as Slurm jobs: which jobs, their sbatch texts, submitting, watching, ending them.

    jobs.py      which jobs a recipe needs (no Slurm is asked)
    sbatch.py    a job as sbatch text, through submitit
    submit.py    gates at submit, the lock, the book, adoption
    queue.py     the only place that calls Slurm's commands
    progress.py  what submit believes to be done
    book.py, names.py    the jobs that were submitted, and what they are called
    emit.py, here.py     the same jobs as files, or in an allocation
    status.py, jobview.py, use.py, control.py    a run at a look, what it used, cancel and logs
    beacon.py    what a worker tells its supervisor
    siteinit.py, sitecheck.py        site files from and against a real Slurm

On the node `slurm/host.sh` takes over; of this room only beacon.py runs inside a job.
"""
