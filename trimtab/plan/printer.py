"""A plan as text: layouts with memory and time, the parts of both, a verdict, and flags to paste."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from trimtab.config.rl_jobs import RLOptions
from trimtab.plan.hardware import GIB, LINK_SHARE
from trimtab.plan.layouts import APART, BUILTIN, HYBRID, PAIRS, cluster_candidates, layout_flags, sizes_of
from trimtab.plan.memory import FILL, PHASES, Memory
from trimtab.plan.planner import AS_ASKED, Candidate, Plan, best, flags
from trimtab.plan.speed import BANDWIDTH_SHARE, CAUSES, COMPILED
from trimtab.plan.speed import PHASES as TIMED
from trimtab.plan.workload import budget_changes

SHOWN = 4  # layouts in addition to the proposed one
MORE_MACHINES = (2, 4)  # factors tried if nothing fits
MATTERS = 0.02  # of an iteration; smaller differences are not mentioned


def lines(plan: Plan, pretrain: str) -> list[str]:
    """The lines of a plan; `pretrain`: the model's name."""
    machines, hardware = plan.planner.machines, plan.hardware
    called = f"{plan.options.verb} of {pretrain}"
    if not plan.candidates:
        processes, size = machines.devices, f"{hardware.memory / GIB:.1f} GiB"
        if processes == 1:
            text = [f"{called} on {hardware.name}, {size}", "", "memory, GiB"]
        else:
            split = f"{plan.shown.split}, --zero_stage {plan.options.zero_stage}"
            text = [f"{called} in {processes} processes ({split}), each on {hardware.name} with {size}"]
            text += ["", "memory of a process, GiB"]
        logits = plan.held.head_logits() if processes == 1 else 0
        head = [f"  {'(of it the chunked head, fp32 logits':<46}{logits / GIB:9.2f})"] if logits else []
        text += [*_parts(plan.memory, 46 if processes == 1 else 62, head), "", *_verdict(plan)]
        return text if plan.time is None else [*text, "", *_times(plan), f"  assumed: {_assumed(plan)}"]
    nodes = "1 machine" if machines.nodes == 1 else f"{machines.nodes} machines"
    text = [f"{called} on {nodes} with {machines.gpus} x {hardware.name}, {hardware.memory / GIB:.1f} GiB each", ""]
    text += [*(_cluster(plan) if isinstance(plan.options, RLOptions) else _splits(plan)), ""]
    links = (
        f"{LINK_SHARE:.0%} used of {(hardware.link or 0) / 1e9:g} GB/s between devices of a machine, "
        f"{machines.network / 1e9:g} GB/s in and out of a machine, {hardware.host_link / 1e9:g} GB/s to main memory"
    )
    turns = "; roles work in turn" if isinstance(plan.options, RLOptions) else ""
    return [*text, f"assumed: {_assumed(plan)}; {links}{turns}"]


def _parts(memory: Memory, width: int, extra: list[str], indent: str = "  ") -> list[str]:
    text = []
    for part in memory.parts:
        when = "" if part.phases == PHASES else f"   in the {' and '.join(part.phases)}"
        if part.size:
            text.append(f"{indent}{part.name:<{width}}{part.size / GIB:9.2f}{when}")
    return [*text, *extra, f"{indent}{'peak':<{width}}{memory.peak / GIB:9.2f}   in the {memory.busiest}"]


def _verdict(plan: Plan) -> list[str]:
    """Whether a job on one device or under a launcher fits, and the flags."""
    memory, proposed = plan.memory, plan.planner.propose
    share = memory.peak / plan.hardware.memory
    if not plan.fits:
        least = "even with the smallest passes" if proposed else f"with passes of {memory.tokens:,} tokens"
        taken = f"{share:.0%} of the memory {least}, and at most {FILL:.0%} should be used"
        return [f"does not fit: {taken}; {plan.flags_that_fit()}"]
    text = [
        f"fits: {'proposed ' if proposed else ''}passes of {memory.tokens:,} tokens fill {share:.0%} of the memory",
        *([f"  {plan.recomputation()}"] if plan.recomputation() else []),
    ]
    return [*text, f"  {' '.join(flags(plan.changes()))}"] if proposed else text


def _times(plan: Plan) -> list[str]:
    time = plan.time
    assert time is not None
    step = "an iteration" if isinstance(plan.options, RLOptions) else "a step"
    text = [f"time of {step} of {time.tokens:,} tokens, about"]
    text += [f"  {phase:<46}{seconds:9.3g} s" for phase, seconds in time.phases.items()]
    return [*text, f"  {'whole':<46}{time.whole:9.3g} s   {time.tokens / time.whole:,.0f} tokens/s"]


