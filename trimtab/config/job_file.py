"""Batch files of one command over seeds and options: their text. Nothing here writes or submits.

A command is taken apart into its options, and a seed, a value or a port is set in it; the text is put together at the
very end. Where a seed or a varied option stands inside a value (a checkpoint's name, say) the command has {seed} or
{learning_rate} there.
"""

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trimtab.errors import UserError

LAUNCHERS = ("deepspeed", "torchrun")
PORTS = range(1024, 65536)
LONGEST_NAME = 200  # file systems take 255 bytes, and the log's name is longer


@dataclass(frozen=True)
class Command:
    module: str
    """The Python module that is run; or module and verb, with a space."""
    options: tuple[tuple[str, tuple[str, ...]], ...]
    """Names without dashes, each with its values, in order."""

    def with_option(self, name: str, *values: str) -> "Command":
        """The option set to these values, where it stands or at the end."""
        changed = [(known, values if known == name else old) for known, old in self.options]
        if name not in dict(self.options):
            changed.append((name, values))
        return replace(self, options=tuple(changed))

    def filled(self, settings: dict[str, str]) -> "Command":
        """These options set, and their values wherever {name} stands."""

        def fill(value: str) -> str:
            for name, setting in settings.items():
                value = value.replace(f"{{{name}}}", setting)
            return value

        command = replace(self, options=tuple((name, tuple(map(fill, values))) for name, values in self.options))
        for name, setting in settings.items():
            command = command.with_option(name, setting)
        return command

    @property
    def on_ray(self) -> bool:
        """It starts its processes itself, on the machines of a Ray."""
        asked = dict(self.options).get("ray")
        if asked is None:
            return self.module.endswith(".train_ppo_ray")
        return not asked or asked[-1].lower() in ("true", "1", "yes")

    def words(self) -> list[str]:
        return [word for name, values in self.options for word in (f"--{name}", *values)]


def read_command(words: Sequence[str], verbs: dict[str, str]) -> Command:
    """A command as it is typed: `trimtab VERB ...`, `python -m MODULE ...`, a launcher's, or from `--module` on.

    `verbs`: the module of each verb. What a launcher is told before the module (ports, numbers of processes) is left
    out: the file's own header decides it.
    """
    words = list(words)
    if words[:1] == ["trimtab"] and len(words) > 1:
        if words[1] not in verbs:
            raise UserError(f"trimtab {words[1]} is not a verb; the verbs are {', '.join(verbs)}")
        module, rest = verbs[words[1]], words[2:]
    elif words[1:2] == ["-m"] and len(words) > 2:
        module, rest = words[2], words[3:]
    else:
        marks = [i for i, word in enumerate(words[:-1]) if word in ("--module", "-m")]
        if not marks or (words[0] not in LAUNCHERS and marks[0] != 0):
            raise UserError(
                "the command after -- is not understood: give trimtab VERB ..., python -m MODULE ..., or a deepspeed "
                "or torchrun command with --module"
            )
        module, rest = words[marks[0] + 1], words[marks[0] + 2 :]
    if module.startswith("openrlhf."):
        raise UserError(f"{module} is another project's: write {module.replace('openrlhf', 'trimtab', 1)}")
    if module == "trimtab.cli.run_rl":
        module, rest = verbs["rl"], with_config(rest)
    return Command(module, tuple(_options(rest)))


def with_config(words: Sequence[str]) -> list[str]:
    """The words of PaddleNLP's run_rl, which may begin with a file, as those of `trimtab rl`."""
    return ["--config", *words] if words and not words[0].startswith("-") else list(words)


