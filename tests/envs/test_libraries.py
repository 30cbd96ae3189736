"""Environments of other people's libraries, played for real where they are installed."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.envs.playing import made, now, task, turn, written
from trimtab.envs.adapter import EnvironmentAdapter, LoadedEnvironment
from trimtab.envs.loader import load
from trimtab.envs.types import Step
from trimtab.errors import UserError

GUESS = "gem:game:GuessTheNumber-v0-easy"


def begun(loaded: LoadedEnvironment, row: dict[str, Any]) -> EnvironmentAdapter:
    game = loaded.make()
    columns = {name: value for name, value in row.items() if name not in ("prompt", "label")}
    assert game.reset(task(prompt=row["prompt"], label=row.get("label"), columns=columns)) == row["prompt"]
    return game


def rows(loaded: LoadedEnvironment, count: int, seed: int) -> list[dict[str, Any]]:
    assert loaded.rows is not None and loaded.info.offers_rows
    found = loaded.rows(count, seed)
    assert found == loaded.rows(count, seed)
    return found


@pytest.mark.long
def test_a_game_of_gem_is_won_by_halving() -> None:
    pytest.importorskip("gem")
    loaded = load(GUESS)
    first, *_ = rows(loaded, 4, seed=3)
    game, low, high = begun(loaded, first), 1, 10
    steps: list[Step] = []
    while not steps or not steps[-1].done:
        guess = (low + high) // 2
        steps.append(now(game.step(turn(f"I say \\boxed{{{guess}}}"))))
        said = steps[-1].messages[-1]["content"]
        low, high = (guess + 1, high) if "higher" in said else (low, guess - 1)
    assert steps[-1].reward == 1 and len(steps) <= 4


@pytest.mark.long
def test_games_of_many_threads_are_what_they_are_alone() -> None:
    pytest.importorskip("gem")
    loaded = load("gem:game:Minesweeper-v0-easy")
    moves = [f"\\boxed{{reveal {row} {column}}}" for row in range(5) for column in range(5)]

    def played(row: dict[str, Any]) -> list[Any]:
        game, said = begun(loaded, row), []
        for move in moves:
            said.append(now(game.step(turn(move))))
            if said[-1].done:
                break
        return said

    offered = rows(loaded, 8, seed=1)
    alone = [played(row) for row in offered]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(played, offered)) == alone and len({str(one) for one in alone}) > 1


@pytest.mark.long
def test_reasoning_gym_scores_its_own_answers() -> None:
    pytest.importorskip("reasoning_gym")
    for name in ("basic_arithmetic?max_terms=2&max_digits=1", "word_ladder", "gsm_symbolic"):
        loaded = load(f"rg:{name}")
        for row in rows(loaded, 3, seed=2**40):
            right = begun(loaded, row).step(turn(f"I think <answer>no</answer> <answer>{row['label']}</answer>"))
            assert right == Step(reward=1.0, done=True)
            wrong = now(begun(loaded, row).step(turn(row["label"])))
            assert wrong.done and wrong.reward < 1, "an answer stands between the marks"


@pytest.mark.long
@pytest.mark.parametrize(
    ("library", "source", "words"),
    [
        ("gem", "gem:game:Guess", "there is no 'game:Guess', but game:GuessTheNumber"),
        ("reasoning_gym", "rg:arith", "there is no 'arith', but .*basic_arithmetic"),
        ("reasoning_gym", "rg:basic_arithmetic?terms=3", "unexpected keyword argument 'terms'"),
        ("reasoning_gym", "rg:composite", "Must specify at least one dataset"),
    ],
)
def test_a_name_that_there_is_not_is_refused(library: str, source: str, words: str) -> None:
    pytest.importorskip(library)
    with pytest.raises(UserError, match=words):
        load(source)


TEXTARENA = """
import textarena

def make():
    return textarena.make("GuessTheNumber-v0-raw")
"""

SKYRL = "from skyrl_gym.envs.gsm8k.env import GSM8kEnv"

OPENRLHF_WITH_GEM = """
import gem
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.game = gem.make("game:GuessTheNumber-v0-easy")
    async def reset(self, states, **kwargs):
        self.game.reset(kwargs["seed"] % 2**31)
        return {"observation": states["observation"]}
    async def step(self, states, **kwargs):
        said, reward, terminated, truncated, info = self.game.step(states["action_text"])
        return {"rewards": torch.tensor(reward), "environment_feedback": f"<user>{said}<model>", "scores": reward,
                "done": terminated or truncated, "extra_logs": {"figure": torch.tensor([reward])},
                "sampling_params": states.get("sampling_params")}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


@pytest.mark.long
def test_a_game_of_textarena_is_played(tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    source = written(tmp_path, TEXTARENA) + ":make"
    games = [made(source) for _ in range(2)]
    opening, same = (game.reset(task(seed=7)) for game in games)
    assert opening == same
    for guess in range(1, 21):
        first, second = (now(game.step(turn(f"[{guess}]"))) for game in games)
        assert first == second
        if first.done:
            break
    assert first.done and isinstance(first.reward, float)


@pytest.mark.long
def test_an_environment_of_skyrl_judges_by_the_rows_truth(tmp_path: Path) -> None:
    pytest.importorskip("skyrl_gym")
    for said, reward in {"#### 12": 1.0, "#### 13": 0.0}.items():
        game = made(written(tmp_path, SKYRL) + ":GSM8kEnv")
        assert now(game.reset(task(label="12"))) is None
        assert now(game.step(turn(said))) == Step([], reward, done=True)
        game.close()


@pytest.mark.long
def test_openrlhfs_instance_around_a_game_of_gem(tmp_path: Path) -> None:
    pytest.importorskip("gem")
    agent = made(written(tmp_path, OPENRLHF_WITH_GEM))
    assert now(agent.reset(task())) is None
    step = now(agent.step(turn("\\boxed{1}")))
    assert step.messages[0]["content"].startswith("<user>At turn 1") and "figure" in step.logs