def _assumed(plan: Plan) -> str:
    clock, hardware, bf16 = plan.planner.clock, plan.hardware, plan.options.bf16
    assert clock is not None
    rates = clock.rates
    how = " (layers are compiled)" if rates is COMPILED else ""
    return (
        f"{clock.flops / 1e12:,.3g} TFLOP/s in {'bf16' if bf16 else 'fp32'}, {rates.arithmetic:.0%} of it used in "
        f"training and {rates.scoring:.0%} in scoring; {(hardware.bandwidth or 0) / 1e12:,.3g} TB/s of memory traffic, "
        f"{BANDWIDTH_SHARE:.0%} of it used, activations {rates.forward:g} times written or read in a forward pass and "
        f"{rates.forward + rates.backward:g} times in an update{how}; every sample as long as it may be"
    )


# ---- layouts of a supervised job


def _splits(plan: Plan) -> list[str]:
    shown, proposed = plan.shown, plan.proposed
    assert proposed is not None
    held, memory = plan.held, plan.memory
    text = [f"layouts, and about how many seconds a step of {plan.planner.work.tokens:,} tokens takes"]
    text.append(_split_row("", "GiB", [*CAUSES, "whole"]))
    text += [_split_line(AS_ASKED, plan.asked)] if plan.asked else []
    text += [_split_line(_called(found), found) for found in compared(plan)]
    text += ["", f"{AS_ASKED if plan.asked else 'proposed'}: {shown.split}", "memory of a process, GiB"]
    passes, context = held.passes(memory.tokens), shown.split.context
    row = "a row is" if context == 1 else f"a row, of which every process has 1 / {context}, is"
    text += _parts(memory, 62, [])
    text += [f"  a step is {passes} pass{'es' if passes > 1 else ''}, {row} up to {memory.tokens:,} tokens", ""]
    if not proposed.fits:
        return [*text, *_what_would_fit(plan)]
    if not shown.fits:
        text.append(f"does not fit: at most {FILL:.0%} of the memory should be used; this does, ")
    elif plan.asked and proposed.whole < 0.98 * shown.whole:
        text.append("fits; faster, ")
    elif plan.asked:
        return [*text, "fits"]
    if plan.asked:
        text[-1] += f"{proposed.whole:.3g} s a step:"
    return [*text, f"  {' '.join(split_flags(proposed))}"]


def compared(plan: Plan) -> list[Candidate]:
    """The proposed layout, and the fastest ones with other splits."""
    assert plan.proposed is not None
    found = {plan.proposed.split: plan.proposed}
    for tried in sorted((found for found in plan.candidates if found.fits), key=lambda found: found.whole):
        found.setdefault(tried.split, tried)
    return list(found.values())[: 1 + SHOWN]


