"""What a GRPO step of 360M spends its time on, by kinds of kernels: recorded, or drawn from several recordings.

A run as in grpo.py; of its second step every phase is recorded by the profiler, and the steps after it say how long the
phases take unrecorded. Kernels are sorted by their names; time in which the device has no kernel is "waiting".

    python benchmarks/h200/profile_step.py record after.json
    python benchmarks/h200/profile_step.py record before.json --package OLD --ours ""
    python benchmarks/h200/profile_step.py draw picture.png before.json after.json
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REST = "element-wise"
KINDS = {  # the first that fits
    REST: r"^triton_(poi|per|red)_",  # of compiled layers: their names list all that was fused, copies too
    "attention": r"flash|fmha|sdpa|attention|_decode|_stretches|_splits|_together",  # some name cutlass's types
    "matrix products": r"nvjet|gemm|cutlass|cublas|_gated|_joined|_product|_heads|_parts|_low|_adapted",
    "copies": r"Memcpy|Memset|copy",
}
COLOURS = {
    "matrix products": "#4477aa", "attention": "#228833", "copies": "#ccbb44", REST: "#ee6677", "waiting": "#dddddd",
}  # fmt: skip
OTHERS = ("#aabbcc", "#337788", "#cc8899")  # of recordings that tell fewer kinds apart
RECORDED = 2  # the step


def options(parser: argparse.ArgumentParser) -> None:
    from grpo import options as options_of_grpo

    parser.add_argument("record", choices=("record",))
    parser.add_argument("path", type=Path)
    parser.add_argument("--package", type=Path, help="a folder that holds another version of trimtab, to record that")
    options_of_grpo(parser)


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), REST)


def seconds_by_kind(events, wall: float) -> dict[str, float]:
    """Of the device's events. A kernel that starts before the last one has ended counts from that end on."""
    found: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    spans = sorted((e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in events if e.duration_ns() > 0)
    until = 0
    for begin, end, name in spans:
        found[kind_of(name)] += max(0, end - max(begin, until)) / 1e9
        until = max(until, end)
    return {**found, "waiting": max(0.0, wall - sum(found.values()))}


def record(argv: list[str]) -> None:
    import torch
    from grpo import Task, report
    from runs import Bench, median, timed
    from torch.profiler import ProfilerActivity, profile

    bench = Bench(__doc__, argv, options=options)
    if bench.arguments.package is not None:
        assert (bench.arguments.package / "trimtab").is_dir(), f"{bench.arguments.package} holds no package"
        for name in [name for name in sys.modules if name.partition(".")[0] == "trimtab"]:
            del sys.modules[name]
        sys.path.insert(0, str(bench.arguments.package))
        bench.arguments.path, bench.folder = bench.arguments.path.resolve(), bench.folder.resolve()
        os.chdir(bench.arguments.package)  # processes of its own find it there first
    from trimtab.cli.train_grpo import main as grpo
    from trimtab.train.rl.loop import RLRun

    bench.say(f"recording {sys.modules['trimtab'].__file__}")
    bench.arguments.steps = RECORDED + 2
    task, found, plain = Task(bench), {}, RLRun.timed
    activity = ProfilerActivity.CPU if bench.device.type == "cpu" else ProfilerActivity.CUDA

    @contextmanager
    def watched(run: RLRun, seconds: dict[str, float], phase: str) -> Iterator[None]:
        if run.counters.iteration + 1 != RECORDED:
            with plain(run, seconds, phase):
                yield
            return
        before = seconds.get(phase, 0.0)
        with profile(activities=[activity]) as profiler, plain(run, seconds, phase):
            yield
            timed(lambda: None, bench.device)
        on_device = torch.autograd.DeviceType.CPU if bench.device.type == "cpu" else torch.autograd.DeviceType.CUDA
        events = [e for e in profiler.profiler.kineto_results.events() if e.device_type() == on_device]
        for kind, spent in seconds_by_kind(events, seconds[phase] - before).items():
            found.setdefault(phase, {}).setdefault(kind, 0.0)
            found[phase][kind] += spent

    RLRun.timed = watched
    try:
        rows = bench.command(grpo, task.words(bench.arguments.steps, bench.arguments.kl), bench.variants[0])
    finally:
        RLRun.timed = plain
    report(task, bench.arguments.kl, bench.variants[0], rows[0], rows[RECORDED:])
    phases = {}
    for phase, kinds in found.items():
        unrecorded = median([row.get(f"seconds_{phase}", 0.0) for row in rows[RECORDED:]])
        at_work = sum(spent for kind, spent in kinds.items() if kind != "waiting")
        phases[phase] = {**kinds, "waiting": max(0.0, unrecorded - at_work)}
        bench.say(f"{phase} {unrecorded:.2f} s: " + ", ".join(f"{k} {v:.3f}" for k, v in phases[phase].items()))
    bench.arguments.path.parent.mkdir(parents=True, exist_ok=True)
    bench.arguments.path.write_text(json.dumps(phases, indent=1))


def draw(picture: Path, recorded: list[Path]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.8 * len(recorded)))
    recordings = [json.loads(path.read_text()) for path in recorded]
    found = dict.fromkeys(kind for phases in recordings for kinds in phases.values() for kind in kinds)
    others = zip([kind for kind in found if kind not in COLOURS], OTHERS)
    colours = {kind: COLOURS[kind] for kind in COLOURS if kind in found} | dict(others)
    colours["waiting"] = colours.pop("waiting", COLOURS["waiting"])  # the last of a phase
    for place, phases in enumerate(reversed(recordings)):
        left = 0.0
        for phase, kinds in phases.items():
            begin = left
            for kind, colour in colours.items():
                axes.barh(place, kinds.get(kind, 0.0), left=left, color=colour, edgecolor="white", linewidth=0.3)
                left += kinds.get(kind, 0.0)
            if left - begin > 0.1:
                axes.text(
                    (begin + left) / 2,
                    place + 0.42,
                    f"{phase} {left - begin:.2f} s",
                    ha="center",
                    va="bottom",
                    fontsize=8,
                )
                axes.plot([left, left], [place - 0.45, place + 0.45], color="black", linewidth=1)
    axes.set_yticks(range(len(recorded)), [path.stem for path in reversed(recorded)])
    axes.set_ylim(-0.6, len(recorded) - 0.2)
    axes.set_xlabel("seconds of a GRPO step, 360M, 64 x 8 answers, 128 + 512 tokens")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    axes.legend(handles, list(colours), fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, dpi=150)


def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["draw"]:
        draw(Path(words[1]), [Path(word) for word in words[2:]])
    else:
        record(words)


if __name__ == "__main__":
    main()
