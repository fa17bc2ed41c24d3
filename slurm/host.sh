#!/bin/bash
# The one supervisor of a job on its node: starts the stages, watches them, and decides what an end means.
# Every sbatch file ends in `exec bash host.sh OPTIONS -- COMMAND`; the word @STAGE@ in COMMAND becomes the
# stage. Exit codes of COMMAND: 0 nothing left here, 75 stopped with work left, 76 not yet, 2 and 78 refused
# (trying again is useless), anything else is a death.
#   USR2 (before a time limit or preemption): stop file; the unit ends, or is dropped in time; requeue
#   TERM (scancel, preemption, node going away): passed on at once; Slurm requeues what it preempted
set -u
asked=${KIMI_EAGLE_ASKED:-} stage='' child='' log=/dev/null why=running token='' deadline=0 started=0 shown=0
trap asked=limit USR2; trap asked=term TERM INT # until there is something to stop
run='' stages='' role=single name=job gpus=0 grace=300 requeue=0 rename=0 final=0 attempts=20 hours='' events='' notify=()
task=${SLURM_ARRAY_TASK_ID:-0} suffix=h${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:-$$}}
[[ ${SLURM_JOB_NAME:-} =~ -([0-9a-f]{10})$ ]] && suffix=${BASH_REMATCH[1]} # submitted by submit.sh
for word in awk cut grep sed tail timeout; do command -v $word >/dev/null || { echo "host.sh: no $word here" >&2; exit 2; }; done
while [ $# -gt 0 ]; do
    case $1 in
        --run | --suffix | --task | --stages | --role | --grace | --gpus | --name | --events | --attempts | --hours)
            printf -v "${1#--}" %s "$2"; shift 2 ;;
        --notify) notify+=("$2"); shift 2 ;;
        --requeue | --rename | --final) printf -v "${1#--}" 3; shift ;;
        --) shift; break ;;
        *) echo "host.sh: unknown option: $1" >&2; exit 2 ;;
    esac
done
[ -n "$run" ] && [ -n "$stages" ] && [ $# -gt 0 ] || { echo "usage: host.sh --run DIR --stages A,B -- COMMAND" >&2; exit 2; }
command=("$@") restart=${SLURM_RESTART_COUNT:-0} nodes=${SLURM_STEP_NUM_NODES:-${SLURM_JOB_NUM_NODES:-1}}
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$task} job=${job:-${SLURM_JOB_ID:-$$}}
[ "${SLURM_STEP_ID:-batch}" = batch ] || job=$job.$task # submit --here: several workers in one job
slot=$suffix.$task book=$run/slurm node=${SLURMD_NODENAME:-$(hostname)}
export KIMI_EAGLE_STOP=$book/stop/$slot KIMI_EAGLE_BEACON=$book/beacon/$slot # what the stage is told
export KIMI_EAGLE_JOB=$job KIMI_EAGLE_ROLE=$role KIMI_EAGLE_NODES=$nodes KIMI_EAGLE_STAGES=$stages
[ -n "${SLURM_CPUS_PER_TASK:-}" ] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun >= 22.05 forgets it

