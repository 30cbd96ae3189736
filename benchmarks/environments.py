"""Episodes a second of environments in processes of their own, against plain calls one after another in this process.

Four turns an episode, many episodes at once, and nobody writes the turns: what is measured is the pool. Environments
that do nothing show what a call costs there; those that wait or compute, what the processes and threads are good for.
`own` is what a call costs the run itself, on its processor.

    python benchmarks/environments.py
"""

import argparse
import asyncio
import inspect
import os
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from trimtab.envs.environment_pool import EndReply, EnvironmentPool, ResetReply, SandboxLimits, StepReply
from trimtab.envs.loader import load
from trimtab.envs.types import Task, Turn

TURNS = 4
AT_ONCE = 256
CALLS = TURNS + 2  # with the first and the last
CODE = """
    import asyncio, time
    from trimtab.envs.types import Step

    class Nothing:
        def reset(self, task):
            self.total = task.row
            return "Begin."

        def step(self, turn):
            self.work()
            self.total += turn.number
            return Step("Go on.", float(turn.number))

        def get_reward(self):
            return self.total

        def work(self):
            pass

    class Waits(Nothing):
        def work(self):
            time.sleep(0.01)

    class Awaits(Nothing):
        async def step(self, turn):
            await asyncio.sleep(0.01)
            return super().step(turn)

    class Computes(Nothing):
        def work(self):
            until = time.thread_time() + 0.005
            while time.thread_time() < until:
                sum(range(1000))
"""


def turn_of(number: int) -> Turn:
    text = "some words that a model may say, " * 10
    return Turn(text, {"role": "assistant", "content": text}, list(range(100)), "stop", number, 1000)


async def later(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


async def plain(source: str, episodes: int) -> dict[int, float]:
    make, rewards = load(source).make, {}
    assert make is not None
    for row in range(episodes):
        environment = make()
        await later(environment.reset(Task(row, 0, 0)))
        for number in range(TURNS):
            await later(environment.step(turn_of(number)))
        rewards[row] = await later(environment.get_reward())
    return rewards


def pooled(pool: EnvironmentPool, episodes: int) -> dict[int, float]:
    rewards: dict[int, float] = {}
    turns = dict.fromkeys(range(episodes), 0)
    begun = 0
    while len(rewards) < episodes:
        while begun < episodes and begun - len(rewards) < AT_ONCE:
            pool.reset(begun, Task(begun, 0, 0))
            begun += 1
        for reply in pool.poll(60.0):
            if isinstance(reply, ResetReply | StepReply):
                number = turns[reply.episode]
                turns[reply.episode] += 1
                if number < TURNS:
                    pool.step(reply.episode, turn_of(number))
                else:
                    pool.end(reply.episode)
            else:
                assert isinstance(reply, EndReply), reply
                rewards[reply.episode] = reply.reward
    return rewards


def main(arguments: list[str] | None = None) -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--episodes", type=int, default=2000)
    words.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    options = words.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "environments.py"
        file.write_text(textwrap.dedent(CODE))
        for name in ("Nothing", "Waits", "Awaits", "Computes"):
            few = max(1, options.episodes // 20)  # plain calls that wait are slow, and each takes as long as the last
            began = time.monotonic()
            expected = asyncio.run(plain(f"{file}:{name}", few))
            alone = few / (time.monotonic() - began)
            print(f"{name:9s} plain calls  {alone:7.0f} episodes/s", flush=True)
            for workers in sorted({1, options.workers}):
                pool = EnvironmentPool(f"{file}:{name}", SandboxLimits(workers=workers))
                pooled(pool, 8 * workers)  # all processes are there
                began, own = time.monotonic(), time.process_time()
                found = pooled(pool, options.episodes)
                rate = options.episodes / (time.monotonic() - began)
                cost = (time.process_time() - own) / options.episodes / CALLS
                pool.close()
                assert {row: found[row] for row in expected} == expected, "a wrong, lost or swapped reward"
                kind = f"{workers} process{'es' * (workers > 1)}"
                print(
                    f"{name:9s} {kind:12s} {rate:7.0f} episodes/s  {rate / alone:6.2f} of plain  "
                    f"own {1e6 * cost:3.0f} us a call",
                    flush=True,
                )


if __name__ == "__main__":
    main()
