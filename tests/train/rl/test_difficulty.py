"""--difficulty: prompts that are always or never solved are retired, some of their turns come back, and pools survive
kills, stops, several processes and asynchronous training."""

import signal
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests import warm
from tests.command import run
from tests.train.rl.async_run import check_ledger, kill_once_there_is
from tests.train.rl.async_run import words as async_words
from tests.train.rl.rl_run import EVALUATION, PROMPTS, arguments, assert_identical, at, result, rows, without
from tests.train.rl.test_invariance import QUIET
from tests.train.rl.test_source import Answered
from trimtab.config.rl_jobs import GRPOOptions
from trimtab.errors import UserError
from trimtab.interrupts import StopRequest
from trimtab.report.run_data import read_run
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.source import DifficultyPools, SyncSource, prompt_order

FIXED = {"n_samples_per_prompt": 2, "no_shuffle": True, "difficulty": True}


def pools_of(prompts=4, **changes):
    return DifficultyPools(prompts, GRPOOptions(**FIXED | changes))


def visited(pools, row, rate):
    pools.pending = [(row, rate)]
    pools.commit()


def test_a_prompt_is_retired_after_groups_in_a_row_and_a_mixed_group_brings_it_back():
    pools = pools_of(difficulty_after=2, difficulty_return=0.0)
    for rate, retired in ((1.0, False), (0.0, False), (0.0, True), (0.5, False), (1.0, False), (1.0, True)):
        visited(pools, 1, rate)
        assert pools.is_passed_over(1, 7) == retired, rate
    assert pools.figures(3) == {"easy_prompts": 1, "hard_prompts": 0, "active_prompts": 3, "passed_over": 3,
                                "prompt_pass_rate": 1.0}  # fmt: skip


def test_a_range_says_what_is_never_and_always_solved():
    pools = pools_of(difficulty_range=(0.25, 0.75), difficulty_return=0.0)
    for row, rate in enumerate((0.25, 0.5, 0.75, 0.3)):
        visited(pools, row, rate)
    assert [pools.is_passed_over(row, 0) for row in range(4)] == [True, False, True, False]


def test_turns_of_retired_prompts_come_back_at_the_stated_rate_and_the_same_ones_every_time():
    pools = pools_of(difficulty_return=0.2)
    visited(pools, 2, 0.0)
    back = [not pools.is_passed_over(2, place) for place in range(4000)]
    assert 0.17 < np.mean(back) < 0.23
    assert back == [not pools.is_passed_over(2, place) for place in range(4000)]
    assert back != [not pools_with_seed(43).is_passed_over(2, place) for place in range(4000)]


def pools_with_seed(seed):
    pools = pools_of(difficulty_return=0.2, seed=seed)
    visited(pools, 2, 0.0)
    return pools


def source_of(client, **changes):
    options = GRPOOptions(**FIXED | {"rollout_batch_size": 3, "difficulty_return": 0.0} | changes)
    order = prompt_order(10, options, 3)
    return SyncSource(options, order, SamplingParams(), client), order


def drawn_until_the_end(source, order):
    used, found = 0, []
    while used < order.steps:
        experience, taken, figures = source.next(len(found), used, StopRequest())
        if experience is None:
            break
        used += taken
        found.append((experience.rows_S[::2].tolist(), figures["passed_over"]))
        source.trained()
    return found


def test_the_next_epochs_leave_out_what_is_never_solved():
    """Even rows score 0.5 twice, and so are never solved; odd ones 0 and 1."""
    found = drawn_until_the_end(*source_of(Answered()))
    batches = [rows for rows, _ in found]
    assert batches[:3] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert batches[3:] == [[9, 1, 3], [5, 7, 9], [1, 3, 5], [7, 9]]
    assert [passed for _, passed in found][:4] == [0, 0, 0, 2]
    with_all = drawn_until_the_end(*source_of(Answered(), difficulty_return=1.0))
    assert sum(len(rows) for rows, _ in with_all) == 30