say() { echo "$(date +%FT%T) $job: $*"; }
replace() { printf '%s\n' "$2" >"$1.tmp.$slot" && mv -f "$1.tmp.$slot" "$1"; } # FILE TEXT, whole or not at all
slurm() { command -v scontrol >/dev/null && { timeout 30 scontrol "$@" >/dev/null 2>&1 & wait $!; }; } # lets traps in
tell() { # EVENT TEXT: the recipe's own command, if it wants this event
    say "$1: $2"
    [[ ${#notify[@]} -gt 0 && ",$events," == *",$1,"* ]] || return 0
    timeout 60 "${notify[@]}" "$1" "$run" "$2" </dev/null || say "the notice command failed ($?)"
}
hold() { # FILE REASON: nobody starts here any more; the first reason stays
    ( set -o noclobber; printf '%s\n' "$2" >"$1" ) 2>/dev/null && tell hold "$2"
    why=held
}
use() { # [END]: what this start has used so far
    replace "$book/use/$slot.$restart.$stage.txt" "start=$started now=$(date +%s) end=${1:-0} gpus=$((gpus * nodes))\
 cpus=$(nproc) nodes=$nodes node=$node job=$job why=$why stage=$stage"
}
show() { # NAME COMMENT: what squeue says of this job, until Slurm has refused it three times
    [ "$rename" -gt 0 ] && { slurm update JobId="$job" JobName="$1-$suffix" Comment="$2" || rename=$((rename - 1)); }
}
drop_claims() { # [DEATH]: the dead hold nothing; a unit in which a worker died unasked counts a try
    local claim holder key
    for claim in "$run/$stage/claims/"{*,.canary}; do
        read -r holder key 2>/dev/null <"$claim" && [[ $holder == "j$job-"* ]] || continue
        [ -n "${1:-}" ] && [[ $claim != */.canary ]] && units=1 && echo "$key $job $1" >>"$run/$stage/attempts/${claim##*/}.died"
        rm -f "$claim"
    done
}
payload() { grep -lsz "^KIMI_EAGLE_PAYLOAD=$token\$" /proc/[0-9]*/environ | cut -d/ -f3; } # with orphans
ask() { asked=${asked:-$1} deadline=$((SECONDS + $2)); : >"$KIMI_EAGLE_STOP"; } # WHY SECONDS until the unit is dropped
trap 'say "USR2: the time is nearly over"; ask limit $((grace * 3 / 4))' USR2
trap 'asked=${asked:-term} deadline=$SECONDS; [ -n "$child" ] && kill -TERM "$child" 2>/dev/null' TERM INT

behind() { # having been requeued: wait for those that the stage waits for, and for the end
    [ ! -s "$KIMI_EAGLE_BEACON.after" ] || slurm update JobId="$job" Dependency="$(cat "$KIMI_EAGLE_BEACON.after")"
    sleep 60
}
open_others() { # the canary's first unit is done: the others need not wait for the end of this job
    local id opened=1
    [ "$role" = canary ] && [ -s "$book/jobs/$suffix.others" ] || return 0
    while read -r id; do slurm update JobId="$id" Dependency= || opened=0; done <"$book/jobs/$suffix.others"
    role=opened; say "first unit done: the other workers may start"
    [ "$opened" = 1 ] || ask canary 86400 # they wait for the end of this job, so it has to end
}
tick() { # every few seconds while a stage runs
    local line=(); use
    mapfile -t line 2>/dev/null <"$KIMI_EAGLE_BEACON"
    [ "${line[2]:-0}" -gt 0 ] && open_others
    [ -e "$run/held" ] && ask held 86400
    [ -n "${line[0]:-}" ] && [ $SECONDS -ge $((shown + 30)) ] || return 0
    shown=$SECONDS; show "${line[0]}" "${line[1]:-}"; spent
}
spent() { # hold the run when its jobs have used up their GPU hours
    [ -n "$hours" ] && cat "$book/use/"*.txt 2>/dev/null | awk -v most="$hours" '{
        split("", v); for (i = 1; i <= NF; i++) { split($i, kv, "="); v[kv[1]] = kv[2] }
        sum += ((v["end"] > 0 ? v["end"] : v["now"]) - v["start"]) * v["gpus"] / 3600 } END { exit sum < most }' && hold "$run/held" "max_gpu_hours = $hours reached"
}
attempt() { # one start of the stage's process; its exit code
    local n=0 next=0 argv=() word rc
    while [ -e "$run/$stage/log/$job.$restart.$n.out" ]; do n=$((n + 1)); done
    log=$run/$stage/log/$job.$restart.$n.out token=$job.$restart.$n.$stage shown=$((SECONDS - 30))
    for word in "${command[@]}"; do [ "$word" = @STAGE@ ] && word=$stage; argv+=("$word"); done
    [ "$nodes" -gt 1 ] && argv=(srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 "${argv[@]}")
    rm -f "$KIMI_EAGLE_BEACON"{,.after}; say "$stage starts; its log: $log"
    KIMI_EAGLE_PAYLOAD=$token "${argv[@]}" </dev/null >"$log" 2>&1 &
    child=$!
    while kill -0 "$child" 2>/dev/null; do
        [ $SECONDS -ge $next ] && next=$((SECONDS + 5)) && tick
        [ -n "$asked" ] && [ $SECONDS -ge $deadline ] && kill -TERM "$child" 2>/dev/null && # drops its unit
            [ $SECONDS -ge $((deadline + (grace < 150 ? grace / 8 + 2 : 20))) ] && kill -KILL $(payload) 2>/dev/null
        sleep 0.5 & wait $!
    done
    wait "$child"; rc=$?
    kill -KILL $(payload) 2>/dev/null # orphans of a killed process still hold GPUs
    rm -rf {"${TMPDIR:-/tmp}",/tmp}"/ke-$UID-$token-"* # the scratch folder that start.sh made for an image
    child=''; return $rc
}
one_stage() { # until nothing is left for this job; sets why
    local early=0 rc units held; started=$(date +%s) why=running
    mkdir -p "$run/$stage"/{log,claims,attempts}
    while :; do
        spent
        for held in "$run/held" "$run/$stage/held"; do [ -e "$held" ] && why=held && return; done
        echo "$job $restart $node $(date +%s) $stage" >>"$book/starts/$slot.txt" # waiting counts a twentieth
        awk -v stage="$stage" -v most="$attempts" '$5 == stage { n += $6 == "waiting" ? 0.05 : 1 } END { exit n <= most }' \
            "$book/starts/$slot.txt" &&
            hold "$run/$stage/held" "a worker was started $attempts times and is not done ($job)" && return
        drop_claims # of an earlier start of this job that was cut off
        attempt; rc=$?
        units=$(sed -n 3p "$KIMI_EAGLE_BEACON" 2>/dev/null)
        say "$stage ended with $rc after ${units:-0} units"
        case $rc in 0) why=done ;; 75) why=${asked:-stopped} ;; 76) why=waiting ;; 2 | 78) why=refused ;; *) why=${asked:-died} ;; esac
        [ "$why" = waiting ] && sed -i '$s/$/ waiting/' "$book/starts/$slot.txt"
        [ "$rc" != 0 ] && [ -n "$asked" ] && drop_claims
        [ "$why" = died ] && why=running || return
        drop_claims "exit $rc"
        [ "${units:-0}" -gt 0 ] && early=0 || early=$((early + 1))
        [ $early -lt 3 ] ||
            { hold "$run/$stage/held" "died 3 times before any unit on $node: $(tail -n 1 "$log")"; return; }
    done
}
mkdir -p "$book"/{jobs,starts,use,stop,beacon} && rm -f "$KIMI_EAGLE_STOP"
for stage in ${stages//,/ }; do
    one_stage; use "$(date +%s)"
    [ "$why" = done ] || break
done
[ "$why" = waiting ] && [ "$stage" != "${stages%%,*}" ] && say "others of this group go on" && exit 0
case $why in
    done) [ "$final" = 0 ] || ! mkdir "$book/ended" 2>/dev/null || tell end "the run is finished"; exit 0 ;;
    stopped) exit 0 ;;
    canary | limit | waiting)
        show "$name" "$why"
        trap '' TERM USR2
        for ((; requeue > 0; requeue--)); do slurm requeue "$job" && behind; sleep 3; done # ends this script
        say "left ($why); not requeued"; [ "$why" = canary ] || exit 75 ;;
    held | refused) tell failure "$stage: $why: $(cat "$run/held" "$run/$stage/held" 2>/dev/null || tail -n 1 "$log")"; exit 1 ;;
    *) exit 143 ;;
esac
