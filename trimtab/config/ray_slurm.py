"""The part of a Slurm file that starts a Ray of the job's own on its machines, runs the command beside its head, and
ends it all.

Its token lies in a folder beside the job's files, which all machines must see and only this user can read. Slurm's
warning before the end of the time (--signal) goes to the command, which saves and leaves with its own code.
"""

import shlex
from collections.abc import Sequence

STARTING_SECONDS = 300
SAVING_SECONDS = 120

_TOKEN = """\
umask 077
ray_folder="$PWD/ray-$SLURM_JOB_ID"
mkdir -p "$ray_folder"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$ray_folder/token" RAY_USAGE_STATS_ENABLED=0
od -An -N 32 -tx1 /dev/urandom | tr -d ' \\n' > "$RAY_AUTH_TOKEN_PATH"
chmod 600 "$RAY_AUTH_TOKEN_PATH"
"""

_CLEANING = """\
steps=()
end_ray() {
    for step in ${steps[@]+"${steps[@]}"}; do kill -TERM "$step" 2>/dev/null || true; done
    wait
    rm -rf "$ray_folder"
}
trap end_ray EXIT
"""

_WAITING = """\
# so many machines answer, or the job is over
wait_for() {
    for ((second = 0; second < STARTING; second++)); do
        for step in "${steps[@]}"; do
            kill -0 "$step" 2>/dev/null || { echo "a Ray node has ended; its log is in the Slurm output" >&2; exit 1; }
        done
        [[ $(ray status 2>/dev/null | grep -c "1 node_") -ge $1 ]] && return
        sleep 1
    done
    echo "of $1 Ray nodes not all answered within STARTING s" >&2
    exit 1
}
"""

_HEAD = """\
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$first_node" hostname --ip-address | cut -d ' ' -f 1)
export RAY_ADDRESS="$address:PORT"
srun --overlap --nodes=1 --ntasks=1 --nodelist="$first_node" \\
    ray start --head --block --node-ip-address="$address" --port=PORT --include-dashboard=false DEVICES &
steps+=($!)
wait_for 1
"""

_OTHERS = """\
srun --overlap --nodes=OTHERS --ntasks=OTHERS --exclude="$first_node" bash -c '
    own=$(hostname --ip-address | cut -d " " -f 1)
    exec ray start --block --address="$RAY_ADDRESS" --node-ip-address="$own" DEVICES' &
steps+=($!)
wait_for NODES
"""

_COMMAND = """\
COMMAND &
driver=$!
trap 'kill -TERM "$driver" 2>/dev/null || true' TERM
code=0
wait "$driver" || code=$?
while kill -0 "$driver" 2>/dev/null; do # the trap has ended the wait, and the command is saving
    code=0
    wait "$driver" || code=$?
done
exit "$code"
"""


def ray_script(command: Sequence[str], nodes: int, gpus: int, cpus: int, port: int) -> str:
    """What stands in the file below its header and set-up."""
    devices = f"--num-gpus={gpus} --num-cpus={cpus}"
    parts = [_TOKEN, _CLEANING, _WAITING.replace("STARTING", str(STARTING_SECONDS)), _HEAD]
    if nodes > 1:
        parts.append(_OTHERS.replace("OTHERS", str(nodes - 1)).replace("NODES", str(nodes)))
    text = "".join(parts).replace("PORT", str(port)).replace("DEVICES", devices)
    return text + _COMMAND.replace("COMMAND", shlex.join(command))
