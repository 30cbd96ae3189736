"""Asynchronous runs through the real command: what they train, whatever stops them, judged by their ledger."""

import itertools
import json
import random
import signal
from functools import partial
from pathlib import Path

import pytest

from tests import warm
from tests.train.rl.async_run import check_ledger, kill_after, tell_while_collecting, words
from tests.train.rl.rl_run import EPISODES, EVALUATION, PROMPTS, arguments, assert_identical, at, result, rows, without
from trimtab.cli.main import main
from trimtab.errors import CannotWrite, OutOfMemory
from trimtab.train.metrics import read_rows
from trimtab.train.rl.async_worker import AsyncRolloutWorker
from trimtab.train.rl.files import RunFiles
from trimtab.train.rl.loop import RLRun
from trimtab.train.update import InsufficientMemory, RebuildModels

SLOW = """
import random, time

def reward_func(queries, prompts, labels, **kwargs):
    time.sleep(min(random.Random(queries[0]).lognormvariate(-3, 1.5), 1.0))
    return [float(len(query) % 3) for query in queries]
"""


def slowly_rewarded(folder: Path, out: Path, estimator: str, *more: str) -> list[str]:
    (out.parent / "reward.py").write_text(SLOW)
    given = without(words(folder, out, estimator, *more), "--reward_verifier", *EVALUATION)
    return [*given, "--reward_func", str(out.parent / "reward.py")]


@pytest.mark.short(1)
@pytest.mark.parametrize("estimator", ["grpo", "ppo", "reinforce"])
def test_where_nothing_may_age_the_run_is_the_synchronous_one_bit_for_bit(folder, tmp_path, estimator):
    assert main(arguments(folder, tmp_path / "plain", estimator, "--max_steps 3")) == 0
    asked = "--max_steps 3 --async_train --async_staleness 0"
    assert main(arguments(folder, tmp_path / "asked", estimator, asked)) == 0
    assert_identical(result(tmp_path / "plain"), result(tmp_path / "asked"))
    assert not (tmp_path / "asked" / "ledger.jsonl").exists()


@pytest.mark.short(2)
@pytest.mark.parametrize(
    "estimator, more",
    [
        ("filtered", "--num_episodes 4"),
        ("ppo", "--reward_pretrain {folder}/judge --enable_ema"),
        ("lora", ""),
        ("reinforce", "--async_queue_size 2 --async_staleness 2"),
        (
            "reinforce_baseline",
            "--reward_pretrain {folder}/judge --dynamic_filtering --dynamic_filtering_rule differing",
        ),
    ],
)
def test_every_prompt_is_trained_or_filtered_once_and_in_time(folder, tmp_path, estimator, more):
    assert main(words(folder, tmp_path, estimator, more.format(folder=folder))) == 0
    places = 36 if "--num_episodes 4" in more else 18
    lines = check_ledger(tmp_path, places=places)
    found = rows(tmp_path)
    assert any(row.get("read_again") for row in found), "some were in the middle of being written"
    assert any(row.get("age") for row in found)
    if estimator == "filtered":
        assert sum(len(line["filtered"]) for line in lines) > 0


def test_a_run_of_so_many_steps_leaves_nothing_half_written_and_goes_on(folder, tmp_path):
    given = words(folder, tmp_path, "grpo")
    assert main([*given, "--max_steps", "3"]) == 0
    check_ledger(tmp_path, places=12)
    state = json.loads((tmp_path / "checkpoints" / "global_step3" / "state.json").read_text())
    assert state["ahead"]["ledger"]["versions"] == []
    assert main([*given, "--load_checkpoint"]) == 0
    check_ledger(tmp_path)


