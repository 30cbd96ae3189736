"""Environments written for other projects, found in files and played as they are."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.envs.playing import made, now, task, turn, user, written
from trimtab.envs.gymnasium import EpisodeRandom
from trimtab.envs.loader import load
from trimtab.envs.types import VERBATIM, Step
from trimtab.errors import UserError

GYMNASIUM = """
class Game:
    def reset(self, *, seed=None, options=None):
        self.seed = seed
        return "Guess.", {"suffix": "Now."}
    def step(self, action):
        right = int(action) == self.seed
        info = {"distance": abs(self.seed - int(action)), "a": "b"}
        return ("Right." if right else 7), right, right, action == "3", info
    def close(self):
        self.closed = True
"""


def test_five_values_of_a_step_are_gymnasiums(tmp_path: Path) -> None:
    game = made(written(tmp_path, GYMNASIUM), "Gymnasium")
    assert game.reset(task(seed=2**40 + 5)) == user("Guess.\nNow.")
    assert game.step(turn("2")) == Step(user("7"), 0.0, logs={"distance": 3.0})
    assert game.step(turn("3")) == Step(user("7"), 0.0, truncated=True, logs={"distance": 2.0})
    assert game.step(turn("5")) == Step(user("Right."), 1.0, done=True, logs={"distance": 0.0})
    assert game.close() is None
    older = GYMNASIUM.replace('action == "3", ', "").replace('"Guess.", {"suffix": "Now."}', '"Guess."')
    game = made(written(tmp_path, older, "older.py"), "Gymnasium")
    assert game.reset(task(seed=5)) == user("Guess.")
    assert now(game.step(turn("5"))).done


TEXTARENA = """
class Wrapped:
    def reset(self, num_players, seed=None):
        assert num_players == 1
        self.number, self.said, self.guesses = seed, [(-1, "Guess.", "prompt")], 0
    def get_observation(self):
        said, self.said = self.said, []
        return 0, said
    def step(self, action):
        self.guesses += 1
        self.said += [(0, action, "action"), (-1, "Higher.", "message")]
        return int(action) >= self.number, {"guesses": self.guesses}
    def close(self):
        return {0: 1.0 if self.guesses < 3 else -1.0}, {0: {}}
def make(): return Wrapped()
"""


def test_two_values_of_a_step_are_textarenas(tmp_path: Path) -> None:
    game = made(written(tmp_path, TEXTARENA) + ":make", "TextArena")
    assert game.reset(task(seed=4)) == user("Guess.")
    assert game.step(turn("3")) == Step(user("Higher."), logs={"guesses": 1.0})
    assert game.step(turn("4")) == Step(reward=1.0, done=True, logs={"guesses": 2.0})
    game.close()


TRL = '''
class Counter:
    def reset(self, **row):
        self.count = row["start"]
        return f" It is {self.count}." if row["start"] else None
    def add(self, amount: int) -> int:
        """Adds.

        Args:
            amount: how much
        """
        self.count += amount
        return self.count
    async def look(self) -> str:
        """Looks."""
        return str(self.count)
    def get_reward(self):
        return float(self.count == 7)
    def _hidden(self): ...
'''


def test_methods_of_trls_environments_are_tools(tmp_path: Path) -> None:
    loaded = load(written(tmp_path, TRL))
    assert [tool["function"]["name"] for tool in loaded.info.tools] == ["add", "look"]
    counter = loaded.make()
    talk = [{"role": "system", "content": "Count."}, {"role": "user", "content": "Go."}]
    assert counter.reset(task(prompt=talk, columns={"start": 0})) is None
    assert counter.reset(task(prompt=talk, columns={"start": 3})) == [talk[0], *user("Go. It is 3.")]
    add, look = counter.tools
    assert (add(4), now(look())) == (7, "7")
    assert counter.step(turn("Seven.")) == Step(done=True)
    assert counter.get_reward() == 1.0


SKYRL = """
class Sum:
    def __init__(self, env_config, extras):
        self.truth, self.turns = extras["reward_spec"]["ground_truth"], 0
    def init(self, prompt):
        return [{"role": "system", "content": "Add."}, *prompt], {}
    def step(self, action):
        self.turns += 1
        done = self.turns == 2
        said = [] if done else [{"role": "user", "content": "Sure?"}]
        reward = float(action == self.truth)
        return {"observations": said, "reward": reward, "done": done, "metadata": {"turn": self.turns}}
    def get_metrics(self): return {"turns_taken": self.turns}
    def close(self): ...
