"""A plan for a split job in words: layouts with their memory and time, the parts of both in the one that is proposed or
asked for, and the flags to paste."""

from collections.abc import Iterable

from trimtab.plan.hardware import GIB, Machines
from trimtab.plan.memory import FILL, PHASES, Memory
from trimtab.plan.plan import budget_words
from trimtab.plan.speed import SPLIT, assumptions
from trimtab.plan.split.candidates import words_of
from trimtab.plan.split.plan import SplitPlan, SplitPlanner, Tried, best
from trimtab.plan.split.step import PARTS

SHOWN = 4  # layouts beside the one that is proposed
AS_ASKED = "as the options say"
MORE_MACHINES = 4  # times as many are tried where nothing fits


def lines(plan: SplitPlan, pretrain: str) -> list[str]:
    """`pretrain`: what the model is called."""
    planner, machines = plan.planner, plan.planner.machines
    hardware, options = machines.hardware, planner.options
    shown = plan.asked or plan.proposed
    nodes = "1 machine" if machines.nodes == 1 else f"{machines.nodes} machines"
    told = [
        f"{options.verb} of {pretrain} on {nodes} with {machines.gpus} x {hardware.name}, "
        f"{hardware.memory / GIB:.1f} GiB each",
        "",
        f"layouts, and about how many seconds a step of {planner.work.tokens:,} tokens takes",
        _row("", "GiB", [*PARTS, "whole"]),
    ]
    if plan.asked is not None:
        told.append(_line(AS_ASKED, plan.asked))
    told += [_line(_called(found), found) for found in compared(plan)]
    told += ["", f"{AS_ASKED if plan.asked else 'proposed'}: {shown.share.split.in_words()}", *_memory(shown), ""]
    told += _verdict(plan, shown)
    told += ["", f"assumed: {assumptions(hardware, options.bf16, SPLIT)}; {machines.in_words()}"]
    return told


def compared(plan: SplitPlan) -> list[Tried]:
    """The proposed layout, and the fastest that differ from it in how a model is split."""
    fitting = sorted((found for found in plan.planner.all if found.fits), key=lambda found: found.whole)
    found = {plan.proposed.share.split: plan.proposed}
    for tried in fitting:
        found.setdefault(tried.share.split, tried)
    return list(found.values())[: 1 + SHOWN]


def _verdict(plan: SplitPlan, shown: Tried) -> list[str]:
    if not plan.proposed.fits:
        return what_would(plan.planner, plan.proposed)
    told = []
    if not shown.fits:
        told.append(f"does not fit: at most {FILL:.0%} of the memory should be used; this does, {_seconds(plan)}")
    elif plan.asked and plan.proposed.whole < 0.98 * shown.whole:
        told.append(f"fits; faster, {_seconds(plan)}")
    elif plan.asked:
        return ["fits"]
    return [*told, f"  {' '.join(flags(plan.proposed))}"]


def _seconds(plan: SplitPlan) -> str:
    return f"{plan.proposed.whole:.3g} s a step:"


def flags(tried: Tried) -> list[str]:
    """To paste: how the model is split, and the size of the passes."""
    options = tried.share.options
    own = -(-tried.memory.tokens // tried.share.split.context)  # a process's part of a row
    return [*words_of(tried.changes, options), *budget_words(options, own)]


def what_would(planner: SplitPlanner, nearest: Tried) -> list[str]:
    """Where nothing fits."""
    machines = planner.machines
    told = [
        f"nothing fits: the least is {nearest.memory.peak / GIB:.1f} GiB a device, of which at most {FILL:.0%} of "
        f"{machines.hardware.memory / GIB:.1f} should be used: {' '.join(flags(nearest))}"
    ]
    for times in (2, MORE_MACHINES):
        more = Machines(machines.hardware, machines.nodes * times, machines.gpus, machines.network)
        found = best(planner.on(more).all)
        if found.fits:
            told.append(f"  on {more.nodes} machines this fits: {' '.join(flags(found))}")
            break
    if not planner.options.lora_rank:
        told.append("  adapters need no optimiser state of the model's own weights: --lora_rank 16")
    if not planner.options.bf16:
        told.append("  half of the working weights and activations: --bf16")
    return told


def _called(tried: Tried) -> str:
    extras = [name for name in ("adam_offload", "offload_activations") if tried.changes.get(name)]
    checkpointing = ["checkpointing"] if tried.share.options.gradient_checkpointing else []
    return ", ".join([f"stage {tried.share.split.zero_stage}", tried.share.split.in_words(), *checkpointing, *extras])


def _line(called: str, tried: Tried) -> str:
    memory = f"{tried.memory.peak / GIB:.0f}{'' if tried.fits else ', no room'}"
    return _row(called, memory, [f"{value:.3g}" for value in (*tried.seconds.values(), tried.whole)])


def _row(called: str, memory: str, seconds: Iterable[str]) -> str:
    return f"  {called:<64}{memory:>12}{''.join(f'{part:>11}' for part in seconds)}"


def _memory(tried: Tried) -> list[str]:
    memory, share = tried.memory, tried.share
    told = ["memory of a process, GiB", *memory_lines(memory)]
    passes = share.passes(memory.tokens)
    row = "a row is" if share.split.context == 1 else f"a row, of which every process has 1 / {share.split.context}, is"
    told.append(f"  a step is {passes} pass{'es' if passes > 1 else ''}, {row} up to {memory.tokens:,} tokens")
    return told


def memory_lines(memory: Memory) -> list[str]:
    told = []
    for part in memory.parts:
        when = "" if part.phases == PHASES else f"   in the {' and '.join(part.phases)}"
        if part.size:
            told.append(f"  {part.name:<62}{part.size / GIB:9.2f}{when}")
    busiest = max(PHASES, key=memory.during)
    return [*told, f"  {'peak':<62}{memory.peak / GIB:9.2f}   in the {busiest}"]