@pytest.mark.short(1)
@pytest.mark.parametrize(
    "split, processes",
    [
        ("--zero_stage 3", 2),
        ("", 2),
        ("--ds_tensor_parallel_size 2", 2),
        ("--ring_attn_size 2", 2),
        ("--ds_tensor_parallel_size 2 --zero_stage 3", 4),
        ("--controller_apart", 3),
    ],
)
def test_several_processes_keep_to_the_same_rules_and_may_be_stopped(folder, tmp_path, split, processes):
    given = words(folder, tmp_path / "out", "ppo", f"--reward_pretrain {folder}/judge --num_episodes 1", split)
    moment = {0: partial(at, (1, "update", 0), signal.SIGTERM)}
    codes = warm.run_world(given, processes, prepare=moment, log=tmp_path / "log")
    assert codes[0] == 128 + signal.SIGTERM, (tmp_path / "log.0").read_text()
    warm.world_outputs([*given, "--load_checkpoint"], processes)
    check_ledger(tmp_path / "out", places=9)


# ---- stops and kills


def drafts(checkpoint: Path) -> int:
    """How many tokens of answers that are not whole lie in a checkpoint."""
    state = json.loads((checkpoint / "state.json").read_text())
    groups = state["ahead"]["under_way"]
    return sum(draft["tokens"] for group in groups for draft in group["drafts"] if draft["finish"] is None)


MOMENTS = [
    (1, "update", 1),
    (2, "sample", 0),
    (1, "score", 0),
    (0, "evaluate", 0),
    (3, "evaluate", 0),
    (0, "sample", 0),
]


@pytest.mark.short(1)
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_stopped_by_a_signal_nothing_is_lost(folder, tmp_path, moment):
    given = words(folder, tmp_path, "grpo")
    assert warm.run(given, prepare=partial(at, moment, signal.SIGTERM)) == 128 + signal.SIGTERM
    assert main([*given, "--load_checkpoint"]) == 0
    check_ledger(tmp_path)


def test_answers_that_a_signal_finds_half_written_are_written_on(folder, tmp_path):
    given = words(folder, tmp_path, "grpo")
    prepare = partial(tell_while_collecting, signal.SIGTERM, 20)
    assert warm.run(given, prepare=prepare) == 128 + signal.SIGTERM
    saved = max((tmp_path / "checkpoints").glob("global_step*"))
    written = drafts(saved)
    assert written > 0
    assert main([*given, "--load_checkpoint"]) == 0
    check_ledger(tmp_path)
    first = next(row for row in rows(tmp_path) if row["step"] == int(saved.name.removeprefix("global_step")) + 1)
    assert first["read_again"] >= written, "they were read again, and not written again"


@pytest.mark.short(1)
@pytest.mark.parametrize("method", ["keep_samples", "keep_places"])
def test_a_disk_that_fills_up_after_an_update_repeats_and_loses_no_prompt(folder, tmp_path, monkeypatch, method):
    plain = getattr(RunFiles, method)

    def full(self, iteration, *more):
        if iteration == 3:
            raise CannotWrite("no space left")
        plain(self, iteration, *more)

    with monkeypatch.context() as patch:
        patch.setattr(RunFiles, method, full)
        assert main(words(folder, tmp_path, "grpo")) == 2
    assert main([*words(folder, tmp_path, "grpo"), "--load_checkpoint"]) == 0
    lines = read_rows(tmp_path / "ledger.jsonl", key="iteration")
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5]
    assert sorted(place for line in lines for place in line["trained"]) == list(range(PROMPTS * EPISODES))


def test_a_checkpoint_of_answers_ahead_is_not_for_a_synchronous_run(folder, tmp_path, capsys):
    given = words(folder, tmp_path, "grpo")
    assert warm.run(given, prepare=partial(at, (2, "update", 0), signal.SIGTERM)) == 128 + signal.SIGTERM
    plain = [*arguments(folder, tmp_path, "grpo", "--generate_max_len 24 --save_steps 1"), "--load_checkpoint"]
    assert main(plain) == 2
    told = capsys.readouterr().err
    assert "this run was asynchronous, and 4 groups of its checkpoint are not trained yet; give --async_train" in told


def test_what_is_written_slowly_and_judged_slowly_is_trained_once_over_kills(folder, tmp_path):
    check_kills(folder, tmp_path / "out", "grpo", kills=1, episodes=2, seed=3)


@pytest.mark.long
@pytest.mark.parametrize("estimator, seed", [("grpo", 0), ("ppo", 1), ("filtered", 2), ("lora", 3)])
def test_over_twenty_random_kills_the_ledger_and_the_bound_hold(folder, tmp_path, estimator, seed):
    check_kills(folder, tmp_path / "out", estimator, kills=20, episodes=12, seed=seed)


