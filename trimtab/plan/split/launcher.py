"""A plan for the processes of one machine (--nproc), as the options split the job over them; and which flags would make
it fit."""

from trimtab.config.groups import PASS_SIZES
from trimtab.errors import UserError
from trimtab.models.load import TrainedModelOptions
from trimtab.models.pretrained import first_line
from trimtab.plan import advice
from trimtab.plan.hardware import GIB, Hardware, shared
from trimtab.plan.memory import FILL, Memory
from trimtab.plan.plan import budget_words, make_plan, refuse_unplannable
from trimtab.plan.split.plan import share_of
from trimtab.plan.split.share import ProcessShare
from trimtab.plan.split.telling import memory_lines
from trimtab.plan.workload import Work, supposed


def planned_memory(
    options: TrainedModelOptions, hardware: Hardware, work: Work, processes: int, *, propose: bool
) -> tuple[ProcessShare, Memory]:
    """Of one of several processes. `hardware`: its memory is what one of them has."""
    refuse_unplannable(options)
    try:
        share = share_of(options, hardware, work, processes)
        return share, share.proposed() if propose else share.given()
    except RuntimeError as error:  # a model that looks at contents, and here there are none
        raise UserError(f"--pretrain {options.pretrain} cannot be planned: {first_line(error)}") from error


def lines(typed: TrainedModelOptions, options: TrainedModelOptions, hardware: Hardware) -> list[str]:
    """`typed`: the options in the user's own words."""
    processes, work = options.nproc, supposed(options)
    hardware = shared(hardware, processes)
    propose = not options.given & PASS_SIZES
    share, memory = planned_memory(options, hardware, work, processes, propose=propose)
    split = f"{share.split.in_words()}, --zero_stage {options.zero_stage}"
    told = [
        f"{options.verb} of {typed.pretrain} in {processes} processes ({split}), each on {hardware.name} with "
        f"{hardware.memory / GIB:.1f} GiB",
        "",
        "memory of a process, GiB",
        *memory_lines(memory),
        "",
    ]
    filled = memory.peak / hardware.memory
    if memory.peak <= share.room:
        told.append(f"fits: {'proposed ' if propose else ''}passes of {memory.tokens:,} tokens fill {filled:.0%} of it")
        own = -(-memory.tokens // share.split.context)  # a process's part of a row
        return [*told, *([f"  {' '.join(budget_words(options, own))}"] if propose else [])]
    found = flags_that_fit(options, hardware, work, processes, propose=propose)
    return [*told, f"does not fit: {filled:.0%} of it, and at most {FILL:.0%} should be used; {found}"]


def flags_that_fit(
    options: TrainedModelOptions, hardware: Hardware, work: Work, processes: int, *, propose: bool
) -> str:
    """`hardware`: its memory is what one process has. `propose`: passes are as small as they must be."""

    def peak(tried: TrainedModelOptions) -> int:
        if processes == 1:
            return make_plan(tried, hardware, work, propose=propose).memory.peak
        return planned_memory(tried, hardware, work, processes, propose=propose)[1].peak

    known = advice.changes(options, processes, accelerator=hardware.accelerator)
    ways = [way for way in known if not (propose and way.keys() & PASS_SIZES)]
    return advice.in_words(advice.that_fit(options, ways, peak, int(FILL * hardware.memory)))
