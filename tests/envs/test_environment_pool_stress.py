"""Thousands of episodes with faults among them: every one is answered, by its own instance, and nothing is left."""

import os
import random
import textwrap
import threading
from pathlib import Path

import pytest

from trimtab.envs.environment_pool import EndReply, EnvironmentPool, FailureReply, ResetReply, SandboxLimits, StepReply
from trimtab.envs.types import Task, Turn

CODE = """
    import asyncio, os, random, time
    from trimtab.envs.types import Step

    def fault(turn):
        kind = turn.text.split()[-1]
        if kind == "raise":
            raise ValueError("no")
        if kind == "exit":
            os._exit(1)
        if kind == "hang":
            time.sleep(100)

    class Plain:
        def reset(self, task):
            self.row, self.sum = task.row, 0
            return f"row {task.row}"

        def step(self, turn):
            fault(turn)
            self.sum += turn.ids[0]
            time.sleep(random.random() / 500)
            return Step(f"{self.row} {self.sum}", float(turn.ids[0]))

        def get_reward(self):
            return self.row + self.sum

    class Async(Plain):
        async def step(self, turn):
            await asyncio.sleep(random.random() / 500)
            return super().step(turn)
"""
EPISODES, AT_ONCE, TURNS = 3000, 300, 3


class Player:
    """Knows what each instance must say, and begins anew whatever breaks."""

    def __init__(self, pool, faulty):
        self.pool, self.faulty, self.random = pool, faulty, random.Random(0)
        self.sums, self.turns, self.tries = {}, {}, {}
        self.failed, self.innocent, self.ended, self.dropped = 0, 0, 0, 0

    def begin(self, episode):
        self.sums[episode] = self.turns[episode] = 0
        self.pool.reset(episode, Task(episode, 0, 0))

    def step(self, episode):
        token, self.turns[episode] = self.random.randrange(1000), self.turns[episode] + 1
        self.sums[episode] += token
        kind = "fine"
        if self.tries.get(episode, 0) == 0 and self.random.random() < self.faulty:
            kind = self.random.choice(["raise"] * 8 + ["exit"] * 2 + ["hang"])
        self.pool.step(episode, Turn(f"word {kind}", {"role": "assistant"}, [token], "stop", 0, 9))

    def take(self, reply):
        episode = reply.episode
        if isinstance(reply, FailureReply):
            self.tries[episode] = self.tries.get(episode, 0) + (not reply.innocent)
            self.innocent += reply.innocent
            self.failed += not reply.innocent
            self.begin(episode)
        elif isinstance(reply, ResetReply):
            assert reply.messages[0]["content"] == f"row {episode}"
            self.step(episode)
        elif isinstance(reply, StepReply):
            assert reply.step.messages[0]["content"] == f"{episode} {self.sums[episode]}"
            if self.turns[episode] == TURNS:
                self.pool.end(episode)
            elif self.random.random() < 0.02:
                self.pool.drop(episode)
                self.dropped += 1
                self.begin(episode)
            else:
                self.step(episode)
        else:
            assert isinstance(reply, EndReply) and reply.reward == episode + self.sums.pop(episode)
            self.ended += 1

    def play(self, first, count):
        begun, self.ended = 0, 0
        while self.ended < count:
            while begun < count and begun - self.ended < AT_ONCE:
                self.begin(first + begun)
                begun += 1
            for reply in self.pool.poll(30):
                self.take(reply)


def resident(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.long
@pytest.mark.parametrize("name", ["Plain", "Async"])
def test_thousands_of_episodes_are_answered_rightly_and_nothing_is_left(tmp_path, name):
    (tmp_path / "world.py").write_text(textwrap.dedent(CODE))
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    pool = EnvironmentPool(f"{tmp_path / 'world.py'}:{name}", SandboxLimits(seconds=3.0, workers=2))
    player = Player(pool, faulty=0.01)
    player.play(0, EPISODES)
    assert player.failed > 30 and player.innocent > 30 and player.dropped > 30
    player.faulty = 0.0
    player.play(10_000, EPISODES // 3)
    processes = [worker.process.pid for worker in pool._pool._workers]
    held = [resident(pid) for pid in [os.getpid(), *processes]]
    player.play(20_000, EPISODES)
    grown = [resident(pid) - then for pid, then in zip([os.getpid(), *processes], held)]
    assert max(grown) < 5.0, f"MiB of the run and of its workers: {grown}"
    assert not pool._sessions and not pool._pool._sessions
    assert not any(worker.sessions for worker in pool._pool._workers)
    pool.close()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