"""


def test_skyrls_environments_are_made_from_the_row(tmp_path: Path) -> None:
    game = made(written(tmp_path, SKYRL), "SkyRL")
    assert game.reset(task(label="4")) == [{"role": "system", "content": "Add."}, *user("Begin.")]
    assert game.step(turn("4")) == Step(user("Sure?"), 1.0, logs={"turn": 1.0})
    assert game.step(turn("5")) == Step([], 0.0, done=True, logs={"turn": 2.0, "turns_taken": 2.0})
    game.close()


OPENRLHF = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Figure:
    def __init__(self, value): self.value = value
    def item(self): return self.value

class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.steps = 0
    async def reset(self, states, **kwargs):
        self.seed = kwargs["seed"]
        return {"observation": states["observation"] + states["label"]}
    async def step(self, states, **kwargs):
        self.steps += 1
        self.seen = states["observation_text"]
        sampling = states["sampling_params"]
        sampling.stop = "."
        return {"rewards": Figure(self.seed), "scores": 0, "environment_feedback": f"<user>{self.steps}<model>",
                "done": self.steps == 2, "sampling_params": sampling, "extra_logs": {"length": Figure(len(self.seen))}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def test_openrlhfs_instances_say_text_that_stands_as_it_is(tmp_path: Path) -> None:
    agent = made(written(tmp_path, OPENRLHF), "OpenRLHF")
    assert now(agent.reset(task(prompt="p", label="l", seed=3))) == [{"role": VERBATIM, "content": "pl"}]
    sampling = {"stop_strings": ["."]}
    first = [{"role": VERBATIM, "content": "<user>1<model>"}]
    assert now(agent.step(turn("a"))) == Step(first, 3.0, sampling=sampling, logs={"length": 2.0})
    logs = {"length": float(len("pla<user>1<model>"))}
    assert now(agent.step(turn("b"))) == Step([], 3.0, done=True, sampling=sampling, logs=logs)
    agent = made(written(tmp_path, OPENRLHF.replace(' + states["label"]', "")))
    assert now(agent.reset(task(prompt="p"))) is None, "the row's own prompt"
    agent.close()
    rendered = task(prompt="p", label="l")
    agent = made(written(tmp_path, OPENRLHF))
    opening = now(agent.reset(replace(rendered, text="<user>p<model>")))
    assert opening == [{"role": VERBATIM, "content": "<user>p<model>l"}], "what it is told has the template's marks"
    agent = made(written(tmp_path, OPENRLHF.replace("sampling.stop =", "sampling.stop_token_ids =")))
    now(agent.reset(rendered))
    with pytest.raises(ValueError, match="give stop, a text"):
        now(agent.step(turn("a")))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("dict(stop_strings='END', max_new_tokens=None)", {"stop_strings": ["END"]}),
        ("dict(max_new_tokens=8)", {"max_new_tokens": 8}),
        ("dict(max_new_tokens='8')", "a whole number of at least 1"),
        ("dict(max_new_tokens=0)", "a whole number of at least 1"),
        ("dict(max_new_tokens=2.5)", "a whole number of at least 1"),
        ("dict(stop_strings=['a', ''])", "a list of texts"),
        ("dict(temperature=1)", "max_new_tokens and stop_strings are a step's to say"),
        ("[1]", "a dict is needed"),
    ],
)
def test_settings_of_the_next_turn_are_checked(tmp_path: Path, given: str, found: dict[str, Any] | str) -> None:
    step = f"def step(self, turn):\n        return Step('on', sampling={given})"
    text = f"from trimtab.envs.types import Step\nclass Game:\n    def reset(self, task): ...\n    {step}\n"
    game = made(written(tmp_path, text))
    game.reset(task())
    if isinstance(found, dict):
        assert now(game.step(turn("a"))).sampling == found
        return
    with pytest.raises((TypeError, ValueError), match=found):
        game.step(turn("a"))


def test_an_executor_that_does_more_than_its_base_is_refused(tmp_path: Path) -> None:
    executes = "\n    async def execute(self, prompt, label, sampling_params):\n        return await {}\n"
    made(written(tmp_path, OPENRLHF + executes.format("super().execute(prompt, label, sampling_params)"))).close()
    with pytest.raises(UserError, match="AgentExecutor has an execute of its own"):
        load(written(tmp_path, OPENRLHF + executes.format("self.llm_engine.generate(prompt)")))


OLDER = """
left = 2
async def step(observation, action, label, **kwargs):
    global left
    left -= 1
    return {"rewards": label, "next_observation": observation + action + "again", "done": left == 0}
