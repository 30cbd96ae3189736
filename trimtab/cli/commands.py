"""Verbs that parse a few words of their own, each a function of the words: report, push, watch, compare, plot, plan,
check, jobs, kk-data. `trimtab.cli.main` calls them and turns their mistakes into one line."""

import argparse
import dataclasses
import json
import math
import os
import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trimtab.cli.main import VERBS, CommandParser, main
from trimtab.config.job_file import Command, Job, Machines, read_command, shell_file, slurm_file, spread
from trimtab.config.jobs import JOBS, TRAINED, SupervisedOptions
from trimtab.config.option import Limits
from trimtab.config.parser import parse
from trimtab.config.repulse_aliases import in_words_of_tail, is_repulse
from trimtab.config.resolved_config import settle
from trimtab.config.rl_jobs import RLOptions
from trimtab.config.training_options import CHECKS, CallOptions
from trimtab.data.hub import ADAPTER, check_push, trusting
from trimtab.errors import UserError
from trimtab.files import is_unfinished
from trimtab.job import push_model

# ---- what runs left behind


def report(argv: Sequence[str]) -> None:
    parser = CommandParser(
        "trimtab report", "Write the HTML report of a run, or of several side by side, from what they left behind."
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run: what --save_path was")
    parser.add_argument(
        "--output",
        metavar="PATH",
        help="file or folder to write to; unset: report.html in the run's folder, or for several runs "
        "comparison.html in the first one's",
    )
    options = parser.parse_args(argv)

    from trimtab.report.comparison import write_comparison
    from trimtab.report.page import write_report

    # What a shell makes of runs/* may hold files as well, such as those of an attack.
    runs = [run for run in options.runs if not Path(run).is_file()] or options.runs
    if len(runs) == 1:
        print(write_report(runs[0], options.output))
    else:
        print(write_comparison(runs, options.output))


def push(argv: Sequence[str]) -> None:
    parser = CommandParser(
        "trimtab push", "Upload the model or adapter of a finished run to the Hugging Face hub, with a model card."
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run: what --save_path was")
    parser.add_argument("repo", metavar="REPO", help="repository on the hub (owner/name)")
    parser.add_argument("--public", action="store_true", help="create it public; one that exists stays as it is")
    options = parser.parse_args(argv)
    folder = Path(options.run).expanduser()
    model = any((folder / name).is_file() for name in ("config.json", ADAPTER))
    if not model or not (folder / "manifest.json").is_file() or is_unfinished(folder):
        raise UserError(f"{options.run}: no finished run; give what --save_path was")
    check_push(options.repo, "REPO")
    push_model(folder, options.repo, private=not options.public)


def watch(argv: Sequence[str]) -> None:
    parser = CommandParser(
        "trimtab watch",
        "Look at runs while they work, or after. Only what a run writes is read, so nothing is slowed or changed.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run: what --save_path is")
    parser.add_argument("--once", action="store_true", help="print how things stand and leave, as without a terminal")
    parser.add_argument(
        "--every", metavar="SECONDS", type=float, default=2.0, help="time between two looks at the files"
    )
    parser.add_argument("--wait", action="store_true", help="wait for runs whose folder is not there yet")
    parser.add_argument("--page", action="store_true", help="serve the report as a live page on this machine")
    parser.add_argument("--port", type=int, default=0, help="port of --page on 127.0.0.1; 0: a free one")
    options = parser.parse_args(argv)
    if not 0.1 <= options.every <= 3600:
        raise UserError(f"--every {options.every:g}: give seconds between 0.1 and 3600")
    if not 0 <= options.port <= 65535:
        raise UserError(f"--port {options.port}: give a port between 1 and 65535, or 0 for a free one")
    if options.page and options.once:
        raise UserError("--page and --once: a page that is written once is what trimtab report makes")
    if options.port and not options.page:
        raise UserError("--port has no meaning without --page")

    from trimtab.report.run_data import watched_folders

    folders = watched_folders(options.runs, wait=options.wait)
    if options.page:
        try:
            from trimtab.report.live_page import serve_page
        except ImportError as error:
            raise UserError(f"--page needs the package {error.name}: pip install 'trimtab[serve]'") from error

        serve_page(folders, port=options.port, every=options.every)
        return
    from trimtab.report.terminal import watch_in_terminal

    watch_in_terminal(folders, every=options.every, once=options.once, wait=options.wait)


def compare(argv: Sequence[str]) -> int:
    from trimtab.report.judgement import (
        DRAWN_TOLERANCE,
        FIRST_TOLERANCE,
        LOG_PROB_TOLERANCE,
        TOLERANCE,
        judge,
        write_judgement,
    )
    from trimtab.report.run_data import read_run

    parser = CommandParser(
        "trimtab compare",
        "Judge whether two runs are the same training on two devices or in two precisions. Exit code 0: they agree; 1: "
        "they do not; 2: they cannot be compared.",
    )
    parser.add_argument("run_a", metavar="RUN_A", help="folder of the run to compare with: what its --save_path was")
    parser.add_argument("run_b", metavar="RUN_B", help="folder of the other run")
    parser.add_argument(
        "--tolerance", type=float, metavar="SHARE", default=TOLERANCE, help="largest weighted relative error"
    )
    parser.add_argument(
        "--first_tolerance",
        type=float,
        metavar="SHARE",
        help=f"largest relative error of the first step; unset: {FIRST_TOLERANCE:g} of a loss, in RL "
        f"{LOG_PROB_TOLERANCE:g} of the log-prob of recorded answers, {DRAWN_TOLERANCE:g} of the length of drawn ones",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="compare the first N steps only; unset: all")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument(
        "--output", metavar="PATH", help="file or folder of the page; unset: agreement.html in RUN_B's folder"
    )
    options = parser.parse_args(argv)
    for name, limits in (
        *((name, Limits(at_least=0, below=1)) for name in ("tolerance", "first_tolerance")),
        ("steps", Limits(at_least=1)),
    ):
        if complaint := limits.complaint(getattr(options, name)):
            raise UserError(f"--{name} {complaint}")
    judgement = judge(
        read_run(options.run_a),
        read_run(options.run_b),
        tolerance=options.tolerance,
        first_tolerance=options.first_tolerance,
        most=options.steps,
    )
    page = write_judgement(judgement, options.output)
    if options.json:
        print(json.dumps(judgement.as_dict() | {"page": str(page)}))
    else:
        print("\n".join([*judgement.lines(), f"page: {page}"]))
    return 0 if judgement.passes else 1


def plot(argv: Sequence[str]) -> None:
    parser = CommandParser(
        "trimtab plot", "Draw training curves over seeds, or the frontier between reward and risk, of several methods."
    )
    kinds = ("curves", "frontier", "page")
    parser.add_argument(
        "figure", metavar="|".join(kinds), choices=kinds, help="what to draw; page: an HTML page with a table and all"
    )
    parser.add_argument("manifest", metavar="MANIFEST", help="YAML or JSON file that lists the runs of each method")
    parser.add_argument(
        "--x",
        choices=("reward", "return", "kl"),
        default="return",
        help="frontier: what is good, or kl: how far a model has moved",
    )
    parser.add_argument("--y", choices=("bad", "cvar", "gcg"), default="bad", help="frontier: what is bad")
    parser.add_argument("--threshold", type=float, help="rewards below this are bad; unset: as the manifest says")
    parser.add_argument("--level", type=float, help="share of the rewards in CVaR; unset: as the manifest says")
    parser.add_argument("--output", metavar="FILE", help="a .png, .svg or .pdf; unset: beside the manifest, a PNG")
    options = parser.parse_args(argv)

    from trimtab.report.experiment import curves_figure, frontier_figure, read_manifest, save, write_experiment

    manifest = read_manifest(options.manifest)
    chosen = {name: getattr(options, name) for name in ("threshold", "level") if getattr(options, name) is not None}
    manifest = dataclasses.replace(manifest, **chosen)
    kind = f"frontier_{options.y}_{options.x}" if options.figure == "frontier" else options.figure
    ending = "html" if options.figure == "page" else "png"
    output = Path(options.output or manifest.path.with_name(f"{manifest.path.stem}_{kind}.{ending}")).expanduser()
    if options.figure == "page" and output.suffix != ".html":
        raise UserError(f"--output {output}: a page is HTML; give a file that ends in .html")
    if options.figure == "page":
        print(write_experiment(manifest, output))
    elif options.figure == "curves":
        print(save(curves_figure(manifest), output))
    else:
        print(save(frontier_figure(manifest, options.x, options.y), output))


# ---- trimtab plan VERB [the job's own options] --on DEVICE: what the job needs there; with --nodes N --gpus M on
# machines with such devices

Planned = SupervisedOptions | RLOptions


def plan(argv: list[str]) -> None:
    parser = CommandParser(
        "trimtab plan", "What memory and time a training job needs: trimtab plan VERB [its options]."
    )
    parser.add_argument("verb", help=f"the job: {', '.join(TRAINED)}")
    parser.add_argument("--on", default="here", metavar="DEVICE", help="here, CPU or a name such as H200 or A100-80G")
    parser.add_argument("--device_memory", type=float, metavar="GIB", help="instead of what the device has")
    parser.add_argument("--nodes", type=int, metavar="N", help="machines; 1 with --gpus")
    parser.add_argument("--gpus", type=int, metavar="M", help="devices of each machine; 8 with --nodes")
    parser.add_argument(
        "--network", type=float, default=100.0, metavar="GB/S", help="in and out of a machine, all its cards together"
    )
    own, job_words = parser.parse_known_args(argv)
    job = TRAINED.get(own.verb)
    if job is None:
        raise UserError(f"{own.verb!r} is no training job; the jobs are {', '.join(TRAINED)}")
    clustered = own.nodes is not None or own.gpus is not None
    options, _ = settle(parse(job, [*(["--ray"] if clustered and issubclass(job, RLOptions) else []), *job_words]))
    assert isinstance(options, Planned), "every training job has a model"
    if options.rehearse:
        raise UserError(f"--rehearse measures, and plans nothing: trimtab {own.verb} with the same options does that")
    if not options.pretrain:
        raise UserError(
            "--pretrain is missing: give a hub name, a model folder (its config.json is enough), or 7B or so"
        )
    if clustered:
        _check_cluster(own)
    with tempfile.TemporaryDirectory() as folder:
        from trimtab.plan.workload import with_sized_models

        _print_plan(options, with_sized_models(options, Path(folder)), own, clustered=clustered)


def _check_cluster(own: argparse.Namespace) -> None:
    for name in ("nodes", "gpus"):
        if getattr(own, name) is not None and (complaint := Limits(at_least=1).complaint(getattr(own, name))):
            raise UserError(f"--{name} {complaint}")
    if not (math.isfinite(own.network) and own.network > 0):
        raise UserError(f"--network is {own.network:g}: it must be a number of GB/s above 0")


def _print_plan(typed: Planned, options: Planned, own: argparse.Namespace, *, clustered: bool) -> None:
    from trimtab.config.training_options import PASS_SIZES
    from trimtab.distributed.device import find_device
    from trimtab.models.pretrained import quiet_transformers
    from trimtab.plan.hardware import ClusterHardware, named, shared
    from trimtab.plan.planner import make_plan, plan_layouts
    from trimtab.plan.printer import lines
    from trimtab.plan.workload import supposed

    quiet_transformers()
    hardware = named(own.on, find_device(), own.device_memory)
    with trusting(options.trust_remote_code):
        if clustered:
            made = plan_layouts(options, ClusterHardware(hardware, own.nodes or 1, own.gpus or 8, own.network * 1e9))
        else:
            several = options.nproc > 1
            propose = not options.given & PASS_SIZES if several else options.fit_memory is not False
            here = shared(hardware, options.nproc)
            made = make_plan(options, here, supposed(options), options.nproc, propose=propose)
        told = lines(made, typed.pretrain)
    print("\n".join(told))


def check(argv: Sequence[str]) -> int:
    """Run the job with --check_only, in the processes that its options name."""
    if argv and argv[0] in ("-h", "--help"):
        checks = "\n".join(f"  {name:<15}{line}" for name, line in CHECKS.items())
        print(
            "usage: trimtab check VERB [the options of the job]\n\nLoad the model of a training job and run every "
            f"check on it; nothing is trained or written.\nVERB: {', '.join(TRAINED)}\n\n{checks}\n\n"
            "Exit code 0: all passed, warnings aside; 2: one failed. --skip_checks NAME,NAME leaves checks out.\n"
            "trimtab VERB --help lists the options of a job."
        )
        return 0
    if not argv or argv[0] not in TRAINED:
        named = f"{argv[0]!r} is no training job" if argv else "name a training job, as in trimtab check sft"
        raise UserError(f"{named}; the jobs are {', '.join(TRAINED)}")
    return main([*argv, "--check_only"])


# ---- trimtab jobs [option ...] -- COMMAND: a batch file for each seed (and setting) of a command. A command with --ray
# gets a Ray of its own on the machines of its job.

WRITTEN = ("save_path", "ckpt_path", "output_path")


def jobs(argv: list[str]) -> None:
    own, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    if not command and {"-h", "--help"}.isdisjoint(own):
        raise UserError(
            "there is no command: write it after --, for example trimtab jobs --seeds 1-5 -- trimtab sft ..."
        )
    options = _jobs_parser().parse_args(own)
    verbs = {verb: f"trimtab.cli.main {verb}" if ":" in place else place for verb, (place, _) in VERBS.items()}
    typed = read_command(command, verbs)
    name = options.name or re.split(r"[. ]", typed.module)[-1].replace("-", "_")
    varied = _varied(options.vary)
    made = _with_own_folders(spread(typed, name, _seeds(options.seeds), varied, options.port), verbs, ["seed", *varied])
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
    for path in _write_jobs(Path(options.output).expanduser(), texts, shell=options.shell):
        print(path)


def _jobs_parser() -> CommandParser:
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


def _with_own_folders(jobs: list[Job], verbs: dict[str, str], told_apart_by: list[str]) -> list[Job]:
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


def _write_jobs(folder: Path, texts: dict[Job, str], *, shell: bool) -> list[Path]:
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


# ---- data


def kk_data(argv: Sequence[str]) -> None:
    parser = CommandParser(
        "trimtab kk-data",
        "Turn knights-and-knaves puzzles into src/tgt rows with the prompt of PaddleNLP's guide.",
    )
    parser.add_argument(
        "rows", metavar="ROWS", help="puzzles: a parquet or JSONL file, a folder or a hub name; or several"
    )
    parser.add_argument("file", metavar="FILE.jsonl", help="where the rows go; what is there is replaced")
    parser.add_argument("--split", default="train", help="which split of ROWS, where there are several")
    parser.add_argument("--max_samples", type=int, help="only the first N rows; unset: all")
    options = parser.parse_args(argv)
    if Path(options.file).suffix != ".jsonl":
        raise UserError(f"{options.file}: the rows are JSON lines; give a file that ends in .jsonl")
    if options.max_samples is not None and options.max_samples < 1:
        raise UserError(f"--max_samples {options.max_samples}: give at least 1")

    from trimtab.data.conversion import convert

    path = Path(options.file).expanduser()
    count = convert(options.rows, path, split=options.split, max_samples=options.max_samples)
    print(f"{count:,} puzzles in {path}")
