#!/bin/bash
# Submits the files beside it in order, each behind the jobs it needs: bash submit.sh RUN
# RUN is a run directory: kimi-eagle submit RECIPE --site SITE --run RUN --emit DIR makes it.
set -euo pipefail
run=$(realpath "${1:?usage: bash submit.sh RUN}")
[ -f "$run/run.json" ] || { echo "submit.sh: no run in $run (no run.json)" >&2; exit 2; }
cd "$(dirname "$0")"
mkdir -p "$run"/slurm/{jobs,log}
upstream=
job() { # FILE DEPENDENCY: the id of the job
    local after=${2:+--dependency=afterany$2}
    sbatch --parsable $after --output="$run/slurm/log/%x-%j.log" "$1" "$run" | cut -d';' -f1
}
group=
id=$(job 1-regenerate.canary.sbatch "$upstream")
canary=$id
group=$group:$id
echo "$id regenerate, prepare (canary)"
id=$(job 1-regenerate.workers.sbatch ":$canary")
echo "$id" >>"$run/slurm/jobs/h$canary.others"
group=$group:$id
echo "$id regenerate, prepare (workers, 3 at once)"
upstream=$upstream$group
group=
id=$(job 2-extract.canary.sbatch "$upstream")
canary=$id
group=$group:$id
echo "$id extract, vocab (canary)"
id=$(job 2-extract.workers.sbatch ":$canary")
echo "$id" >>"$run/slurm/jobs/h$canary.others"
group=$group:$id
echo "$id extract, vocab (workers, 3 at once)"
upstream=$upstream$group
group=
id=$(job 3-train.sbatch "$upstream")
group=$group:$id
echo "$id train, benchmark (single)"