def test_a_run_of_which_nothing_is_left_ends():
    found = drawn_until_the_end(*source_of(Answered(useful=lambda row: False)))
    # What is left of the epochs is row 9, which is not yet known to be hard.
    assert [rows for rows, _ in found] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 9, 9]]


@pytest.mark.parametrize("more", ["", "--async_train --async_queue_size 1"])
def test_a_run_whose_last_turns_are_retired_is_evaluated_at_its_end(folder, tmp_path, more):
    words = without(arguments(folder, tmp_path, "grpo"), "--reward_verifier", "--eval_steps", "--num_episodes")
    words += ["--reward_verifier", "exact", "--difficulty", "--difficulty_return", "0", "--num_episodes", "4"]
    assert warm.run([*words, *more.split()]) == 0
    found = read_run(tmp_path)
    assert found.steps < 9 and [step for step, _ in found.series("eval_pass_1")] == [0, found.steps]
    assert found.last("passed_over") is not None, "it is the iteration's row"


def test_a_batch_that_was_not_trained_counts_once():
    """It is sampled again, as after a signal between sampling and the first update."""
    source, _ = source_of(Answered(), difficulty_after=2)
    for _ in range(2):
        source.next(0, 0, StopRequest())
        assert set(source.pools.state(in_hand=False)) == {"rates", "streaks"}
        assert source.pools.state(in_hand=True)["pending"].tolist() == [[0, 0.0], [1, 0.5], [2, 0.0]]
    source.trained()
    assert source.pools.streaks_R.tolist()[:4] == [-1, 0, -1, 0]


def test_pass_rates_are_over_the_samples_with_a_drawn_token():
    pools, drawn = pools_of(3), ([2], [2], [2], [], [], [])
    places = [(prompt, sample) for prompt in range(3) for sample in (0, 1)]
    trajectories = [
        Trajectory(*place, [1], tokens, np.zeros(len(tokens), np.float32), "stop")
        for place, tokens in zip(places, drawn, strict=True)
    ]
    experience = Experience.of([0, 0, 1, 1, 2, 2], trajectories)
    experience.scores_S = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    pools.add(experience)
    assert pools.pending == [(0, 0.5), (1, 1.0)]


def test_pools_of_other_prompts_are_refused():
    with pytest.raises(UserError, match="pass rates of 3 prompts, and now there are 4; give the --prompt_data"):
        pools_of(4).restore(pools_of(3).state(in_hand=False))


# ---- whole runs


@pytest.mark.short(1)
@pytest.mark.parametrize("moment", [(4, "update", 1), (3, "sample", 0), (2, "write", 0), (5, "score", 0)], ids=str)
def test_killed_in_the_middle_and_resumed_equals_uninterrupted(tasks, finished, tmp_path, moment):
    given = arguments(tasks, tmp_path, "difficulty")
    assert warm.run(given, prepare=partial(at, moment, signal.SIGKILL)) == -signal.SIGKILL
    assert warm.run([*given, "--load_checkpoint"]) == 0
    whole = finished("difficulty")
    assert_identical(result(tmp_path), result(whole))
    told = rows(whole)[1:]
    assert sum(row["passed_over"] for row in told) > 0 and told[-1]["hard_prompts"] + told[-1]["easy_prompts"] > 0
    assert all(row["active_prompts"] + row["hard_prompts"] + row["easy_prompts"] == PROMPTS for row in told)
    assert "Difficulty pools" in (whole / "report.html").read_text()


def test_a_run_whose_prompts_are_all_retired_says_why_it_ends(tasks, tmp_path):
    given = arguments(tasks, tmp_path, "difficulty", "--difficulty_return 0 --difficulty_after 1 --num_episodes 6")
    said = warm.output(given, 0)
    found = rows(tmp_path)[-1]["step"]
    assert f"ended after {found} of " in said and "the other turns' prompts were retired or filtered out" in said


