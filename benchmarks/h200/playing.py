"""Where the time of rollouts with an environment goes, an iteration at a time, on whatever device is there.

Every word is `trimtab grpo`'s. What is looked at runs as ever and is timed from outside: reads (of prompts and of what
environments say), steps, recordings of steps and reads, waiting for environments. The device is waited for before and
after each of them, so that the whole takes a little longer than it would.

    python benchmarks/h200/playing.py --pretrain MODEL --environment gem:game:GuessTheNumber-v0-easy ...
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """Seconds and calls by name; what runs inside another one is not counted twice."""

    def __init__(self) -> None:
        self.device = torch.accelerator.current_accelerator()
        self.inside: list[float] = []
        self.clear()

    def clear(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.sizes: dict[str, int] = defaultdict(int)
        self.began = time.perf_counter()

    def now(self) -> float:
        if self.device is not None:
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def watch(self, owner: Any, method: str, name: str, size: Callable[..., int] = lambda *_: 0) -> None:
        plain = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            before = self.now()
            self.inside.append(0.0)
            try:
                return plain(*arguments, **named)
            finally:
                whole, own = self.now() - before, self.inside.pop()
                self.seconds[name] += whole - own
                self.calls[name] += 1
                self.sizes[name] += size(*arguments)
                if self.inside:
                    self.inside[-1] += whole

        setattr(owner, method, timed)

    def told(self) -> str:
        whole = self.now() - self.began
        rest = whole - sum(self.seconds.values())
        parts = [
            f"{name} {seconds:.2f} s in {self.calls[name]}" + (f" of {self.sizes[name]}" if self.sizes[name] else "")
            for name, seconds in sorted(self.seconds.items(), key=lambda found: -found[1])
        ]
        return f"{whole:.2f} s: " + ", ".join(parts) + f", the rest {rest:.2f} s"


def main(argv: list[str] | None = None) -> int:
    from trimtab.agents.engine import AgentEngine
    from trimtab.cli.train_grpo import main as grpo
    from trimtab.rollout.builtin.graphs import DecodeGraphs
    from trimtab.rollout.builtin.read_graphs import ReadGraphs
    from trimtab.rollout.builtin.session import BuiltinSession
    from trimtab.train.rl.loop import RLRun

    clock = Clock()
    clock.watch(BuiltinSession, "_begin", "reads", lambda _, __, admissions: len(admissions))
    clock.watch(BuiltinSession, "_decode", "steps", lambda _, scheduler, *__: len(scheduler.running))
    clock.watch(DecodeGraphs, "_capture", "recording steps")
    clock.watch(ReadGraphs, "_capture", "recording reads")
    clock.watch(AgentEngine, "replies", "environments")
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
