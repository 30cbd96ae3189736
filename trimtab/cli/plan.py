"""`trimtab plan VERB [the job's own options] --on DEVICE`: what the job will need there, before it is started."""

import sys
from collections.abc import Sequence

from trimtab.cli.command_parser import CommandParser
from trimtab.cli.run import guarded
from trimtab.config.checks import settle
from trimtab.config.groups import PretrainOptions
from trimtab.config.jobs import TRAINED
from trimtab.config.parse import parse
from trimtab.config.rl_jobs import RLOptions
from trimtab.data.hub import trusting
from trimtab.errors import UserError

_SEVERAL = "a job over {} processes is not planned: leave out --nproc and what implies it"


def main(argv: Sequence[str] | None = None) -> int:
    return guarded("trimtab plan", lambda: plan(list(sys.argv[1:] if argv is None else argv)))


def plan(argv: list[str]) -> None:
    parser = CommandParser(
        "trimtab plan", "What memory and time a training job needs: trimtab plan VERB [its options]."
    )
    parser.add_argument("verb", help=f"the job: {', '.join(TRAINED)}")
    parser.add_argument("--on", default="here", metavar="DEVICE", help="here, CPU or a name such as H200 or A100-80G")
    parser.add_argument("--device_memory", type=float, metavar="GIB", help="instead of what the device has")
    own, job_words = parser.parse_known_args(argv)
    job = TRAINED.get(own.verb)
    if job is None:
        raise UserError(f"{own.verb!r} is no training job; the jobs are {', '.join(TRAINED)}")
    options, _ = settle(parse(job, job_words))
    assert isinstance(options, PretrainOptions), "every training job has a model"
    if not options.pretrain:
        raise UserError("--pretrain is missing: give a hub name or a model folder (its config.json is enough)")
    if options.nproc > 1 and not isinstance(options, RLOptions):
        raise UserError(_SEVERAL.format(options.nproc))

    from trimtab.distributed.device import find_device
    from trimtab.models.hugging_face import quiet_transformers
    from trimtab.train.plan.gathering import in_words
    from trimtab.train.plan.hardware import named
    from trimtab.train.plan.plan import make_plan
    from trimtab.train.plan.work import supposed

    quiet_transformers()
    hardware = named(own.on, find_device(), own.device_memory)
    with trusting(options.trust_remote_code):
        if options.nproc > 1:
            sharers = 1 if hardware.accelerator else options.nproc
            _, told = in_words(options, options.nproc, hardware, sharers)
            raise UserError(f"{_SEVERAL.format(options.nproc)}; known is only this: {told}")
        made = make_plan(options, hardware, supposed(options), propose=options.fit_memory is not False)
    print("\n".join(made.lines()))


if __name__ == "__main__":
    raise SystemExit(main())
