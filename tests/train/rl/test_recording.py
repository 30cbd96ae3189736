"""--record and --replay: the recorded updates again, and no recording that this run cannot have made."""

import shutil
import signal
from functools import partial

import pytest

from tests import warm
from tests.train.rl.rl_run import ITERATIONS, arguments, assert_identical, at, result, rows, without

LAST = f"iteration{ITERATIONS:06d}.safetensors"
NOTHING_IN_RANGE = "--dynamic_filtering --dynamic_filtering_reward_range 5 6"


def complaint(words):
    told = warm.output(words, 2)
    assert "Traceback" not in told
    return told.strip().splitlines()[-1]


def test_a_replay_needs_no_reward(folder, recorded, tmp_path):
    words = without(arguments(folder, tmp_path, "grpo"), "--reward_verifier", "--eval_dataset")
    printed = warm.output([*words, "--replay", f"{recorded}/recording"])
    assert f"reward: as recorded in {recorded}/recording" in printed
    assert rows(tmp_path)[-1]["loss"] == rows(recorded)[-1]["loss"]


def test_a_replay_that_was_killed_and_resumed_is_the_recorded_run(folder, recorded, tmp_path):
    words = arguments(folder, tmp_path, "grpo", f"--replay {recorded}/recording")
    assert warm.run(words, prepare=partial(at, (3, "update", 1), signal.SIGKILL)) == -signal.SIGKILL
    assert warm.run([*words, "--load_checkpoint"]) == 0
    assert_identical(result(tmp_path), result(recorded))


def test_a_recording_that_was_killed_and_resumed_is_whole(folder, recorded, tmp_path):
    words = arguments(folder, tmp_path, "grpo", f"--record {tmp_path}/recording")
    assert warm.run(words, prepare=partial(at, (3, "update", 1), signal.SIGKILL)) == -signal.SIGKILL
    shutil.copy(recorded / "recording" / LAST, tmp_path / "recording" / "iteration000009.safetensors")
    assert warm.run([*words, "--load_checkpoint"]) == 0
    kept = {path.name: path.read_bytes() for path in (tmp_path / "recording").iterdir()}
    assert kept == {path.name: path.read_bytes() for path in (recorded / "recording").iterdir()}


def recorded_and_replayed(folder, place, estimator, record="", replay=""):
    """The folders of a run and of its replay, which were given these words too."""
    outs = place / "first", place / "second"
    for out, words, more in zip(outs, ("--record", "--replay"), (record, replay)):
        assert warm.run(arguments(folder, out, estimator, f"{words} {place}/recording", more)) == 0
    return outs


def test_a_run_whose_prompts_ran_out_in_the_filter_is_replayed_to_the_same_end(folder, tmp_path):
    first, second = recorded_and_replayed(folder, tmp_path, "grpo", NOTHING_IN_RANGE, NOTHING_IN_RANGE)
    assert rows(first) == rows(second) and len(rows(first)) == 1, "there was nothing to learn from"


def test_a_filtered_run_is_replayed(folder, tmp_path):
    first, second = recorded_and_replayed(folder, tmp_path, "filtered")
    assert_identical(result(first), result(second))


@pytest.mark.short(5)
@pytest.mark.parametrize(
    "words, told",
    [
        ("--num_episodes 9", "has no iteration 6"),
        ("--n_samples_per_prompt 2", "--n_samples_per_prompt 4, not 2"),
        ("--rollout_batch_size 8", "--rollout_batch_size 4, not 8"),
        ("--replay nowhere", "--replay nowhere: the recording has no iteration 1"),
    ],
)
@pytest.mark.parametrize("how", ["", "--dry_run"])
def test_a_recording_that_does_not_fit_the_run_is_refused_before_it(folder, recorded, tmp_path, words, told, how):
    given = arguments(folder, tmp_path / "out", "grpo", f"--replay {recorded}/recording", words, how)
    assert told in complaint(given)
    assert not (tmp_path / "out").exists(), "it was refused when something had been learnt already"


def test_a_recording_of_other_prompts_is_refused(folder, recorded, tmp_path):
    words = arguments(folder, tmp_path / "out", "grpo", f"--replay {recorded}/recording")
    words = [word.replace("prompts.jsonl", "test.jsonl") for word in words]
    assert "other prompts" in complaint(words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("spoil", [lambda whole: whole[: len(whole) // 2], lambda whole: b"", lambda whole: b"x" * 99])
def test_a_damaged_recording_is_refused_before_the_run(folder, recorded, tmp_path, spoil):
    damaged = shutil.copytree(recorded / "recording", tmp_path / "recording")
    (damaged / LAST).write_bytes(spoil((damaged / LAST).read_bytes()))
    told = complaint(arguments(folder, tmp_path / "out", "grpo", f"--replay {damaged}"))
    assert LAST in told and "damaged" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", ["", "--dry_run"])
def test_a_folder_with_a_recording_is_not_recorded_into_again(folder, recorded, tmp_path, how):
    words = arguments(folder, tmp_path / "out", "grpo", f"--record {recorded}/recording --seed 5", how)
    assert "it holds a recording already" in complaint(words)
