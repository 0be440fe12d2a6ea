#!/bin/bash
# Runs job.slurm, but on CPUs, on a throw-away cluster of two nodes on this machine.
# Debian: apt-get install slurm-wlm munge faketime; then, with the Python that has torch first in PATH:
#
#     bash tests/check_slurm.sh
#
# It takes about seven minutes, most of them for SLURM's own clocks, and prints a line for each check. Everything lies in a
# temporary folder, and all that was started is ended with the script.

set -u
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
failed=0
PATH=$PATH:/usr/sbin:/sbin
export SLURM_CONF=$work/slurm.conf XDG_CACHE_HOME=$work/cache CUDA_VISIBLE_DEVICES=

# ---- the cluster: two nodes with a slurmd each. Their names resolve on any machine, as those of real nodes do

me=$(id -un)
nodes=(127.0.0.2 127.0.0.3)
daemons=()

tear_down() {
    scancel --user "$me" --signal=KILL --full 2> /dev/null
    scancel --user "$me" 2> /dev/null
    sleep 2
    for daemon in "${daemons[@]}"; do
        kill "$daemon" 2> /dev/null
    done
    wait
    if [ $failed = 0 ]; then rm -rf "$work"; else echo "logs: $work"; fi
}
trap tear_down EXIT

free_port() {
    python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
}

mkdir "$work/state" "${nodes[@]/#/$work/spool-}"
cat > "$SLURM_CONF" << END
ClusterName=check
SlurmctldHost=localhost
SlurmctldPort=$(free_port)
SlurmUser=$me
SlurmdUser=$me
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool-%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=5,bf_interval=5
NodeName=${nodes[0]} NodeAddr=127.0.0.1 Port=$(free_port) CPUs=4
NodeName=${nodes[1]} NodeAddr=127.0.0.1 Port=$(free_port) CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=60
END
echo "CgroupPlugin=cgroup/v1" > "$work/cgroup.conf"  # loaded, but nothing here uses it
# a key of its own: the machine's is not this script's to use
head -c 128 /dev/urandom > "$work/munge.key"
chmod 400 "$work/munge.key"
munged --foreground --force --key-file "$work/munge.key" --socket "$work/munge.socket" --pid-file "$work/munge.pid" \
    --seed-file "$work/munge.seed" --log-file "$work/munge.log" > "$work/munged.out" 2>&1 &
daemons+=($!)
slurmctld -D > "$work/slurmctld.log" 2>&1 &
daemons+=($!)
for node in "${nodes[@]}"; do
    slurmd -D -N "$node" > "$work/slurmd-$node.log" 2>&1 &
    daemons+=($!)
done

# ---- job.slurm: a smaller job, and the paths of this folder

python - "$here" "$work" << END || exit 1
import random
import sys
from pathlib import Path

here, work = map(Path, sys.argv[1:])
sys.path.insert(0, str(here / "tests"))
from conftest import random_chats, random_model

random_model(work / "llama", num_hidden_layers=1, hidden_size=32)
random_chats(work / "chats.jsonl", random.Random(0))
script = (here / "tests/job.slurm").read_text()
changes = {
    "--nodes=4": "--nodes=2",
    " --gpus-per-node=8": "",
    "--time=24:00:00": "--time=3",
    "USR1@300": "USR1@60",
    "--nproc_per_node 8": "--nproc_per_node 2",
    "train.py": f"{here}/train.py --random_init --precision fp32 --seq_len 64 --save_every 0 --steps 1000000"
                " --schedule constant --warmup 0",
    "/shared/": f"{work}/",
}
for old, new in changes.items():
    if old not in script:
        sys.exit(f"job.slurm no longer has {old!r}")
    script = script.replace(old, new)
(work / "job.sh").write_text(script)
END

# ---- what is checked

check() {  # check "what" command...: ok if the command succeeds
    local what=$1
    shift
    if "$@"; then echo "ok      $what"; else echo "FAILED  $what"; failed=1; fi
}

log=$work/log
run=$work/run

