"""What the device waits for in a GRPO step of 360M: gaps between kernels, and what the host did in them.

A run as in grpo.py; of its second step one phase is recorded, host and device (a rollout has far more events than can
be read in a minute). Recording slows the host down, so the phases of later steps, unrecorded, are printed beside. A gap
belongs to the shortest of the host's calls that were under way in its middle ("Python": to none).

    python benchmarks/h200/waits.py [--phase update] [--longest 12]
"""

import argparse
import bisect
from collections.abc import Iterator
from contextlib import contextmanager

RECORDED = 2  # the step
LENGTHS = (("between recorded kernels, below 5 us", 5e3), ("5 to 50 us", 5e4), ("50 us to 1 ms", 1e6), ("longer", 1e18))

Span = tuple[int, int, str]  # from, to (ns), name


def gaps(kernels: list[Span]) -> Iterator[tuple[int, int]]:
    """Times in which the device has no kernel."""
    until = None
    for begin, end, _ in sorted(kernels):
        if until is not None and begin > until:
            yield until, begin
        until = end if until is None else max(until, end)


class Host:
    """Who was at work on it."""

    def __init__(self, calls: list[Span]):
        self.calls = sorted(calls)
        self.begins = [begin for begin, _, _ in self.calls]

    def at(self, moment: int, reach: int = 400) -> str:
        """Of the last `reach` calls that had begun, the shortest that had not ended."""
        place = bisect.bisect_right(self.begins, moment)
        begun = self.calls[max(0, place - reach) : place]
        under_way = [(end - begin, name) for begin, end, name in begun if end > moment]
        return min(under_way, default=(0, "Python"))[1]


def told(phase: str, kernels: list[Span], calls: list[Span], longest: int) -> list[str]:
    found, host = list(gaps(kernels)), Host(calls)
    lines = [f"{phase}: {len(found):,} gaps, {sum(end - begin for begin, end in found) / 1e9:.3f} s"]
    below = 0.0
    for name, most in LENGTHS:
        own = [end - begin for begin, end in found if below <= end - begin < most]
        lines.append(f"  {name:40s}{len(own):8,} {sum(own) / 1e9:8.3f} s")
        below = most
    by_call: dict[str, float] = {}
    for begin, end in found:
        if end - begin >= LENGTHS[0][1]:
            name = host.at((begin + end) // 2)
            by_call[name] = by_call.get(name, 0.0) + (end - begin) / 1e9
    for name, spent in sorted(by_call.items(), key=lambda item: -item[1])[:longest]:
        lines.append(f"    in {name[:60]:60s} {spent:8.3f} s")
    return lines


def main(argv: list[str] | None = None) -> None:
    import torch
    from grpo import Task
    from grpo import options as options_of_grpo
    from runs import Bench, median, timed
    from torch.profiler import ProfilerActivity, profile

    def options(parser: argparse.ArgumentParser) -> None:
        options_of_grpo(parser)
        parser.add_argument("--phase", default="update", help="what is recorded: rollout, scoring or update")
        parser.add_argument("--longest", type=int, default=12, help="so many of the host's calls are named")

    bench = Bench(__doc__, argv, options=options)
    from trimtab.cli.train_grpo import main as grpo
    from trimtab.train.rl.loop import RLRun

    bench.arguments.steps = RECORDED + 2
    task, plain = Task(bench), RLRun.timed
    on_cpu = bench.device.type == "cpu"
    activities = [ProfilerActivity.CPU, *([] if on_cpu else [ProfilerActivity.CUDA])]
    lines: list[str] = []

    @contextmanager
    def watched(run: RLRun, seconds: dict[str, float], phase: str) -> Iterator[None]:
        if (run.counters.iteration + 1, phase) != (RECORDED, bench.arguments.phase):
            with plain(run, seconds, phase):
                yield
            return
        with profile(activities=activities) as profiler, plain(run, seconds, phase):
            yield
            timed(lambda: None, bench.device)
        host = torch.autograd.DeviceType.CPU
        sides: dict[bool, list[Span]] = {True: [], False: []}
        for event in profiler.profiler.kineto_results.events():
            span = event.start_ns(), event.start_ns() + event.duration_ns(), event.name()
            sides[event.device_type() == host].append(span)
        lines.extend(told(phase, sides[on_cpu], sides[True], bench.arguments.longest))

    RLRun.timed = watched
    try:
        rows = bench.command(grpo, task.words(bench.arguments.steps, bench.arguments.kl), bench.variants[0])
    finally:
        RLRun.timed = plain
    for phase in ("rollout", "scoring", "update"):
        bench.say(f"{phase} unrecorded: {median([row.get(f'seconds_{phase}', 0.0) for row in rows[RECORDED:]]):.3f} s")
    for line in lines:
        bench.say(line)


if __name__ == "__main__":
    main()
