"""Environments found in files, by their methods."""

from pathlib import Path

import pytest

from tests.envs.playing import made, now, task, turn, user, written
from trimtab.envs.loader import load
from trimtab.envs.types import Step
from trimtab.errors import UserError

NATIVE = """
from trimtab.envs.types import Step

class Echo:
    async def reset(self, task):
        self.left = task.label
        return f"{task.prompt} Say something."

    async def step(self, turn):
        self.left -= 1
        return Step(turn.text.upper(), reward=1, done=self.left == 0, logs={"left": self.left, "who": "me"})
"""


@pytest.mark.parametrize("text", [NATIVE, NATIVE.replace("async ", "")], ids=["async", "plain"])
def test_an_environment_of_the_native_shape_is_played_as_it_is(tmp_path: Path, text: str) -> None:
    loaded = load(written(tmp_path, text))
    assert (loaded.info.name, loaded.info.kind) == ("Echo", "environment")
    first, second = loaded.make(), loaded.make()
    assert now(first.reset(task(label=2))) == user("Begin. Say something.")
    now(second.reset(task(label=9)))
    assert now(first.step(turn("hello"))) == Step(user("HELLO"), 1.0, logs={"left": 1.0})
    assert now(first.step(turn("hello", 1))) == Step(user("HELLO"), 1.0, done=True, logs={"left": 0.0})
    assert not now(second.step(turn("hello"))).done
    assert now(first.get_reward()) == 0.0
    assert now(first.close()) is None


def test_a_file_may_offer_rows(tmp_path: Path) -> None:
    offers = "def rows(count, seed):\n    return [{'prompt': str(seed + place)} for place in range(count)]\n"
    loaded = load(written(tmp_path, NATIVE + offers))
    assert loaded.rows is not None and loaded.info.offers_rows
    assert loaded.rows(2, 5) == [{"prompt": "5"}, {"prompt": "6"}]
    assert not load(written(tmp_path, NATIVE)).info.offers_rows


def of(answer: str) -> str:
    return f"""
from trimtab.envs.types import Step
nan = float("nan")
class Game:
    def reset(self, task): return None
    def step(self, turn): return {answer}
"""


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("None", "step gave NoneType None"),
        ("Step(3)", "Step.messages is int 3"),
        ("Step(['hello'])", "Step.messages has str 'hello' in it"),
        ("Step(reward='much')", "Step.reward is str 'much'"),
        ("Step(reward=nan)", "Step.reward is nan"),
        ("Step(ids=['a'])", "Step.ids"),
        ("Step(sampling=4)", "Step.sampling is int 4"),
    ],
)
def test_an_answer_that_is_none_is_named(tmp_path: Path, answer: str, words: str) -> None:
    game = made(written(tmp_path, of(answer)))
    assert game.reset(task()) is None
    with pytest.raises((TypeError, ValueError), match=words):
        game.step(turn("a"))


TWO = """
class First:
    def __init__(self, size): self.size = size
    def reset(self, task): return str(self.size)
    def step(self, turn): ...
class Base:
    def reset(self, task): return "base"
    def step(self, turn): ...
class Second(Base):
    def reset(self, task): return "second"
def make(size=7): return First(size)
def needs(size): return First(size)
def other(): return 3
"""


def test_one_of_several_is_named_after_a_colon(tmp_path: Path) -> None:
    file = written(tmp_path, TWO)
    for name, said in {"Second": "second", "Base": "base", "make": "7"}.items():
        assert made(f"{file}:{name}").reset(task()) == user(said)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "First, Second could all be meant"),
        (":First", "First needs size to be made: write a function"),
        (":Third", "there is no class or function Third"),
        (":needs", "needs needs size"),
        (":other", "what other makes is no environment"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_line(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        load(written(tmp_path, TWO) + name)
    assert "\n" not in str(refused.value)


def test_a_file_without_an_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no environment in it"):
        load(written(tmp_path, "class Nothing: ...\n"))
    with pytest.raises(UserError, match="no such file"):
        load(str(tmp_path / "none.py"))