def split_flags(tried: Candidate) -> list[str]:
    """Flags to paste: the split, without defaults, and the micro-batch size."""
    job: type[Any] = type(tried.options)
    defaults = job()
    changes = {name: value for name, value in tried.changes.items() if value != getattr(defaults, name)}
    own = -(-tried.first[1].tokens // tried.split.context)  # one process's tokens of a row
    return flags(changes | budget_changes(tried.options, own))


def _what_would_fit(plan: Plan) -> list[str]:
    planner, machines, nearest = plan.planner, plan.planner.machines, plan.proposed
    assert nearest is not None
    text = [
        f"nothing fits: the least is {nearest.peak / GIB:.1f} GiB a device, of which at most {FILL:.0%} of "
        f"{machines.hardware.memory / GIB:.1f} should be used: {' '.join(split_flags(nearest))}"
    ]
    for times in MORE_MACHINES:
        more = replace(machines, nodes=machines.nodes * times)
        found = best(planner.changed(more).splits)
        if found.fits:
            text.append(f"  on {more.nodes} machines this fits: {' '.join(split_flags(found))}")
            break
    if not planner.options.lora_rank:
        text.append("  adapters need no optimizer state of the model's own weights: --lora_rank 16")
    if not planner.options.bf16:
        text.append("  half of the working weights and activations: --bf16")
    return text


def _called(tried: Candidate) -> str:
    extras = [name for name in ("adam_offload", "offload_activations") if tried.changes.get(name)]
    checkpointing = ["checkpointing"] if tried.options.gradient_checkpointing else []
    return ", ".join([f"stage {tried.split.zero_stage}", str(tried.split), *checkpointing, *extras])


def _split_line(called: str, tried: Candidate) -> str:
    assert tried.time is not None
    return _split_row(called, _peak(tried), [f"{v:.3g}" for v in (*map(tried.time.due_to, CAUSES), tried.whole)])


def _split_row(called: str, memory: str, seconds: Iterable[str]) -> str:
    return f"  {called:<64}{memory:>12}{''.join(f'{part:>11}' for part in seconds)}"


def _peak(tried: Candidate) -> str:
    return f"{tried.peak / GIB:.0f}{'' if tried.fits else ', no room'}"


# ---- layouts of an RL job


def _cluster(plan: Plan) -> list[str]:
    shown = plan.shown
    assert shown.time is not None
    text = [f"layouts, and about how many seconds an iteration of {shown.time.tokens:,} tokens takes"]
    text.append(_cluster_row("", "devices", "GiB a device", [*TIMED, "whole"]))
    text += [_cluster_line(tried) for tried in ([plan.asked] if plan.asked else []) + plan.candidates]
    time = shown.time
    text += ["", *_memory_of_pools(shown), ""]
    text.append(
        f"weights to the engines: {plan.planner.models[0].weights / GIB:.1f} GiB over {time.link}, "
        f"{time.phases['sync']:.2g} s; sent between processes in passes: {time.due_to('sending'):.0f} s, of which "
        f"arithmetic hides all but {time.due_to('unhidden'):.0f} s"
    )
    found = list(conclusions(plan))
    return [*text, *(["", "what follows", *(f"  - {sentence}" for sentence in found)] if found else [])]


def _cluster_line(tried: Candidate) -> str:
    assert tried.layout is not None and tried.time is not None
    engines, sizes = tried.layout.engines, " : ".join(map(str, sizes_of(tried.layout)))
    if engines is not None and engines.tensor_parallel > 1:
        sizes += f", engines of {engines.tensor_parallel}"
    seconds = [*(tried.time.phases.get(part, 0.0) for part in TIMED), tried.whole]
    return _cluster_row(tried.kind, sizes, _peak(tried), map(_seconds, seconds))


def _cluster_row(kind: str, devices: str, memory: str, seconds: Iterable[str]) -> str:
    return f"  {kind:<20}{devices:<36}{memory:>14}{''.join(f'{part:>9}' for part in seconds)}"


def _seconds(value: float) -> str:
    if math.isinf(value):
        return "-"
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _memory_of_pools(tried: Candidate) -> list[str]:
    """The memory of a device of every pool, part by part."""
    assert tried.layout is not None and tried.engine is not None
    text = [f"memory a device, GiB: {tried.kind}"]
    for pool, (held, memory) in zip(tried.layout.pools, tried.pools.values()):
        fits = "fits" if memory.fits(held.room) else f"does not fit: at most {FILL:.0%} should be used"
        peak = f"{memory.peak / GIB:.1f} in the {memory.busiest}"
        text.append(f"  {' + '.join(pool.units)}, {pool.size} devices: {peak}, {fits}")
        text += _parts(memory, 62, [], indent="    ")[:-1]
        if held.learners:
            passes = held.passes(memory.tokens)
            text.append(f"    a step is {passes} pass{'es' if passes > 1 else ''} of up to {memory.tokens:,} tokens")
    engine, engines = tried.engine, tried.layout.engines
    if engines is not None:
        text.append(
            f"  {engines.number} x engine, {engines.tensor_parallel} x device each: weights {engine.weights / GIB:.1f}"
            f", keys and values {engine.keys_and_values / GIB:.1f}; {engine.slots} answers at once each"
        )
    if engines is not None and engines.pool is not None:
        text.append(f"    --vllm_gpu_memory_utilization {engine.utilization:g}")
    return text if tried.kind == AS_ASKED else [*text, f"  {layout_flags(tried.layout)}"]


# ---- conclusions: each sentence compares two planned settings


def conclusions(plan: Plan) -> Iterator[str]:
    """Conclusions, the most important first."""
    yield from _about_kinds(plan) if plan.proposed and plan.proposed.fits else _about_missing_memory(plan)
    yield from _about_devices(plan)
    yield from _about_settings(plan)


def _about_kinds(plan: Plan) -> Iterator[str]:
    first = plan.proposed
    assert first is not None and first.layout is not None
    every = [*([plan.asked] if plan.asked else []), *plan.candidates]
    others = [found for found in every if found.fits and found.kind != first.kind]
    others = [found for found in others if abs(found.whole - first.whole) > MATTERS * max(found.whole, first.whole)]
    if others:
        second = best(others)
        why = ": no device waits while another role works" if first.kind in (HYBRID, BUILTIN) else ""
        words = "" if first is plan.shown else f"; {layout_flags(first.layout)}"
        yield f"{first.kind}: {first.whole:.0f} s, against {second.whole:.0f} s of {_kind(second)}{why}{words}"
    hybrid = next(found for found in plan.candidates if found.kind == HYBRID)
    if not hybrid.fits:
        memory = hybrid.first[1]
        text = f"hybrid does not fit: {memory.peak / GIB:.0f} GiB a device in the {memory.busiest}"
        yield f"{text}; more machines, or roles apart"


def _about_missing_memory(plan: Plan) -> Iterator[str]:
    options = plan.options
    ways: list[dict[str, Any]] = [{"zero_stage": 3}, {"adam_offload": True}, {"zero_stage": 3, "adam_offload": True}]
    for way in ways:
        if all(getattr(options, name) == value for name, value in way.items()):
            continue
        first = best(plan.planner.changed(**way).best_per_kind())
        if first.fits:
            assert first.layout is not None
            words = f"nothing fits; with {' '.join(flags(way))} {_kind(first)} does, {first.whole:.0f} s"
            yield f"{words}; {layout_flags(first.layout)}"
            return
    more = [] if options.gradient_checkpointing else ["--gradient_checkpointing"]
    more += [] if options.lora_rank else ["--lora_rank 16"]
    yield f"nothing fits: try {', '.join(['more machines', *more])}"


def _about_devices(plan: Plan) -> Iterator[str]:
    """The best distribution of devices over roles without shared devices, compared with equal parts."""
    planner = plan.planner
    found = next((tried for tried in plan.candidates if tried.kind in (PAIRS, APART) and tried.fits), None)
    if found is None:
        return
    assert found.layout is not None and found.layout.engines is not None
    layouts = cluster_candidates(planner.units, planner.machines, found.layout.engines.tensor_parallel)[found.kind]
    even = [layout for layout in layouts if len(set(sizes_of(layout))) == 1]
    names = " : ".join([*(" + ".join(pool.units) for pool in found.layout.pools), "engines"])
    split = " : ".join(map(str, sizes_of(found.layout)))
    text = f"devices of {names} are best {split}, {found.whole:.0f} s"
    if even:
        equal = planner.tried(found.kind, even[0], sleep=False)
        fits = "" if equal.fits else ", which does not fit"
        same = sizes_of(found.layout) == sizes_of(even[0])
        text += ", which is equal parts" if same else f"; equal parts take {equal.whole:.0f} s{fits}"
    yield text


def _about_settings(plan: Plan) -> Iterator[str]:
    """The effect of changing one option in the shown layout."""
    shown, options = plan.shown, plan.options
    assert isinstance(options, RLOptions) and shown.layout is not None and shown.time is not None
    sent, unhidden = shown.time.due_to("sending"), shown.time.due_to("unhidden")

    def again(**settings: Any) -> Candidate:
        assert shown.layout is not None and shown.time is not None
        return plan.planner.changed(**settings).tried(shown.kind, shown.layout, sleep=shown.time.phases["moving"] > 0)

    if shown.layout.engines and options.n_samples_per_prompt > 1 and not options.enable_prefix_caching:
        saved = shown.whole - again(enable_prefix_caching=True).whole
        if saved > MATTERS * shown.whole:
            yield (
                f"--enable_prefix_caching: a prompt is read once, not {options.n_samples_per_prompt} times, and its "
                f"keys and values are kept once: {saved:.0f} s less"
            )
    if options.adam_offload:
        without = again(adam_offload=False)
        if without.fits:
            yield (
                f"without --adam_offload it fits too and takes {shown.whole - without.whole:.0f} s less: what "
                f"processes send, {sent:.0f} s, is overlapped with arithmetic but for {unhidden:.0f} s; an optimizer "
                "in main memory is not"
            )
    elif unhidden > MATTERS * shown.whole:
        yield (
            f"of {sent:.0f} s of sending between processes {unhidden:.0f} s are not hidden by arithmetic: larger "
            "passes, or fewer processes"
        )


def _kind(tried: Candidate) -> str:
    assert tried.layout is not None
    sizes = sizes_of(tried.layout)
    return tried.kind if len(sizes) == 1 else f"{tried.kind} ({' : '.join(map(str, sizes))})"