def check_kills(folder: Path, out: Path, estimator: str, *, kills: int, episodes: int, seed: int) -> None:
    """Kill a run again and again within the seconds that its iterations take; each time it goes on."""
    draw = random.Random(seed)
    given = slowly_rewarded(folder, out, estimator, f"--num_episodes {episodes} --max_ckpt_num 2")
    killed, going_on = 0, []
    while killed < kills:
        code = warm.run([*given, *going_on], prepare=partial(kill_after, draw.uniform(0.05, 1.5)))
        if code == 0:  # it was slower to be killed than to end
            break
        assert code == -signal.SIGKILL
        killed += 1
        if (out / "checkpoints" / "latest").exists():
            going_on = ["--load_checkpoint"]
    assert killed == kills, "it lives long enough to be killed so often"
    assert warm.run([*given, "--load_checkpoint"]) == 0
    lines = check_ledger(out, places=9 * episodes)
    assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(read_rows(out / "metrics.jsonl")) == sum(bool(line["trained"]) for line in lines)


# ---- what goes wrong


def test_a_reward_that_never_comes_ends_the_run_with_a_table_and_a_checkpoint(folder, tmp_path):
    flag = tmp_path / "hang"
    text = SLOW.replace(
        "    time.sleep", f"    while __import__('os').path.exists({str(flag)!r}): time.sleep(0.05)\n    time.sleep"
    )
    given = slowly_rewarded(folder, tmp_path / "out", "grpo", "--async_timeout 1.5 --num_episodes 1")
    (tmp_path / "reward.py").write_text(text)
    flag.touch()
    told = warm.output(given, 1)
    assert "no token, no reward and no step for 1.5 s (--async_timeout)" in told and "its reward" in told
    assert "add --load_checkpoint to go on" in told
    flag.unlink()
    assert warm.run([*given, "--load_checkpoint"]) == 0
    check_ledger(tmp_path / "out", places=9)


@pytest.mark.long
def test_where_the_engine_has_no_room_what_it_had_written_is_saved(folder, tmp_path, monkeypatch, capsys):
    plain, calls = AsyncRolloutWorker.advance, itertools.count(1)

    def short(writing, **given):
        if next(calls) == 25:
            raise OutOfMemory("no room for a page")
        return plain(writing, **given)

    with monkeypatch.context() as patch:
        patch.setattr(AsyncRolloutWorker, "advance", short)
        assert main(words(folder, tmp_path, "grpo")) == 1
    assert "the rollout does not fit into memory (no room for a page)" in capsys.readouterr().err
    assert main([*words(folder, tmp_path, "grpo"), "--load_checkpoint"]) == 0
    check_ledger(tmp_path)


@pytest.mark.long
def test_a_signal_between_a_batch_and_its_scoring_and_memory_short_there_lose_nothing(folder, tmp_path, monkeypatch):
    calls = itertools.count(1)

    def short(run, experience):
        if next(calls) == 2:
            raise InsufficientMemory("scoring does not fit")
        return plain(run, experience)

    plain = RLRun.score
    with monkeypatch.context() as patch:
        patch.setattr(RLRun, "score", short)
        assert main(words(folder, tmp_path, "ppo")) == 1
    given = [*words(folder, tmp_path, "ppo"), "--load_checkpoint"]
    assert warm.run(given, prepare=partial(tell_while_collecting, signal.SIGTERM, 2, "pause")) == 128 + signal.SIGTERM
    assert main(given) == 0
    check_ledger(tmp_path)


@pytest.mark.long
def test_when_roles_are_built_anew_between_a_batch_and_its_scoring_nothing_is_lost(folder, tmp_path):
    given = words(folder, tmp_path / "out", "grpo")
    warm.world_outputs(given, 2, prepare={0: begin_anew_once})
    check_ledger(tmp_path / "out")


def begin_anew_once() -> None:
    plain, calls = RLRun.score, itertools.count(1)

    def score(run, experience):
        if next(calls) == 3:
            raise RebuildModels
        return plain(run, experience)

    RLRun.score = score
