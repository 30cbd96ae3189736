"""Where the time of rollouts with an environment goes, an iteration at a time, on whatever device is there.

Every word is `trimtab grpo`'s. What is looked at runs as ever and is timed from outside; the device is waited for
before and after each part, so that nothing overlaps and the whole takes longer than it would. The parts by their
own seconds, what runs inside another one not counted twice:

    whole prompts        first prompts, and
    reading on           prompts that go on from kept pages (further turns, and what begins alike): by recorded graphs,
                         or launch by launch where a size is new; tokens and keys as they are after rounding up
    steps                looks of the decoder, of how many rows
    recording ...        graphs of reads and of steps
    pages, samples       the engine's bookkeeping: admission and pages, what was drawn
    words                the agents' part: texts, templates, tokens, messages to environments
    waiting              for environments, with nothing else to do; "environments" is what was taken in passing
    the rest             of sampling: rewards of other kinds, filtering, the iteration's experience

and beneath them the CPU seconds of this process, and the environments' own seconds (in their processes, added up).

    python benchmarks/h200/playing.py --pretrain MODEL --environment gem:game:GuessTheNumber-v0-easy ...
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import torch


class Clock:
    """Seconds, calls and sizes by name; what runs inside another one is not counted twice."""

    def __init__(self) -> None:
        self.device = torch.accelerator.current_accelerator()
        self.inside: list[float] = []
        self.clear()

    def clear(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.sizes: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.elsewhere = 0.0  # seconds of environments in their processes
        self.began, self.cpu = time.perf_counter(), time.process_time()

    def now(self) -> float:
        if self.device is not None:
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def watch(self, owner: Any, method: str, name: str | Callable[..., str], **sizes: Callable[..., float]) -> None:
        """`name`, `sizes`: of the call's arguments, its object first."""
        plain = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            called = name if isinstance(name, str) else name(*arguments)
            measured = {unit: size(*arguments) for unit, size in sizes.items()}
            before = self.now()
            self.inside.append(0.0)
            try:
                return plain(*arguments, **named)
            finally:
                whole, own = self.now() - before, self.inside.pop()
                self.seconds[called] += whole - own
                self.calls[called] += 1
                for unit, value in measured.items():
                    self.sizes[called][unit].append(value)
                if self.inside:
                    self.inside[-1] += whole

        setattr(owner, method, timed)

    def told(self) -> str:
        whole, cpu = self.now() - self.began, time.process_time() - self.cpu
        lines = []
        for name, seconds in sorted(self.seconds.items(), key=lambda found: -found[1]):
            calls = self.calls[name]
            line = f"  {name:34} {seconds:7.3f} s {calls:6} calls {seconds / calls * 1e3:8.2f} ms each"
            for unit, values in self.sizes[name].items():
                line += f"; {sum(values):,.0f} {unit} ({min(values):g} to {max(values):g}, mostly {median(values):g})"
            lines.append(line)
        lines.append(f"  {'the rest':34} {whole - sum(self.seconds.values()):7.3f} s")
        lines.append(f"  CPU of this process {cpu:.2f} s; environments in their processes {self.elsewhere:.2f} s")
        return f"{whole:.2f} s\n" + "\n".join(lines)


def watch_engine(clock: Clock) -> None:
    from trimtab.rollout.builtin.cuda_graphs import DecodeGraphs, PrefillGraph, PrefillGraphs
    from trimtab.rollout.builtin.engine import BuiltinSession
    from trimtab.rollout.builtin.model_runner import ModelRunner
    from trimtab.rollout.builtin.scheduler import Scheduler

    clock.watch(BuiltinSession, "advance", "engine, other")
    clock.watch(BuiltinSession, "_begin", "reads, prepared on the host")
    clock.watch(BuiltinSession, "_take", "samples")
    clock.watch(BuiltinSession, "_admit_new", "memory")
    for method in ("schedule", "prefill_done", "finish", "allocate"):
        clock.watch(Scheduler, method, "pages")
    clock.watch(
        PrefillGraph,
        "run",
        lambda prepared, _: (
            ("whole prompts, " if prepared.keys is None else "reading on, ")
            + ("launch by launch" if prepared.graph is None else "recorded")
        ),
        tokens=lambda prepared, _: prepared.tokens.shape[1],
        keys=lambda prepared, _: 0 if prepared.keys is None else len(prepared.keys),
    )
    clock.watch(
        ModelRunner,
        "read",
        lambda _, sequences: (
            ("reading on" if any(done for _, done, _ in sequences) else "whole prompts") + ", as they come"
        ),
        sequences=lambda _, sequences: len(sequences),
        tokens=lambda _, sequences: sum(len(ids) - done for ids, done, _ in sequences),
        whole=lambda _, sequences: sum(len(ids) for ids, _, _ in sequences),
    )
    clock.watch(DecodeGraphs, "run", "steps", rows=lambda *given: len(given[2]), steps=lambda *given: given[3])
    clock.watch(BuiltinSession, "_decode_eager", "steps one by one", rows=lambda _, rows, __: len(rows))
    clock.watch(DecodeGraphs, "_capture", "recording steps", rows=lambda _, __, rows: rows)
    clock.watch(
        PrefillGraphs, "_capture", "recording reads",
        tokens=lambda _, __, made: made.tokens.shape[1],
        keys=lambda _, __, made: 0 if made.keys is None else len(made.keys),
    )  # fmt: skip


def watch_agents(clock: Clock) -> None:
    from trimtab.envs.environment_engine import EnvironmentEngine, EnvironmentSession

    take = EnvironmentSession._handle

    def taken(session: EnvironmentSession, play: Any, reply: Any) -> None:
        clock.elsewhere += getattr(reply, "seconds", 0.0)
        take(session, play, reply)

    EnvironmentSession._handle = taken  # type: ignore[method-assign]
    clock.watch(EnvironmentSession, "add", "words, first")
    clock.watch(EnvironmentSession, "advance", "words")
    clock.watch(EnvironmentSession, "_poll", "words, heard")
    clock.watch(EnvironmentEngine, "replies", lambda _, seconds: "waiting" if seconds else "environments")


def main(argv: list[str] | None = None) -> int:
    from trimtab.cli.train_grpo import main as grpo
    from trimtab.train.rl.loop import RLRun

    clock = Clock()
    watch_engine(clock)
    watch_agents(clock)
    sample = RLRun.sample

    def sampled(run: RLRun, *arguments: Any) -> Any:
        clock.clear()
        found = sample(run, *arguments)
        print(f"iteration {run.counters.iteration + 1}: {clock.told()}", flush=True)
        return found

    RLRun.sample = sampled  # type: ignore[method-assign]
    return grpo(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    raise SystemExit(main())
