from dataclasses import replace
from typing import ClassVar

import pytest

from trimtab.config.jobs import SFTOptions
from trimtab.config.option import Limits, Options, every, option
from trimtab.config.parser import parse
from trimtab.config.resolved_config import check, settle, settled_and_checked
from trimtab.errors import UserError


@pytest.mark.parametrize(
    "limits, right, wrong, complaint",
    [
        (Limits(at_least=1), 1, 0, "is 0: it must be at least 1"),
        (Limits(above=0), 0.1, 0.0, "is 0: it must be above 0"),
        (Limits(at_least=0, at_most=1), 1.0, 1.5, "is 1.5: it must be between 0 and 1"),
        (Limits(at_least=0, below=1), 0.0, 1.0, "is 1: it must be at least 0 and below 1"),
        (Limits(above=0, at_most=1), 1.0, 0.0, "is 0: it must be above 0 and at most 1"),
        (Limits(choices=("a", "b", "c")), "c", "d", "is d: it must be a, b or c"),
        (Limits(choices=(0, 1)), 1, 2, "is 2: it must be 0 or 1"),
        (Limits(steps=True), -1, 0, "is 0: it must be a number of steps above 0, or -1"),
        (Limits(at_least=0, below=1), (0.5, 0.0), (0.5, 1.0), "has 1: each must be at least 0 and below 1"),
        (Limits(at_least=1), None, -1, "is -1: it must be at least 1"),
    ],
)
def test_limits_let_the_right_values_through_and_say_what_is_wrong_with_the_others(limits, right, wrong, complaint):
    assert limits.complaint(right) is None
    assert limits.complaint(wrong) == complaint


class Low(Options):
    """Low"""

    switch: bool = False
    """A switch."""
    knob: int = option(1, at_least=1, needs="switch")
    """A knob."""
    often: int = every(-1)
    """How often."""

    def check(self):
        yield "low"


class High(Low, knob=2):
    """High"""

    idle_here: ClassVar = {"often": "in a probe"}

    def check(self):
        yield "high"


def test_every_group_speaks_once_the_job_first():
    assert check(High()) == ["high", "low"]


def test_a_default_that_a_job_changes_keeps_its_bounds():
    with pytest.raises(UserError, match="--knob is 0: it must be at least 1"):
        check(High(knob=0))


@pytest.mark.parametrize(
    "changes, lines",
    [
        ({"knob": 3}, ["--knob has no effect without --switch"]),
        ({"knob": 2}, []),
        ({"knob": 2, "given": frozenset({"knob"})}, ["--knob has no effect without --switch"]),
        ({"knob": 3, "switch": True}, []),
        ({"often": 5}, ["--often has no effect in a probe"]),
        ({"often": -1, "given": frozenset({"often"})}, []),
        ({"switch": False, "given": frozenset({"switch"})}, []),
    ],
)
def test_only_what_the_user_asked_for_is_said_to_have_no_effect(changes, lines):
    assert check(High(**changes))[2:] == lines


def test_what_was_given_is_known_even_where_it_is_the_default(tmp_path):
    assert parse(SFTOptions, ["--max_len", "2048", "--bf16", "False"]).given == {"max_len", "bf16"}
    path = tmp_path / "some.yaml"
    path.write_text("lora_alpha: 16\n")
    options = parse(SFTOptions, ["--config", str(path), "--pretrain", "a/b", "--dataset", "a/b"])
    assert options.given == {"config", "pretrain", "dataset", "lora_alpha"}
    assert check(options) == ["--lora_alpha has no effect without --lora_rank"]


def test_options_made_in_python_count_as_given_where_they_differ_from_their_defaults():
    assert SFTOptions(max_len=7, lora_alpha=16).given == {"max_len"}
    assert replace(SFTOptions(max_len=7), bf16=True).given == {"max_len"}


def test_what_settling_fills_in_is_not_given():
    settled, _ = settle(SFTOptions())
    assert settled.wandb_run_name and "wandb_run_name" not in settled.given


def test_options_are_settled_and_checked_without_a_command_line():
    options, lines = settled_and_checked(SFTOptions(pretrain="a/b", dataset="a/b", lora_alpha=32))
    assert options.wandb_run_name and lines == ["--lora_alpha has no effect without --lora_rank"]
    with pytest.raises(UserError, match="--pretrain is missing"):
        settled_and_checked(SFTOptions())
    with pytest.raises(UserError, match=r"--use_ms \(ModelScope\) is not implemented"):
        settled_and_checked(SFTOptions(pretrain="a/b", dataset="a/b", use_ms=True))


def test_deepcompile_is_compile_on():
    options, lines = settled_and_checked(SFTOptions(pretrain="a/b", dataset="a/b", deepcompile=True))
    assert options.compile == "on" and lines == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--use_liger_kernel", "--use_liger_kernel"),
        ("--load_in_4bit --bf16 --lora_rank 4", "--load_in_4bit"),
        ("--gradient_checkpointing --gradient_checkpointing_keep products", "--gradient_checkpointing_keep products"),
    ],
)
def test_what_cannot_be_compiled_is_refused_only_where_compile_is_on(words, told):
    options = parse(SFTOptions, f"--pretrain a/b --dataset a/b {words}".split())
    assert options.compile == "auto" and options.not_compiled == told
    with pytest.raises(UserError, match=f"^--compile on does not work with {told}: leave one of them out$"):
        settled_and_checked(replace(options, compile="on"))
