"""What is asked of asynchronous training: what it settles, what is refused and what has no effect, a line each."""

import dataclasses

import pytest

from tests.config.every_job import RL, lines_of, refusal
from trimtab.config.parser import parse
from trimtab.config.resolved_config import settled_and_checked
from trimtab.config.rl_jobs import GRPOOptions

ASYNC = f"{RL} --async_train"
APART = "--ray --vllm_num_engines 1"
WEIGHED = "answers may be older than the policy that learns from them: tokens are weighed by their ratio, at most 2 "
WEIGHED += "(--mismatch_correction tis; None switches it off)"


def settled(words):
    return settled_and_checked(parse(GRPOOptions, words.split()))[0]


@pytest.mark.parametrize(
    "words, depth, bound",
    [
        ("", 1, 4),
        ("--async_queue_size 3", 3, 12),
        ("--async_queue_size 3 --async_staleness 3", 3, 3),
        ("--async_staleness 1", 1, 1),
        ("--async_staleness 0", 0, 0),
        ("--async_queue_size 0", 0, 0),
        ("--async_queue_size 2 --async_staleness 0", 0, 0),
        ("--async_queue_size 0 --async_staleness 4", 0, 0),
    ],
)
def test_depth_and_bound_are_settled_once_and_for_all(words, depth, bound):
    options = settled(f"{ASYNC} {words}")
    assert (options.async_queue_size, options.async_staleness) == (depth, bound)
    assert options.outlives_updates == (bound > 0)
    assert parse(GRPOOptions, f"{ASYNC} {words}".split()).outlives_updates == options.outlives_updates
    again, _ = settled_and_checked(options)
    assert again == options


def test_without_it_nothing_is_settled():
    options = settled(RL)
    assert not options.outlives_updates and options.async_staleness is None and options.mismatch_correction is None


@pytest.mark.parametrize(
    "verb, words, told",
    [
        (
            *("grpo", "--async_queue_size 4 --async_staleness 2"),
            "--async_staleness 2 is less than --async_queue_size 4: answers so many batches ahead are as old when "
            "their turn comes; give at least 4, or 0 to write nothing ahead",
        ),
        ("grpo", "--async_staleness -1", "--async_staleness is -1: it must be at least 0"),
        ("grpo", "--async_queue_size -1", "--async_queue_size is -1: it must be at least 0"),
        ("grpo", "--async_timeout 0", "--async_timeout is 0: it must be above 0"),
        (
            *("grpo", "--environment trimtab:guess --env_timeout 900"),
            "--async_timeout 600 would end the run while an environment is within its --env_timeout 900: give 9000",
        ),
        *(
            (
                *("grpo", f"--replay rec {more}"),
                "--async_train and --replay: a recording of an asynchronous run is replayed without --async_train; "
                "leave it out",
            )
            for more in ("", "--async_staleness 0")
        ),
        (
            *("grpo", "--async_train False --partial_rollout"),
            "--partial_rollout lets answers go on after an update: add --async_train, or leave it out",
        ),
        (
            *("grpo", "--dynamic_filtering --dynamic_filtering_batches 3"),
            "--dynamic_filtering_batches counts rounds of sampling, and --async_train has none: leave it out",
        ),
        (
            *("dapo", "--drop_last"),
            "--drop_last with --dynamic_filtering: --async_train learns from every useful group, also where the last "
            "ones do not fill an iteration; leave --drop_last out",
        ),
        *(
            (
                *("ppo", f"{APART} --{name}"),
                f"--{name}: with --async_train engines write while the policy learns, and neither rests; leave it out",
            )
            for name in ("vllm_enable_sleep", "deepspeed_enable_sleep")
        ),
        (
            *("ppo", f"{APART} --colocate_all_models"),
            "--colocate_all_models: with --async_train engines write while the policy learns; give them GPUs of their "
            "own, or use --rollout_engine builtin",
        ),
        *(
            ("tail", more, "--async_train: tail methods learn from the policy's own new answers; leave it out")
            for more in ("--method repulse", "--method ppo", "--async_staleness 0")
        ),
    ],
)
def test_wrong_settings_are_refused_in_one_line(verb, words, told):
    assert refusal(lines_of, verb, f"{ASYNC} {words}") == told


