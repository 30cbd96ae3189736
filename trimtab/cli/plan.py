"""`trimtab plan VERB [the job's own options] --on DEVICE`: what the job will need there, before it is started; with
`--nodes N --gpus M` on machines with such devices."""

import argparse
import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

from trimtab.cli.main import CommandParser, command_main
from trimtab.config.jobs import TRAINED, SupervisedOptions
from trimtab.config.option import Limits
from trimtab.config.parser import parse
from trimtab.config.resolved_config import settle
from trimtab.config.rl_jobs import RLOptions
from trimtab.data.hub import trusting
from trimtab.errors import UserError

Planned = SupervisedOptions | RLOptions
_MODELS = ("pretrain", "reward_pretrain", "critic_pretrain", "ref_pretrain", "teacher_model")


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
    if not options.pretrain:
        raise UserError(
            "--pretrain is missing: give a hub name, a model folder (its config.json is enough), or 7B or so"
        )
    if clustered:
        _check_cluster(own)
    with tempfile.TemporaryDirectory() as folder:
        _told(options, _with_shapes(options, Path(folder)), own, clustered=clustered)


def _check_cluster(own: argparse.Namespace) -> None:
    for name in ("nodes", "gpus"):
        if getattr(own, name) is not None and (complaint := Limits(at_least=1).complaint(getattr(own, name))):
            raise UserError(f"--{name} {complaint}")
    if not (math.isfinite(own.network) and own.network > 0):
        raise UserError(f"--network is {own.network:g}: it must be a number of GB/s above 0")


def _with_shapes(options: Planned, folder: Path) -> Planned:
    """Models that are given by their size alone get a folder with their configuration."""
    from trimtab.config.data_options import listed
    from trimtab.plan import workload

    changes: dict[str, Any] = {}
    for name in _MODELS:
        named = listed(getattr(options, name, None))
        if any(model in workload.SIZES for model in named):
            found = [
                workload.write_config(m, folder) if m in workload.SIZES and not Path(m).exists() else m for m in named
            ]
            changes[name] = ",".join(found)
    return dataclasses.replace(options, **changes)


def _told(typed: Planned, options: Planned, own: argparse.Namespace, *, clustered: bool) -> None:
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


main = command_main("plan", plan)

if __name__ == "__main__":
    raise SystemExit(main())
