"""The environments of examples/agents, and the commands of their recipes."""

import importlib.util

import pytest

from tests.examples.test_examples import EXAMPLES, command
from trimtab.config import jobs
from trimtab.config.parser import parse
from trimtab.config.resolved_config import check, settle
from trimtab.envs.tools import tool_schemas
from trimtab.envs.types import Task, Turn

RECIPES = sorted(path.stem for path in (EXAMPLES / "agents").glob("*.sh") if path.stem != "common")


@pytest.fixture(scope="module")
def calculator():
    specification = importlib.util.spec_from_file_location("calculator", EXAMPLES / "agents" / "calculator.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def said(text: str) -> Turn:
    return Turn(text, {"role": "assistant", "content": text}, [], "stop", 0, 99)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_command_of_grpo_with_an_environment(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module, words = command(f"agents/{name}", "--max_samples", "64")
    assert module == "trimtab.cli.train_grpo"
    options, _ = settle(parse(jobs.GRPOOptions, words))
    assert options.plays and options.max_samples == 64 and options.generate_max_len >= 1024
    check(options)


def test_there_are_the_four_recipes():
    assert RECIPES == ["calculator", "gem_game", "reasoning_gym", "verifiers_environment"]


def test_the_calculator_works_sums_out_and_nothing_else(calculator):
    assert calculator.calculate("17 * (4 + 5) - -3") == "156"
    for text in ("1/0", "2**99", "open('x')", "a", "1.5", "True", "(1).real", "'a'*9"):
        with pytest.raises(ValueError, match="whole numbers"):
            calculator.calculate(text)
    (schema,) = tool_schemas(calculator.Calculator.tools)
    assert schema["function"]["parameters"]["required"] == ["expression"]


def test_the_last_number_of_an_answer_counts(calculator):
    for row in calculator.rows(20, 0):
        asked = row["prompt"].removeprefix("What is ").partition("?")[0]
        assert int(row["label"]) == eval(asked)
        game = calculator.Calculator()
        assert game.reset(Task(0, 0, 0, row["prompt"], row["label"])) is None
        assert game.step(said(f"9 and so {row['label']}.")).reward == 1
        step = game.step(said(f"{row['label']}, or 5"))
        assert step.reward == (row["label"] == "5") and step.done