@pytest.mark.short(1)
@pytest.mark.parametrize("moment", [(3, "score", 0), (3, "update", 1), (4, "sample", 0)], ids=str)
def test_stopped_with_a_batch_in_hand_or_lost_and_resumed_equals_uninterrupted(tasks, finished, tmp_path, moment):
    given = arguments(tasks, tmp_path, "difficulty")
    assert warm.run(given, prepare=partial(at, moment, signal.SIGTERM)) == 128 + signal.SIGTERM
    assert warm.run([*given, "--load_checkpoint"]) == 0
    assert_identical(result(tmp_path), result(finished("difficulty")))


def test_two_processes_have_the_pools_of_one(folder, tmp_path):
    shared = f"{QUIET} --max_steps 3 --eval_steps -1 --save_steps 3"
    assert warm.run(arguments(folder, tmp_path / "one", "difficulty", shared)) == 0
    assert warm.run_world(arguments(folder, tmp_path / "two", "difficulty", shared, "--zero_stage 2"), 2) == [0, 0]
    assert_same_pools(*(pools_on_disk(tmp_path / name) for name in ("one", "two")))


def pools_on_disk(out):
    last = max((out / "checkpoints").glob("global_step*"), key=lambda path: int(path.name.removeprefix("global_step")))
    return load_file(last / "difficulty" / "tensors.safetensors")


def assert_same_pools(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kill", [False, pytest.param(True, marks=pytest.mark.long)])
def test_in_an_asynchronous_run_each_place_counts_once_and_retired_prompts_are_passed_over(folder, tmp_path, kill):
    """The pools of the last checkpoint are worked out again from the recording, also after a kill."""
    more = f"--no_shuffle --num_episodes 6 --record {tmp_path}/recording --rollout_slots 64"
    given = async_words(folder, tmp_path, "difficulty", more)
    if kill:
        prepare = partial(kill_once_there_is, tmp_path / "checkpoints" / "latest")
        assert warm.run(given, prepare=prepare) == -signal.SIGKILL
        given = [*given, "--load_checkpoint"]
    assert warm.run(given) == 0
    lines = check_ledger(tmp_path, places=6 * PROMPTS)
    rates, retired = {}, {}
    for line in lines:
        if line["trained"]:
            batch = load_file(tmp_path / "recording" / f"iteration{line['iteration']:06d}.safetensors")
            scores = batch["scores_S"].view(-1, 4)
            rates |= dict(zip(line["trained"], (scores >= 1.0).double().mean(1).tolist(), strict=True))
        retired |= dict.fromkeys(line["retired"])
    assert retired and len(rates) + len(retired) == 6 * PROMPTS
    for place in retired:
        before = [rates[p] for p in range(place % PROMPTS, place, PROMPTS) if p in rates]
        # Several turns of a prompt may be in flight, so not always because of the last one.
        assert any(not 0.3 < rate < 0.7 for rate in before), "retired because of what it scored"
    for row, rate in enumerate(pools_on_disk(tmp_path)["rates"].tolist()):
        assert rate in [rates[p] for p in range(row, 6 * PROMPTS, PROMPTS) if p in rates]


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--difficulty --difficulty_range 0.5 0.5", "--difficulty_range 0.5 0.5: the first must be below the second"),
        ("--difficulty --difficulty_return 1.5", "--difficulty_return is 1.5: it must be between 0 and 1"),
        ("--difficulty --difficulty_after 0", "--difficulty_after is 0: it must be at least 1"),
        ("--difficulty --teacher_model None-such", "--difficulty needs a reward to judge groups by"),
    ],
)
def test_wrong_words(folder, tmp_path, capsys, words, expected):
    given = without(arguments(folder, tmp_path, "grpo"), *EVALUATION, "--reward_verifier" if "None" in words else "")
    assert expected in run(capsys, " ".join(given), *words.split()).mistake