@pytest.mark.parametrize(
    "words, told",
    [
        ("--async_staleness 0 --async_queue_size 2", "--async_queue_size has no effect with --async_staleness 0: "),
        ("--async_staleness 4 --async_queue_size 0", "--async_staleness has no effect with --async_queue_size 0: "),
        ("--async_staleness 0 --partial_rollout", "--partial_rollout has no effect where nothing is written ahead"),
        ("--partial_rollout", "--partial_rollout has no effect where the engine is with the policy: "),
        ("--partial_rollout False", "--partial_rollout False has no effect where the engine is with the policy: "),
        ("--partial_rollout --ray", "--partial_rollout has no effect where the engine is with the policy: "),
        ("--dynamic_filtering --vllm_generate_batch_size 8", "--vllm_generate_batch_size has no effect with --async"),
    ],
)
def test_what_has_no_effect_is_said_in_one_line(words, told):
    (line,) = (line for line in lines_of("grpo", f"{ASYNC} {words}") if line != WEIGHED)
    assert line.startswith(told)


@pytest.mark.parametrize("name, value", [("async_queue_size", 2), ("async_staleness", 2), ("async_timeout", 5)])
def test_without_asynchronous_training_its_numbers_have_no_effect(name, value):
    assert lines_of("grpo", f"{RL} --{name} {value}") == [f"--{name} has no effect without --async_train"]


@pytest.mark.parametrize(
    "words",
    [
        "--async_staleness 0 --dynamic_filtering --dynamic_filtering_batches 3",
        "--async_queue_size 0 --dynamic_filtering --drop_last",
        "--async_staleness 0 --ray --vllm_num_engines 1 --vllm_enable_sleep --deepspeed_enable_sleep",
        "--async_staleness 0 --ray --vllm_num_engines 1 --colocate_all_models",
        "--deepspeed_enable_sleep",  # what is refused beside engines apart has its turns where the policy writes
        "--drop_last",
        "--ray --colocate_all_models --deepspeed_enable_sleep",
        "--ray --vllm_num_engines 1 --partial_rollout",
    ],
)
def test_what_goes_well_with_it_is_accepted_without_a_word(words):
    assert lines_of("grpo", f"{ASYNC} {words} --mismatch_correction None") == []


@pytest.mark.parametrize(
    "words, correction, bounds, said",
    [
        ("", "tis", (0.0, 2.0), True),
        ("--ray --vllm_num_engines 1", "tis", (0.0, 2.0), True),
        ("--mismatch_range 0.5 5", "tis", (0.5, 5.0), True),
        ("--mismatch_correction None", None, (0.5, 2.0), False),
        ("--mismatch_correction icepop", "icepop", (0.5, 2.0), False),
        ("--enable_vllm_is_correction --vllm_is_truncated_threshold 3", "tis", (0.0, 3.0), False),
        ("--async_staleness 0", None, (0.5, 2.0), False),
        ("--async_queue_size 0", None, (0.5, 2.0), False),
    ],
)
def test_answers_that_may_be_older_are_corrected_unless_another_wish_is_said(words, correction, bounds, said):
    options, lines = settled_and_checked(parse(GRPOOptions, f"{ASYNC} {words}".split()))
    assert (options.mismatch_correction, options.mismatch_range) == (correction, bounds)
    assert any(line.startswith("answers may be older") for line in lines) == said


def test_a_bound_of_nothing_is_the_synchronous_run_in_every_other_option():
    own = {"async_train", "async_queue_size", "async_staleness", "given"}
    named = "--wandb_run_name one"  # it is made of the time otherwise
    plain, bound = settled(f"{RL} {named}"), settled(f"{ASYNC} {named} --async_staleness 0")
    differing = {f.name for f in dataclasses.fields(plain) if getattr(plain, f.name) != getattr(bound, f.name)}
    assert differing <= own