"""


def test_openrlhfs_older_step_is_a_function_of_the_file(tmp_path: Path) -> None:
    agent = made(written(tmp_path, OLDER), "until 2025")
    assert agent.reset(task(label=2)) is None
    assert now(agent.step(turn("a"))) == Step([{"role": VERBATIM, "content": "again"}], 2.0)
    assert now(agent.step(turn("b"))) == Step([], 2.0, done=True)
    agent = made(written(tmp_path, OLDER.replace("observation + action + ", "")))
    agent.reset(task(label=2))
    with pytest.raises(ValueError, match="history is not rewritten"):
        now(agent.step(turn("a")))


AGENT = """
async def run(task, *, base_url, api_key, **rest):
    return {{"reward": 2, "calls": 3, "where": base_url}} if task.label else {answer}
"""


def test_an_agent_gives_its_reward(tmp_path: Path) -> None:
    loaded = load(written(tmp_path, AGENT.format(answer="4.5")))
    assert loaded.info.kind == "agent" and loaded.make is None and loaded.run is not None
    where: dict[str, Any] = {"base_url": "http://h/v1", "api_key": "k", "model": "m"}
    assert now(loaded.run(task(), **where)) == (4.5, {})
    assert now(loaded.run(task(label=1), **where)) == (2.0, {"calls": 3.0})
    forgot = load(written(tmp_path, AGENT.format(answer="None")))
    with pytest.raises(TypeError, match="run gave nothing"):
        now(forgot.run(task(), **where))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GYMNASIUM.replace("right, right, ", "right, "), None),
        (GYMNASIUM.replace("return (", "return 3,;return ("), "step gave tuple"),
        (TEXTARENA.replace("return int(action) >= self.number, ", "return "), "done and info are needed"),
        (SKYRL.replace('"done": done, ', ""), "a dict with observations, reward and done"),
        (OPENRLHF.replace('"done": self.steps == 2, ', ""), "a dict with rewards, done"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path: Path, text: str, words: str | None) -> None:
    game = made(written(tmp_path, text) + (":make" if "def make" in text else ""))
    now(game.reset(task(label="1", prompt="p")))
    if words is None:
        now(game.step(turn("1")))  # four values
    else:
        with pytest.raises(TypeError, match=words):
            now(game.step(turn("1")))


def test_episodes_that_draw_from_the_process_do_not_disturb_each_other() -> None:
    def drawn(chance: EpisodeRandom, count: int) -> list[float]:
        return [chance.call(random.random) for _ in range(count)]

    alone, first, second = EpisodeRandom(), EpisodeRandom(), EpisodeRandom()
    before = random.getstate()
    for chance, seed in ((alone, 5), (first, 5), (second, 6)):
        chance.seed(seed)
    wanted = drawn(alone, 4)
    found = []
    for _ in range(4):
        drawn(second, 3)
        found += drawn(first, 1)
    assert found == wanted
    assert random.getstate() == before, "nor what others in the process draw"


def test_coroutines_of_many_episodes_run_at_once(tmp_path: Path) -> None:
    text = GYMNASIUM.replace("def step", "async def step").replace(
        "right =", "import asyncio; await asyncio.sleep(0)\n        right ="
    )
    games = [made(written(tmp_path, text)) for _ in range(3)]
    for place, game in enumerate(games):
        game.reset(task(seed=place))

    async def all_of_them() -> list[Step]:
        return await asyncio.gather(*(game.step(turn("1")) for game in games))

    assert [step.done for step in asyncio.run(all_of_them())] == [False, True, False]