wait_for() {  # wait_for SECONDS command...: until it succeeds
    local end=$((SECONDS + $1))
    shift
    until "$@" > /dev/null 2>&1; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.5
    done
}

submit() {
    job=$(sbatch --parsable --output="$log" --chdir="$work" "$work/job.sh")
}

n_said() { tr -d , < "$log" | grep -c -- "$1"; }
has_said() { [ "$(n_said "$1")" -ge "$2" ]; }
state_is() { [ "$(scontrol show job "$job" | sed -n 's/ *JobState=\([A-Z_]*\).*/\1/p')" = "$1" ]; }
not_running() { ! state_is RUNNING && ! state_is COMPLETING; }
start_now() {  # SLURM lets a requeued job wait for two minutes
    wait_for 90 state_is PENDING
    # not at once: a node refuses a job whose credential it has revoked in the same second
    scontrol update jobid="$job" StartTime=now+5
}
world_is() { grep -q "\"world\": $1," "$run/args.json"; }
newest_step() { ls -d "$run"/checkpoint-* 2> /dev/null | sed 's/.*-//' | sort -n | tail -n1; }
saved_as_said() {  # the last line about a stop names the newest checkpoint
    [ -n "$(newest_step)" ] && [ "$(grep -o 'after step [0-9]*' "$log" | tail -n1)" = "after step $(newest_step)" ]
}
continues() {  # the job goes on after the newest checkpoint, and trains
    wait_for 180 has_said "continuing after step $(newest_step) " 1 &&
        wait_for 180 trains_after "$(newest_step)"
}
trains_after() { [ "$(tail -n1 "$run/metrics.jsonl" | sed 's/.*"step": \([0-9]*\).*/\1/')" -gt "$(($1 + 3))" ]; }

wait_for 60 sinfo -h -o %T
check "a cluster of two nodes is up" wait_for 60 test "$(sinfo -h -o %D)" = 2
submit
check "the job trains" wait_for 240 trains_after 0
check "on two nodes with two ranks each" world_is 4

scontrol requeue "$job"
check "scontrol requeue: the ranks say that they stop" wait_for 60 has_said "stopped by SIGTERM" 1
check "scontrol requeue: the checkpoint is there" saved_as_said
start_now
check "scontrol requeue: the job continues" continues

scancel --signal=USR1 "$job"
check "scancel --signal=USR1: the ranks say that they stop" wait_for 60 has_said "stopped by SIGUSR1" 1
check "scancel --signal=USR1: the checkpoint is there" saved_as_said
check "scancel --signal=USR1: the job ends and is not requeued" wait_for 60 state_is FAILED

submit
check "sbatch of the same script continues" continues
stops=$(n_said "stopped by")
check "before the time limit the ranks stop" wait_for 240 has_said "stopped by" $((stops + 1))
check "before the time limit they save" saved_as_said
check "after the time limit the job is requeued by itself" wait_for 90 state_is PENDING
start_now
check "after the time limit it continues" continues

scancel "$job"  # as at the end of the grace of a preempted job
check "scancel: the ranks stop and save" wait_for 60 saved_as_said
check "scancel: nothing of the job is left" wait_for 60 not_running

if command -v faketime > /dev/null; then
    # torchrun, not oomph, compares clocks: from 15 seconds on it takes the other node for dead
    cat > "$work/skewed" << 'END'
#!/bin/bash
[ "$SLURM_NODEID" = 1 ] && exec faketime -f +5s torchrun "$@"
exec torchrun "$@"
END
    chmod +x "$work/skewed"
    sed -i "s|srun torchrun|srun $work/skewed|; s|--steps 1000000|--steps $(($(newest_step) + 20))|" "$work/job.sh"
    submit
    check "a node whose clock is 5 seconds ahead: the job is completed" wait_for 240 state_is COMPLETED
    check "a node whose clock is 5 seconds ahead: the result is there" test -e "$run/final/model.safetensors"
else
    echo "not checked: nodes with other clocks (no faketime)"
fi
exit $failed
