import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from datasets import Dataset

import trimtab
from tests.api.small import RL
from tests.tiny import tiny_model
from trimtab.api.arguments import GivenFiles, as_arguments, reward_options
from trimtab.config.rl_jobs import GRPOOptions
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.errors import UserError


@pytest.fixture
def given(tmp_path):
    (tmp_path / "given").mkdir()
    return GivenFiles(tmp_path / "given")


def written(place: str) -> list[dict]:
    return [json.loads(line) for line in Path(place).read_text().splitlines()]


@pytest.mark.parametrize(
    "rows, expected",
    [
        (["a", "b"], [{"question": "a"}, {"question": "b"}]),
        ((text for text in "ab"), [{"question": "a"}, {"question": "b"}]),
        ([[{"role": "user", "content": "a"}]], [{"question": [{"role": "user", "content": "a"}]}]),
        ([{"x": numpy.float32(0.5), "y": numpy.arange(2), "z": None}], [{"x": 0.5, "y": [0, 1], "z": None}]),
        (Dataset.from_dict({"x": ["é"]}), [{"x": "é"}]),
    ],
)
def test_rows_of_any_kind_become_lines(rows, expected, given):
    assert written(given.rows("prompt_data", rows, "question")) == expected


def test_of_what_has_no_end_as_many_are_taken_as_are_asked_for(given):
    from itertools import count

    assert len(written(given.rows("dataset", map(str, count()), "input", most=3))) == 3


@pytest.mark.parametrize(
    "rows, words",
    [
        ([], "there are no rows"),
        ([1], "row 0 is int: a row is a text"),
        (["a", {"x": object()}], "row 1, column x: object has no form in JSON"),
        ({"train": ["a"]}, "give one of its splits"),
        (5, "takes a path, a hub name, or rows"),
    ],
)
def test_what_are_no_rows_is_one_line(rows, words, given):
    with pytest.raises(UserError, match=words):
        given.rows("dataset", rows, "input")


def test_a_place_stays_what_it_is_and_nothing_is_written(given):
    assert given.rows("dataset", "owner/data", "input") == "owner/data"
    assert given.model("pretrain", Path("model"), None) == "model"
    assert not given


def test_what_was_given_comes_into_the_folder_of_the_run(given, tmp_path):
    rows, model = given.rows("dataset", ["a"], "input"), given.model("pretrain", tiny_model(), make_tokenizer())
    home = tmp_path / "out" / "given"
    settled = given.move_to(str(tmp_path / "out"))
    assert settled(rows) == str(home / "dataset.jsonl") and written(settled(rows)) == [{"input": "a"}]
    assert settled(model) == str(home / "pretrain") and (home / "pretrain" / "model.safetensors").is_file()
    assert (home / "pretrain" / "tokenizer.json").is_file() and settled(3) == 3


def test_a_loaded_model_without_a_tokenizer_says_what_is_missing(given):
    with pytest.raises(UserError, match="give tokenizer="):
        given.model("pretrain", tiny_model(), None)
    with pytest.raises(UserError, match="takes a folder, a name or a loaded PreTrainedModel, not int"):
        given.model("pretrain", 3, None)


def one(queries, prompts, labels):
    return [0.0] * len(queries)


@pytest.mark.parametrize(
    "reward, weights, expected",
    [
        (one, None, {"reward_func": "given:one"}),
        ("f.py:g", None, {"reward_func": "f.py:g"}),
        (Path("f.py"), None, {"reward_func": "f.py"}),
        ("http://localhost:5000/get", None, {"remote_rm_url": "http://localhost:5000/get"}),
        ("gsm8k:1.0,format:0.2", None, {"reward_verifier": "gsm8k:1.0,format:0.2"}),
        ("regex(^Yes)", None, {"reward_verifier": "regex(^Yes)"}),
        ("owner/judge", None, {"reward_pretrain": "owner/judge"}),
        ([one, one], None, {"reward_func": "given:one,given:one_2"}),
        (
            ["exact", one, "owner/judge"],
            [0.5, 2, 3],
            {"reward_func": "given:one", "reward_pretrain": "owner/judge"}
            | {"reward_verifier": "exact:0.5", "reward_weights": [3, 2]},
        ),
    ],
)
def test_a_reward_becomes_the_option_that_says_it(reward, weights, expected, given):
    chosen, functions = reward_options(reward, {"reward_weights": weights}, given)
    assert chosen == expected
    assert all(function is one for function in functions.values())