def _options(words: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            found.append((name.replace("-", "_"), [value] if equals else []))
        elif found:
            found[-1][1].append(word)
        else:
            raise UserError(f"unexpected {word!r} in the command: every value follows its option")
    names = [name for name, _ in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"--{twice} stands twice in the command")
    return [(name, tuple(values)) for name, values in found]


@dataclass(frozen=True)
class Job:
    """One file: a command with its seed and options set, and a port that no other file has."""

    name: str
    command: Command
    port: int


def spread(
    command: Command, name: str, seeds: Sequence[int], varied: Mapping[str, Sequence[str]], first_port: int
) -> list[Job]:
    """A job for every seed of every combination of the varied options' values."""
    jobs: list[Job] = []
    for values in itertools.product(*varied.values()):
        chosen = dict(zip(varied, values))
        called = name + "".join(f"_{option}{value}" for option, value in chosen.items())
        for seed in seeds:
            made = command.filled(chosen | {"seed": str(seed)})
            jobs.append(Job(f"{called}_s{seed}", made, first_port + len(jobs)))
    if jobs[-1].port not in PORTS or first_port not in PORTS:
        raise UserError(f"--port {first_port}: {len(jobs)} ports from there on must lie in {PORTS[0]} to {PORTS[-1]}")
    for job in jobs:
        if len(job.name) > LONGEST_NAME or not re.fullmatch(r"[\w.+-]+", job.name):
            raise UserError(f"a file cannot be called {job.name[:80]}...: give a short --name of letters and digits")
    return jobs


@dataclass(frozen=True)
class Machines:
    """What a job runs on. None: whatever the cluster gives."""

    nodes: int = 1
    gpus: int = 1
    """On each node."""
    cpus: int = 4
    memory: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    others: dict[str, str] = field(default_factory=dict)
    """Further lines of the header, by name."""


def shell_file(job: Job, machines: Machines, setup: Sequence[str] = ()) -> str:
    """A script for a machine without a scheduler."""
    lines = ["#!/bin/bash", "set -euo pipefail", *setup, shlex.join(_launch(job, machines))]
    return "\n".join(lines) + "\n"


def slurm_file(job: Job, machines: Machines, setup: Sequence[str] = ()) -> str:
    """A batch file. With several nodes each starts a launcher, and they meet at the first one; a command on Ray gets a
    Ray of its own on them. Before the time is over the command is told, so that it can save."""
    tasks_alone = machines.nodes > 1 and not job.command.on_ray  # else the shell, or what it became, is told
    header = {
        "job-name": job.name,
        "output": f"{job.name}_%j.out",
        "nodes": machines.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": machines.gpus or None,
        "cpus-per-task": machines.cpus,
        "mem": machines.memory,
        "time": machines.time,
        "partition": machines.partition,
        "account": machines.account,
        "signal": f"{'' if tasks_alone else 'B:'}TERM@{SAVING_SECONDS}",
        **machines.others,
    }
    lines = ["#!/bin/bash", *(f"#SBATCH --{name}={value}" for name, value in header.items() if value is not None)]
    lines += ["set -euo pipefail", *setup]
    if job.command.on_ray:
        command = ["python", "-m", *job.command.module.split(), *job.command.words()]
        return "\n".join([*lines, ray_script(command, machines.nodes, machines.gpus, machines.cpus, job.port)])
    if machines.nodes == 1:
        return "\n".join([*lines, f"exec {shlex.join(_launch(job, machines))}"]) + "\n"
    meeting = ["--rdzv_backend", "c10d", "--rdzv_id", '"$SLURM_JOB_ID"', "--rdzv_endpoint", f'"$first_node:{job.port}"']
    sizes = ["--nnodes", str(machines.nodes), "--nproc_per_node", str(max(1, machines.gpus))]
    rest = shlex.join(["--module", *job.command.module.split(), *job.command.words()])
    lines.append(_FIRST_NODE)
    return "\n".join([*lines, f"srun torchrun {' '.join([*sizes, *meeting])} {rest}"]) + "\n"


def _launch(job: Job, machines: Machines) -> list[str]:
    """The words that start a command on one machine."""
    if machines.gpus <= 1 or job.command.on_ray:
        return ["python", "-m", *job.command.module.split(), *job.command.words()]
    launcher = ["torchrun", "--nproc_per_node", str(machines.gpus), "--master_port", str(job.port)]
    return [*launcher, "--module", *job.command.module.split(), *job.command.words()]


# ---- Ray in a Slurm file: a cluster for the job on its machines, and the command on the head
# Its token lies in a folder beside the job's files, which all machines must see and only this user can read. Slurm's
# warning before the end of the time (--signal) goes to the command, which saves and leaves with its exit code.


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

# Not `| head -n 1`: scontrol may then die of a broken pipe, and the job with it.
_FIRST_NODE = 'read -r first_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")'

_HEAD = f"""\
{_FIRST_NODE}
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
