"""`trimtab jobs [option ...] -- COMMAND`: write a batch file for each seed (and setting) of a command. A command with
--ray gets a Ray of its own on the machines of its job."""

import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from trimtab.cli.main import CommandParser, command_main
from trimtab.config.job_file import Command, Job, Machines, read_command, shell_file, slurm_file, spread
from trimtab.config.jobs import JOBS
from trimtab.config.option import Limits
from trimtab.config.parser import parse
from trimtab.config.repulse_aliases import in_words_of_tail, is_repulse
from trimtab.config.training_options import CallOptions
from trimtab.errors import UserError

WRITTEN = ("save_path", "ckpt_path", "output_path")


def jobs(argv: list[str]) -> None:
    own, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    if not command and {"-h", "--help"}.isdisjoint(own):
        raise UserError(
            "there is no command: write it after --, for example trimtab jobs --seeds 1-5 -- trimtab sft ..."
        )
    options = _parser().parse_args(own)

    from trimtab.cli.main import VERBS

    verbs = {verb: module for verb, (module, _) in VERBS.items()}
    typed = read_command(command, verbs)
    name = options.name or typed.module.rsplit(".", 1)[-1]
    varied = _varied(options.vary)
    made = _apart(spread(typed, name, _seeds(options.seeds), varied, options.port), verbs, ["seed", *varied])
    for number, least in (("nodes", 1), ("cpus", 1), ("gpus", 0)):
        if complaint := Limits(at_least=least).complaint(getattr(options, number)):
            raise UserError(f"--{number} {complaint}")
    machines = Machines(
        options.nodes,
        options.gpus,
        options.cpus,
        options.mem,
        options.time,
        options.partition,
        options.account,
        dict(_pair(text, "--sbatch") for text in options.sbatch),
    )
    if options.shell and options.nodes > 1:
        raise UserError("--shell writes files for one machine: leave out --nodes, or --shell")
    write = shell_file if options.shell else slurm_file
    # The command's own paths are seen from here, wherever its file is started.
    setup = [f"cd {shlex.quote(os.getcwd())}", *options.setup]
    texts = {job: write(job, machines, setup) for job in made}
    for path in _written(Path(options.output).expanduser(), texts, shell=options.shell):
        print(path)


def _parser() -> CommandParser:
    parser = CommandParser(
        "trimtab jobs", "Write a Slurm file, or a shell file, for each seed of the command after --."
    )
    parser.add_argument("--seeds", default="1", help="seeds, for example 1-5 or 1,2,7; {seed} in a value is each")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="NAME=A,B",
        help="an option and its values; {NAME} in a value is each",
    )
    parser.add_argument("--shell", action="store_true", help="shell files instead of Slurm files")
    parser.add_argument("--output", default="jobs", metavar="FOLDER", help="folder of the files")
    parser.add_argument("--name", help="how the files begin; unset: as the module")
    parser.add_argument("--port", type=int, default=30_000, help="port of the first file's processes; others count on")
    parser.add_argument("--nodes", type=int, default=1, help="machines of a job")
    parser.add_argument("--gpus", type=int, default=1, help="accelerators on each machine")
    parser.add_argument("--cpus", type=int, default=4, help="cores on each machine")
    parser.add_argument("--mem", help="memory on each machine, for example 48G")
    parser.add_argument("--time", help="longest time, for example 05:00:00")
    parser.add_argument("--partition", help="Slurm partition")
    parser.add_argument("--account", help="Slurm account")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="NAME=VALUE", help="another line of the header"
    )
    parser.add_argument("--setup", action="append", default=[], metavar="LINE", help="shell line before the command")
    return parser


def _seeds(text: str) -> list[int]:
    try:
        seeds: list[int] = []
        for part in text.split(","):
            first, _, last = part.partition("-")
            if int(last or first) < int(first):
                raise UserError(f"--seeds {text}: {part} goes backwards; write {last}-{first}")
            seeds += range(int(first), int(last or first) + 1)
    except ValueError:
        raise UserError(f"--seeds {text}: give numbers such as 1-5 or 1,2,7") from None
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {text}: every seed once, and at least one")
    return seeds


def _varied(texts: Sequence[str]) -> dict[str, list[str]]:
    varied: dict[str, list[str]] = {}
    for text in texts:
        name, values = _pair(text, "--vary")
        name = name.replace("-", "_")
        if name in varied or name == "seed":
            raise UserError(f"--vary {text}: {'--seeds says that' if name == 'seed' else f'{name} is varied already'}")
        varied[name] = values.split(",")
    return varied


def _pair(text: str, flag: str) -> tuple[str, str]:
    name, equals, value = text.removeprefix("--").partition("=")
    if not (name and equals and value):
        raise UserError(f"{flag} {text}: write NAME=VALUE")
    return name, value


def _apart(jobs: list[Job], verbs: dict[str, str], told_apart_by: list[str]) -> list[Job]:
    """The jobs, each with folders of its own: two that write into one destroy each other's work."""
    parsed = [_parsed(job.command, verbs) for job in jobs]
    for name in WRITTEN:
        places = [getattr(options, name, None) for options in parsed]
        if None in places or len(set(places)) == len(places):
            continue
        if parsed[0] and parsed[0].changed(name):
            holes = ", ".join(f"{{{hole}}}" for hole in told_apart_by)
            raise UserError(
                f"--{name} {places[0]}: several of the {len(jobs)} jobs would write there; use {holes} in it"
            )
        jobs = [
            dataclasses.replace(job, command=job.command.with_option(name, f"{place}/{job.name}"))
            for job, place in zip(jobs, places)
        ]
    return jobs


def _parsed(command: Command, verbs: dict[str, str]) -> CallOptions | None:
    """The command's options, if it is one of ours: a mistyped one is told now, not when the queue comes to it."""
    verb = next((verb for verb, module in verbs.items() if module == command.module), None)
    if command.module == "trimtab.cli.train_ppo_ray":
        verb = "ppo"
    words = command.words()
    if verb == "ppo" and is_repulse(words):
        verb, words = "tail", in_words_of_tail(words)
    return parse(JOBS[verb], words) if verb in JOBS else None


def _written(folder: Path, texts: dict[Job, str], *, shell: bool) -> list[Path]:
    """The files, and one that starts them all."""
    ending, start = (".sh", "bash") if shell else (".sbatch", "sbatch")
    paths = {job: folder / f"{job.name}{ending}" for job in texts}
    lines = ["#!/bin/bash", 'cd "$(dirname "$0")"', "failed=0"]
    lines += [f'{start} {path.name} || {{ echo "{path.name} has failed" >&2; failed=1; }}' for path in paths.values()]
    lines.append("exit $failed")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for job, text in texts.items():
            _executable(paths[job], text)
        _executable(folder / "start_all.sh", "\n".join(lines) + "\n")
    except OSError as error:
        raise UserError(f"--output {folder}: cannot write there ({error.strerror})") from error
    return [*paths.values(), folder / "start_all.sh"]


def _executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


main = command_main("jobs", jobs)

if __name__ == "__main__":
    raise SystemExit(main())
