"""`trimtab play`: what a person or a model does in an environment, as training sees it."""

import io
import re

import pytest

from trimtab.cli.interactive_chat import in_options, tool_call
from trimtab.embedded import guess_game
from trimtab.errors import UserError

COUNTER = '''
from trimtab.envs.types import Step

def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b

class Counter:
    tools = (add,)

    def reset(self, task):
        return f"row {task.row}: {task.prompt} {task.label}"

    def step(self, turn):
        if turn.text == "break":
            raise ValueError("it is broken")
        return Step("go on", reward=0.5, done=turn.text == "end", logs={"depth": turn.number})

    def close(self): ...
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return guess_game.write(tmp_path_factory.mktemp("game"), train_rows=1, test_rows=1) / "model"


@pytest.fixture
def typed(monkeypatch, trimtab):
    def run(words: str, lines: str = "", code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        monkeypatch.setenv("COLUMNS", "200")
        done = trimtab(f"play {words}")
        assert done.code == code, done.err
        return done.out, done.err

    return run


def test_a_person_plays_without_a_model_and_sees_no_tokens(typed):
    shown, _ = typed("trimtab:guess --episodes 3", "4\n" * 9)
    assert shown.count("Find my number from 1 to 7 in 3 guesses.") == 3
    assert shown.count("over: reward") == 3 and "token" not in shown
    assert re.search(r"^ +you  4", shown, re.MULTILINE) and re.search(r"^ +user  (higher|lower)", shown, re.MULTILINE)


def test_a_model_plays_and_what_it_drew_stands_in_brackets(typed, model):
    words = f"trimtab:guess --model {model} --max_new_tokens 4 --tokens --seed 1"
    shown, _ = typed(words)
    (strip,) = [line for line in shown.splitlines() if line.startswith("  <user>")]
    turns = re.findall(r"<assistant>\[(.*?)\]", strip)
    said = re.findall(r"^ +model  (.*?)  ", shown, re.MULTILINE)
    assert said == [turn.removesuffix("|<eos>").replace("|", "") for turn in turns]
    whole, drawn = map(int, re.search(r"(\d+) tokens, of which (\d+) carry loss", shown).groups())
    rows = re.findall(r"^(\d+) +(\d+) +(\S.*?) +(yes +-\d\.\d+)? *$", shown, re.MULTILINE)
    assert len(rows) == whole and sum(bool(row[3]) for row in rows) == drawn == sum(t.count("|") + 1 for t in turns)
    again, _ = typed(words)
    figures = re.compile(r", [\d.]+ s\b")
    assert figures.sub("", again) == figures.sub("", shown), "the seed says what is drawn"


def test_a_person_calls_tools_and_reads_what_went_wrong_as_a_model_would(typed, tmp_path):
    (tmp_path / "counter.py").write_text(COUNTER)
    (tmp_path / "rows.jsonl").write_text('{"asked": "count", "right": "7"}\n' * 2)
    lines = "/help\n/tools\n/add a=2\n/add x\n/nothing {}\n/add a=two\nend\n"
    words = f"{tmp_path}/counter.py --dataset {tmp_path}/rows.jsonl --input_key asked --label_key right --row 1"
    shown, told = typed(words, lines)
    assert "row 1: count 7" in shown and "tools: add" in shown
    said = re.findall(r"^ +tool  (.*)$", shown, re.MULTILINE)
    assert said[0] == "3" and all("error" in text for text in said[1:]) and len(said) == 3
    assert "/add (a, b): Add two numbers." in told and "/add: write its arguments as key=value" in told
    assert "tool_calls 3" in shown and "reward 0.5" in shown


def test_a_broken_environment_ends_play_with_its_error_and_exit_code_1(typed, tmp_path):
    (tmp_path / "counter.py").write_text(COUNTER)
    shown, told = typed(f"{tmp_path}/counter.py --env_retries 0 --episodes 2", "break\nend\n", code=1)
    assert shown.count("the environment failed: no reward") == 1
    (line,) = [line for line in told.splitlines() if "failed" in line]
    assert line.startswith("trimtab play: failed: environment ") and "row 0: ValueError: it is broken (line" in line


def test_who_leaves_early_leaves_quietly(typed):
    shown, told = typed("trimtab:guess", "4\n/quit\n")
    assert ("Traceback" not in told and "over" not in shown) or "reward 1" in shown


@pytest.mark.parametrize(
    "words, told",
    [
        ("", "there is nothing to play"),
        ("trimtab:nothing", "trimtab:nothing"),
        ("missing.py", "missing.py"),
        ("trimtab:guess --row -1", "--row"),
        ("trimtab:guess --model no/such/folder", "no/such/folder"),
    ],
)
def test_a_mistake_is_one_line(trimtab, words, told):
    assert told in trimtab(f"play {words}").mistake


def test_the_environment_and_the_model_are_options():
    given = in_options(["a.py:B", "--model=m", "--row", "1"])
    assert given == ["--agent_func_path", "a.py:B", "--pretrain=m", "--row", "1"]
    assert in_options(["gem:x", "--model", "m"]) == ["--environment", "gem:x", "--pretrain", "m"]
    assert in_options(["--environment", "rg:x"]) == ["--environment", "rg:x"]


def test_what_a_person_types_is_a_tool_call():
    tools = [{"function": {"name": "add", "parameters": {"properties": {"c": {"type": "string"}}}}}]
    assert tool_call("add a=2 b=x c=3", tools) == ("add", {"a": 2, "b": "x", "c": "3"}), "a text stays one"
    assert tool_call('add {"a": [1]}', tools) == ("add", {"a": [1]})
    with pytest.raises(UserError, match="no JSON"):
        tool_call("add {1", tools)
