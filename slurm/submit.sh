#!/bin/bash
# Submits the files beside it in order, each behind the jobs it needs: bash submit.sh RUN
# RUN is a run directory: kimi-eagle submit RECIPE --site SITE --run RUN --emit DIR makes it.
set -euo pipefail
run=$(realpath "${1:?usage: bash submit.sh RUN}")
[ -f "$run/run.json" ] || { echo "submit.sh: no run in $run (no run.json)" >&2; exit 2; }
cd "$(dirname "$0")"
mkdir -p "$run"/slurm/{jobs,log}
digits=$(printf %s "$run" | sha256sum | cut -c1-6) # by which a run knows its jobs in squeue
lock=$run/slurm/submit.lock                        # that of kimi-eagle submit
me=$(printf '{"host":"%s","boot":"%s","pid_namespace":"%s","pid":%s,"pid_started":"%s"}' \
    "$(hostname)" "$(cat /proc/sys/kernel/random/boot_id)" "$(readlink /proc/self/ns/pid)" $$ \
    "$(sed 's/.*) //' /proc/$$/stat | cut -d' ' -f20)")
(set -o noclobber; echo "$me" >"$lock") 2>/dev/null ||
    { echo "submit.sh: another command is at work ($lock)" >&2; exit 1; }
sent=() suffix=''
finish() { # half a run helps nobody: take back what was sent, heard of or not
    [ "$1" = 0 ] || [ -z "$suffix" ] ||
        sent+=($(squeue --noheader --me --format='%A %j' | sed -n "s/ .*-$suffix\$//p" || true))
    [ "$1" = 0 ] || [ ${#sent[@]} = 0 ] || scancel "${sent[@]}"
    rm -f "$lock"
}
trap 'finish $?' EXIT
queued=$(squeue --noheader --me --format=%j)
if grep -Eq -- "-$digits[0-9a-f]{4}$" <<<"$queued"; then
    echo "submit.sh: jobs of $run are in the queue" >&2
    exit 1
fi
upstream=''
job() { # FILE NAME DEPENDENCY WHAT: sets id and suffix
    suffix=$digits$(od -An -N2 -tx1 /dev/urandom | tr -dc 0-9a-f)
    id=$(sbatch --parsable --job-name="$2-$suffix" ${3:+--dependency=afterany$3} \
        --output="$run/slurm/log/%x-%j.log" "$1" "$run")
    id=${id%%;*}
    sent+=("$id")
    echo "$id $4"
}
group=
job 1-regenerate.canary.sbatch reg-kimi "$upstream" "regenerate, prepare (canary)"
canary=$id others=$run/slurm/jobs/$suffix.others
group=$group:$id
job 1-regenerate.workers.sbatch reg-kimi ":$canary" "regenerate, prepare (workers, 3 at once)"
echo "$id" >>"$others"
group=$group:$id
upstream=$upstream$group
group=
job 2-extract.canary.sbatch ext-kimi "$upstream" "extract, vocab (canary)"
canary=$id others=$run/slurm/jobs/$suffix.others
group=$group:$id
job 2-extract.workers.sbatch ext-kimi ":$canary" "extract, vocab (workers, 3 at once)"
echo "$id" >>"$others"
group=$group:$id
upstream=$upstream$group
group=
job 3-train.sbatch trn-kimi "$upstream" "train, benchmark (single)"
group=$group:$id
