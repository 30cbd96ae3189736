"""Episodes in processes of their own, in which everything goes wrong once: what is drawn is what it is without."""

import textwrap

import pytest

from tests.envs.episodes import make_policy, plain, play, player
from trimtab.envs.environment_pool import EnvironmentPool, SandboxLimits

CODE = """
    import os, pathlib, signal, sys, time
    from trimtab.envs.types import Step

    HERE = pathlib.Path(__file__).parent

    def once(name):
        try:
            (HERE / name).touch(exist_ok=False)
            return True
        except FileExistsError:
            return False

    class World:
        def reset(self, task):
            self.row, self.turns = task.row, 0
            if self.row == 4 and once("segfault"):
                os.kill(os.getpid(), signal.SIGSEGV)
            return f"Begin {task.row}."

        def step(self, turn):
            self.turns += 1
            if self.turns == 2:
                if self.row == 1 and once("exit"):
                    os._exit(1)
                if self.row == 2 and once("hang"):
                    time.sleep(100)
                if self.row == 3:
                    raise ValueError("the database is gone")
                if self.row == 5:
                    print("x" * 10**7)
                    return Step("word " * 10**4)
                if self.row == 6 and once("memory"):
                    bytearray(10**11)
            return Step(f"Turn {self.turns} had {len(turn.ids)} tokens.", 1.0, self.turns == 3)

        def get_reward(self):
            return 10.0
"""
ROWS = 7


def test_whatever_an_environment_does_others_and_the_next_try_are_what_they_are_without(tmp_path):
    (tmp_path / "world.py").write_text(textwrap.dedent(CODE))
    policy = make_policy()
    engine = player(
        policy, EnvironmentPool(str(tmp_path / "world.py"), SandboxLimits(seconds=1.0, workers=2, memory_gib=2.0))
    )
    disturbed = play(engine, rows=ROWS, n=2)
    assert {"segfault", "exit", "hang", "memory"} <= {file.name for file in tmp_path.iterdir()}
    calm = play(engine, rows=ROWS, n=2)  # each goes wrong once
    engine.close()
    assert [plain(r) for r in disturbed if r.prompt != 3] == [plain(r) for r in calm if r.prompt != 3]
    finishes = [r.finish for r in disturbed]
    assert finishes[6:8] == ["failed"] * 2 and finishes[10:12] == ["context"] * 2
    assert "failed" not in finishes[:6] + finishes[8:]
    assert any(r.episode.problem == "ValueError: the database is gone (line 29)" for r in disturbed[6:8])
    assert [r.episode.reward for r in disturbed if r.prompt not in (3, 5)] == [pytest.approx(13.0)] * 10
    assert max(r.episode.begun for r in calm if r.prompt != 3) == 1
