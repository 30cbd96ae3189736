"""What follows from the figures of a plan: each sentence compares two settings that were both planned."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trimtab.plan.cluster.candidates import APART, BUILTIN, HYBRID, PAIRS, candidates, sizes_of, words_of
from trimtab.plan.cluster.plan import ClusterPlan, Planner, Tried

MATTERS = 0.02  # of an iteration: less is not worth a sentence


def advice(plan: ClusterPlan) -> list[str]:
    """Sentences, the most important first."""
    return [*_about_the_layout(plan), *_about_the_split(plan), *_about_settings(plan)]


def _about_the_layout(plan: ClusterPlan) -> Iterator[str]:
    fitting = [found for found in plan.kinds if found.fits]
    if not fitting:
        yield from _about_what_is_missing(plan)
        return
    first = min(fitting, key=lambda found: found.whole)
    others = [found for found in plan.tried if found.fits and found.kind != first.kind and _matters(found, first)]
    if others:
        second = min(others, key=lambda found: found.whole)
        why = ": no device waits while another role works" if first.kind in (HYBRID, BUILTIN) else ""
        words = "" if first is plan.shown else f"; {words_of(first.layout)}"
        yield f"{first.kind}: {first.whole:.0f} s, against {second.whole:.0f} s of {_called(second)}{why}{words}"
    hybrid = next(found for found in plan.kinds if found.kind == HYBRID)
    if not hybrid.fits:
        share = hybrid.pools[hybrid.layout.pools[0].name]
        yield (
            f"hybrid does not fit: {share.memory.peak / 2**30:.0f} GiB a device in the {share.busiest}; more machines, "
            "or roles apart"
        )


def _about_what_is_missing(plan: ClusterPlan) -> Iterator[str]:
    options = plan.planner.options
    ways: dict[str, dict[str, Any]] = {
        "--zero_stage 3": {"zero_stage": 3} if options.zero_stage < 3 else {},
        "--adam_offload": {"adam_offload": True} if not options.adam_offload else {},
        "--zero_stage 3 --adam_offload": {"zero_stage": 3, "adam_offload": True},
    }
    for words, settings in ways.items():
        if not settings:
            continue
        found = [tried for tried in plan.planner.changed(**settings).best_of_each_kind() if tried.fits]
        if found:
            first = min(found, key=lambda tried: tried.whole)
            yield f"nothing fits; with {words} {_called(first)} does, {first.whole:.0f} s; {words_of(first.layout)}"
            return
    more = [] if options.gradient_checkpointing else ["--gradient_checkpointing"]
    more += [] if options.lora_rank else ["--lora_rank 16"]
    yield f"nothing fits: try {', '.join(['more machines', *more])}"


def _about_the_split(plan: ClusterPlan) -> Iterator[str]:
    """How the devices are best dealt out to roles that share none, beside equal parts."""
    planner = plan.planner
    for kind in (PAIRS, APART):
        found = next((tried for tried in plan.kinds if tried.kind == kind and tried.fits), None)
        if found is None:
            continue
        engines = found.layout.engines
        assert engines is not None
        layouts = candidates(planner.units, planner.machines, engines.tensor_parallel)[kind]
        even = [layout for layout in layouts if len(set(sizes_of(layout))) == 1]
        names = " : ".join([*(" + ".join(pool.units) for pool in found.layout.pools), "engines"])
        split = " : ".join(map(str, sizes_of(found.layout)))
        told = f"devices of {names} are best {split}, {found.whole:.0f} s"
        if even:
            equal = planner.tried(kind, even[0], sleep=False)
            same = sizes_of(found.layout) == sizes_of(equal.layout)
            fits = "" if equal.fits else ", which does not fit"
            told += ", which is equal parts" if same else f"; equal parts take {equal.whole:.0f} s{fits}"
        yield told
        return


def _about_settings(plan: ClusterPlan) -> Iterator[str]:
    """One option changed, in the layout that is shown."""
    planner, shown = plan.planner, plan.shown
    options, engines = planner.options, shown.layout.engines
    if engines is not None and options.n_samples_per_prompt > 1 and not options.enable_prefix_caching:
        saved = shown.whole - _again(planner, shown, enable_prefix_caching=True).whole
        if saved > MATTERS * shown.whole:
            yield (
                f"--enable_prefix_caching: a prompt is read once, not {options.n_samples_per_prompt} times, and its "
                f"keys and values are kept once: {saved:.0f} s less"
            )
    sent, unhidden = shown.iteration.sent, shown.iteration.unhidden
    if options.adam_offload:
        without = _again(planner, shown, adam_offload=False)
        if without.fits:
            yield (
                f"without --adam_offload it fits too and takes {shown.whole - without.whole:.0f} s less: what "
                f"processes send, {sent:.0f} s, is overlapped with arithmetic but for {unhidden:.0f} s; an optimiser "
                "in main memory is not"
            )
    elif unhidden > MATTERS * shown.whole:
        yield (
            f"of {sent:.0f} s of sending between processes {unhidden:.0f} s are not hidden by arithmetic: larger "
            "passes, or fewer processes"
        )
    least = planner.least_tensor_parallel()
    if engines is not None and engines.tensor_parallel > least:
        number = engines.devices // least
        layout = replace(shown.layout, engines=replace(engines, number=number, tensor_parallel=least))
        smaller = _again(planner, replace(shown, layout=layout))
        if smaller.fits and (saved := shown.whole - smaller.whole) > MATTERS * shown.whole:
            yield (
                f"--vllm_num_engines {number} --vllm_tensor_parallel_size {least} has room for the weights too: "
                f"{saved:.0f} s less"
            )


def _again(planner: Planner, tried: Tried, **settings: Any) -> Tried:
    """The same layout under other options."""
    hybrid = tried.layout.engines is not None and tried.layout.engines.pool is not None
    sleep = hybrid and tried.iteration.seconds["moving"] > 0
    return planner.changed(**settings).tried(tried.kind, tried.layout, sleep=sleep)


def _matters(one: Tried, other: Tried) -> bool:
    return abs(one.whole - other.whole) > MATTERS * max(one.whole, other.whole)


def _called(tried: Tried) -> str:
    if len(sizes := sizes_of(tried.layout)) == 1:
        return tried.kind
    return f"{tried.kind} ({' : '.join(map(str, sizes))})"