@pytest.mark.parametrize(
    "reward, options, words",
    [
        (one, {"reward_func": "f.py"}, "given twice, as reward and as reward_func"),
        ([], {}, "the list is empty"),
        (3, {}, "reward takes a function, .* not int"),
        ([one, "exact"], {"reward_weights": ["a", 1]}, "takes numbers, not"),
        ([one, "exact"], {"reward_weights": [1]}, "has 1 numbers for 2 rewards"),
    ],
)
def test_rewards_that_cannot_be_meant_are_one_line(reward, options, words, given):
    with pytest.raises(UserError, match=words):
        reward_options(reward, options, given)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one of them
        b: the other
    """
    return a + b


class Sum:
    """TRL's shape: public methods are tools."""

    def reset(self, **row):
        return None

    def get_reward(self):
        return 1.0


@pytest.mark.parametrize("environment", [pytest.param(None, marks=pytest.mark.long), Sum])
def test_tools_are_told_to_the_model_by_whoever_loads_what_was_written(environment, given):
    place = given.environment(environment, [add])["agent_func_path"]
    script = f"from trimtab.envs.loader import load; print([t['function']['name'] for t in load({place!r}).info.tools])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['add']", done.stderr


@pytest.mark.parametrize(
    "environment, tools, words",
    [
        ("trimtab:guess", [add], "has its own"),
        (None, [3], "3 is no function"),
        (None, add, "tools is one function"),
        (5, [], "environment takes a class"),
        (lambda: 0, [add], "give its class, with its tools"),
    ],
)
def test_environments_that_cannot_be_meant_are_one_line(environment, tools, words, given):
    with pytest.raises(UserError, match=words):
        given.environment(environment, tools)


def test_a_named_environment_is_the_option_that_says_it(given):
    assert given.environment("trimtab:guess", ()) == {"environment": "trimtab:guess"}
    assert given.environment(Path("game.py"), ()) == {"agent_func_path": "game.py"}
    assert given.environment("a/game.py:Game", ()) == {"agent_func_path": "a/game.py:Game"}


def test_an_environment_of_this_very_file_is_played(task):
    base = 3  # what a class refers to goes with it

    class Parrot:
        """Says a word back once."""

        def reset(self, task):
            return None

        def step(self, turn):
            from trimtab.envs.types import Step

            return Step("again", reward=float(base), done=turn.number == 1)

    run = trimtab.grpo(
        task / "model", ["sort 12>"] * 2, environment=Parrot, save_path="out", max_turns=3, episode_max_len=60,
        agent_history="append", **{**RL, "label_key": None},
    )  # fmt: skip
    assert run.metrics[0]["turns"] == 2.0 and run.metrics[0]["reward"] == 6.0


# ---- errors in the words of a call

NAMES = {"pretrain": "model", "prompt_data": "prompts", "load_checkpoint": "resume"}


@pytest.mark.parametrize(
    "text, told",
    [
        ("--pretrain is missing: give a model folder", "model is missing: give a model folder"),
        ("--pretrain ./m: no such folder", "model=./m: no such folder"),
        ("--init_kl_coef is -1: lower --kl_target", "init_kl_coef is -1: lower kl_target="),
        ("a prompt is too long: --prompt_max_len 8 is less", "a prompt is too long: prompt_max_len=8 is less"),
        ("lower it, or --eps_clip_low_high 0.2 0.28", "lower it, or eps_clip_low_high=(0.2, 0.28)"),
        ("add --bf16, or --ray False", "add bf16=True, or ray=False"),
        ("use --rollout_engine vllm with --reward_func FILE.py", "use rollout_engine=vllm with reward_func=FILE.py"),
        ("no column 'a' (--label_key) in the data", "no column 'a' (label_key=) in the data"),
        ("finish the run (--load_checkpoint)", "finish the run (resume=True)"),
        ("TRL's x is --num_generations here", "TRL's x is num_generations= here"),
        ("trimtab grpo --help all lists them", "trimtab grpo --help all lists them"),
        ("merge it: trimtab lora-combine --model_path m --bf16; or --bf16",
         "merge it: trimtab lora-combine --model_path m --bf16; or bf16=True"),
        ("a file -- of mine --nothing", "a file -- of mine --nothing"),
    ],
)  # fmt: skip
def test_options_in_a_text_become_arguments_and_shell_commands_stay(text, told):
    assert as_arguments(text, GRPOOptions, NAMES) == told


@pytest.mark.parametrize("reward", ["exakt", "accuracy", "exakt:0.5,format"])
def test_a_text_that_is_no_reward_is_told_what_a_reward_may_be(reward, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(trimtab.UserError) as raised:
        trimtab.grpo("owner/model", ["a"], reward)
    told = str(raised.value)
    assert told.startswith(f"reward {reward!r} is neither a verifier nor a folder: ")
    assert ("did you mean 'exact'?" in told) is reward.startswith("exakt")
    assert "a verifier (gsm8k, number, math, code, exact, regex, format, kk, length)" in told
