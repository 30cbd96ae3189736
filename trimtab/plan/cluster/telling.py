"""A plan for a cluster in words: a line a layout, the parts of its iteration, memory a device, and what follows."""

import math
from collections.abc import Iterable

from trimtab.plan.cluster.advice import advice
from trimtab.plan.cluster.candidates import sizes_of, words_of
from trimtab.plan.cluster.iteration import PARTS
from trimtab.plan.cluster.plan import AS_ASKED, ClusterPlan, Tried
from trimtab.plan.hardware import GIB
from trimtab.plan.memory import FILL, PHASES
from trimtab.plan.speed import SPLIT, assumptions


def lines(plan: ClusterPlan, pretrain: str) -> list[str]:
    """`pretrain`: what the model is called."""
    planner = plan.planner
    machines, hardware = planner.machines, planner.machines.hardware
    nodes = "1 machine" if machines.nodes == 1 else f"{machines.nodes} machines"
    told = [
        f"{planner.options.verb} of {pretrain} on {nodes} with {machines.gpus} x {hardware.name}, "
        f"{hardware.memory / GIB:.1f} GiB each",
        "",
        f"layouts, and about how many seconds an iteration of {planner.timing.tokens:,} tokens takes",
        _row("", "devices", "GiB a device", [*PARTS, "whole"]),
    ]
    told += [_line(tried) for tried in plan.tried]
    told += ["", *_memory(plan.shown), "", *_weights(plan.shown), ""]
    found = advice(plan)
    told += ["what follows", *(f"  - {sentence}" for sentence in found)] if found else []
    assumed = assumptions(hardware, planner.options.bf16, SPLIT)
    told += ["", f"assumed: {assumed}; {machines.in_words()}; roles work in turn"]
    return told


def _line(tried: Tried) -> str:
    peak = max(share.memory.peak for share in tried.pools.values()) / GIB
    engines = tried.layout.engines
    sizes = " : ".join(map(str, sizes_of(tried.layout)))
    if engines is not None and engines.tensor_parallel > 1:
        sizes += f", engines of {engines.tensor_parallel}"
    seconds = [*(tried.iteration.seconds[part] for part in PARTS), tried.whole]
    return _row(tried.kind, sizes, f"{peak:.0f}" if tried.fits else f"{peak:.0f}, no room", map(_seconds, seconds))


def _row(kind: str, devices: str, memory: str, seconds: Iterable[str]) -> str:
    return f"  {kind:<20}{devices:<36}{memory:>14}{''.join(f'{part:>9}' for part in seconds)}"


def _seconds(value: float) -> str:
    if math.isinf(value):
        return "-"
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _memory(tried: Tried) -> list[str]:
    """Part by part, what a device of every pool holds."""
    told = [f"memory a device, GiB: {tried.kind}"]
    for share in tried.pools.values():
        verdict = "fits" if share.fits else f"does not fit: at most {FILL:.0%} should be used"
        told.append(
            f"  {share.name}, {share.devices} devices: {share.memory.peak / GIB:.1f} in the {share.busiest}, {verdict}"
        )
        for part in share.memory.parts:
            when = "" if part.phases == PHASES else f"   in the {' and '.join(part.phases)}"
            if part.size:
                told.append(f"    {part.name:<46}{part.size / GIB:9.2f}{when}")
        if any("activations" in part.name for part in share.memory.parts):
            passes = "1 pass" if share.passes == 1 else f"{share.passes} passes"
            told.append(f"    a step is {passes} of up to {share.memory.tokens:,} tokens")
    engine, engines = tried.engine, tried.layout.engines
    if engines is not None:
        told.append(
            f"  {engines.number} x engine, {engines.tensor_parallel} x device each: weights {engine.weights / GIB:.1f}"
            f", keys and values {engine.keys_and_values / GIB:.1f}; {engine.slots} answers at once each"
        )
    if engines is not None and engines.pool is not None:
        told.append(f"    --vllm_gpu_memory_utilization {engine.utilization:g}")
    if tried.kind != AS_ASKED:
        told.append(f"  {words_of(tried.layout)}")
    return told


def _weights(tried: Tried) -> list[str]:
    iteration = tried.iteration
    return [
        f"weights to the engines: {iteration.sync_bytes / GIB:.1f} GiB over {iteration.link}, "
        f"{iteration.seconds['sync']:.2g} s; sent between processes in passes: {iteration.sent:.0f} s, of which "
        f"arithmetic hides all but {iteration.unhidden:.0f} s"
    ]
