"""RL on an environment through the real command: what is learnt, recorded, left out, and goes on after a stop."""

import json
import random
import signal
from functools import partial

import pytest

from tests import warm
from tests.train.job_run import assert_same_model, assert_same_tensors
from tests.train.rl.async_run import kill_after, tell_while_collecting
from tests.train.rl.environment_run import (
    AHEAD,
    BATCH,
    PROMPTS,
    SAMPLES,
    arguments,
    check_ledger,
    kept,
    result,
    told_again,
    write_game,
)
from tests.train.rl.rl_run import at, rows, without
from trimtab.cli.main import main
from trimtab.train.metrics import read_rows

OF_THE_ENGINES_LOG_PROBS = ("sampled_entropy", "log_prob_gap", "log_prob_ratio")


def same(first, second):
    """Weights, what was said and all figures to the bit, but for those of the log-probs that the engine drew with.
    Which turns meet in a pass depends on who answers when, and with it the last bits of a sum."""
    assert first[1] == second[1]
    for row, other in zip(first[0], second[0], strict=True):
        assert row.keys() == other.keys()
        for name, found in row.items():
            engines = name in OF_THE_ENGINES_LOG_PROBS
            assert found == (pytest.approx(other[name], abs=1e-5) if engines else other[name]), name
    assert_same_tensors(first[2], second[2])


def test_what_is_drawn_is_what_is_trained_and_every_turn_is_told(played):
    found = [row for row in rows(played) if row["step"]]
    assert [row["samples"] for row in found] == [BATCH * SAMPLES, BATCH * SAMPLES, 2 * SAMPLES]
    for row in found:
        assert row["log_prob_gap"] < 1e-5 and 1 <= row["turns"] <= 3
        assert row["finish/stop"] + row["finish/length"] == 1, "a last turn may be cut"
        assert row["failed_episodes"] == row["begun_anew"] == 0 and row["reward"] == row["reward/environment"]
    for row in kept(played):
        turns = row["turns"]
        assert [turn["drawn"] for turn in turns] == [place % 2 == 0 for place in range(len(turns))]
        assert sum(turn["tokens"] for turn in turns if turn["drawn"]) == row["tokens"]
        assert row["reward"] == sum(turn["reward"] for turn in turns) == row["environment"]["reward"]
        assert all(turn["text"] in ("higher", "lower", "only a number, please") for turn in turns[1::2])


def test_a_recording_is_replayed_without_the_environment(games, played, tmp_path):
    words = arguments(games, tmp_path, "trimtab:guess", f"--replay {played}/recording --apply_chat_template")
    assert main(without(words, "--environment")) == 0
    assert [row["reward"] for row in rows(tmp_path)] == [row["reward"] for row in rows(played)]
    assert_same_model(tmp_path, played)
    assert kept(tmp_path) == kept(played), "who said what was recorded too"


@pytest.mark.short(1)
@pytest.mark.parametrize("moment", [(1, "update", 1), (1, "score", 0), (2, "sample", 0)], ids=str)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=str)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(games, played, tmp_path, moment, number):
    words = arguments(games, tmp_path, games / "game.py")
    code = warm.run(words, prepare=partial(at, moment, number))
    assert code == (128 + number if number == signal.SIGTERM else -number)
    assert warm.run([*words, "--load_checkpoint"]) == 0
    same(result(tmp_path), result(played))


def test_rows_whose_environment_breaks_are_left_out_until_there_are_too_many(games, tmp_path, capsys):
    game = write_game(tmp_path, breaks=(1, 7))
    words = arguments(games, tmp_path / "out", game, "--no_shuffle --env_retries 1")
    assert main([*words, "--env_max_failed", "0"]) == 1
    told = capsys.readouterr().err
    assert "row 1 is broken" in told and "--env_max_failed" in told and "prompts.jsonl" in told and "checkpoint" in told
    assert main([*words, "--env_max_failed", "0.9", "--load_checkpoint"]) == 0
    found = [row for row in rows(tmp_path / "out") if row["step"]]
    assert sum(row["samples"] for row in found) == SAMPLES * (PROMPTS - 2), "two groups are left out"
    assert sum(row["failed_episodes"] > 0 for row in found) == 2
    trained = [row for row in read_rows(tmp_path / "out" / "metrics.jsonl") if row["step"]]
    assert not {1, 7} & {prompt for row in trained for prompt, _ in row["prompt_scores"]}


TOO_LONG = """
from trimtab.embedded.guess_game import Guess

class Game(Guess):
    def reset(self, task):
        opening = super().reset(task)
        return "1 " * 100 if {condition} else opening
"""


def test_episodes_that_end_before_the_first_turn_are_counted_and_a_batch_of_them_ends_the_run(games, tmp_path, capsys):
    game = tmp_path / "game.py"
    short = f"--episode_max_len 60 --max_steps 1 --rollout_batch_size {BATCH}"
    game.write_text(TOO_LONG.format(condition="task.sample == 0"))
    assert main(arguments(games, tmp_path / "some", game, short)) == 0
    (row,) = rows(tmp_path / "some")
    assert row["empty_samples"] == BATCH and row["finish/context"] == 1 / SAMPLES
    game.write_text(TOO_LONG.format(condition="True"))
    assert main(arguments(games, tmp_path / "all", game, short)) == 1
    told = f"iteration 1: the model drew no token in any of {BATCH * SAMPLES} samples"
    assert told in "".join(capsys.readouterr())


def test_episodes_outlive_updates_and_each_prompt_is_trained_or_named_as_failed_once(games, tmp_path):
    game = write_game(tmp_path, breaks=(2,), slow=0.02)
    words = arguments(games, tmp_path / "out", game, AHEAD, "--env_max_failed 1 --env_retries 0 --no_shuffle")
    warm.output(words, 128 + signal.SIGTERM, prepare=partial(tell_while_collecting, signal.SIGTERM, 12))
    warm.output([*words, "--load_checkpoint"])
    lines = check_ledger(tmp_path / "out")
    assert [place for line in lines for place in line["failed"]] == [2]
    assert sum(row.get("failed_episodes", 0) for row in rows(tmp_path / "out")) > 0


@pytest.mark.long
def test_killed_twenty_times_it_is_the_run_that_was_not(games, tmp_path):
    game, more = write_game(tmp_path), "--num_episodes 9"
    assert warm.run(arguments(games, tmp_path / "played", game, more)) == 0
    words, moments = arguments(games, tmp_path / "out", game, more), random.Random(4)
    for iteration in range(20):
        moment = (iteration, *moments.choice([("sample", 0), ("score", 0), ("update", 0), ("update", 1)]))
        going_on = ["--load_checkpoint"] if iteration else []
        warm.output([*words, *going_on], -signal.SIGKILL, prepare=partial(at, moment, signal.SIGKILL))
    warm.output([*words, "--load_checkpoint"])
    same(result(tmp_path / "out"), result(tmp_path / "played"))


@pytest.mark.long
@pytest.mark.parametrize("forgetful", [False, True])
def test_ten_kills_inside_episodes_lose_nothing(games, tmp_path, forgetful):
    """One whose instances answer otherwise begins anew, and that is counted."""
    game = write_game(tmp_path, slow=0.1, forgetful=forgetful, journal=tmp_path / "journal")
    words = arguments(games, tmp_path / "out", game, AHEAD, "--num_episodes 4")
    moments = random.Random(3)
    for kill in range(10):
        more = ["--load_checkpoint"] if kill else []
        if kill % 2:
            prepare = partial(kill_after, moments.uniform(0.5, 4.0))
        else:
            prepare = partial(tell_while_collecting, signal.SIGTERM, moments.randrange(5, 120))
        if warm.run([*words, *more], prepare=prepare) == 0:
            break
    warm.output([*words, "--load_checkpoint"])
    check_ledger(tmp_path / "out", 4 * PROMPTS)
    anew = sum(row.get("begun_anew", 0) for row in rows(tmp_path / "out"))
    assert anew > 0 if forgetful else anew == 0
    assert told_again(tmp_path / "journal") > 0, "recorded turns are told to new instances"


def test_generate_writes_episodes_of_the_environments_own_rows(games, tmp_path, capsys):
    given = f"generate --pretrain {games}/model --environment trimtab:guess --env_rows 4 --best_of_n 2 --env_workers 1"
    assert main([*given.split(), *f"--max_new_tokens 3 --output_path {tmp_path}/rows.jsonl".split()]) == 0
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(found) == 8 and {row["reward"] for row in found} <= {0.0, 1.0}
    for row in found:
        roles = [message["role"] for message in row["messages"]]
        assert roles == [("user", "assistant")[place % 2] for place in range(len(roles))] and roles[-1] == "assistant"
    assert "reward   mean" in capsys.readouterr().out


def test_a_dry_run_says_how_the_environment_opens_or_what_is_wrong_with_it(games, tmp_path, capsys):
    words = arguments(games, tmp_path / "out", "trimtab:guess", "--dry_run")
    assert main(words) == 0
    assert "environment: Guess, reset(task), step(turn); it opens with Find my number" in capsys.readouterr().out
    broken = tmp_path / "broken.py"
    for opening, problem in (("raise KeyError('no board')", "no board"), ("return []", "empty conversation")):
        broken.write_text(f"class Game:\n    def reset(self, task): {opening}\n    def step(self, turn): ...\n")
        assert main(arguments(games, tmp_path / "out", broken, "--dry_run")) == 2
        assert "was tried and failed" in (told := capsys.readouterr().err) and problem in told


def test_a_dry_run_refuses_a_chat_template_that_cannot_be_appended_to(games, tmp_path, capsys):
    template = tmp_path / "last.jinja"  # it shows the last message alone
    template.write_text("<user>{{ messages[-1]['content'] }}<assistant>")
    words = f"--apply_chat_template --tokenizer_chat_template {template} --dry_run"
    assert main(arguments(games, tmp_path / "out", "trimtab:guess", words)) == 2
    assert "cannot be put behind an answer" in (told := capsys.readouterr().err) and "--agent_history" in told
    words = f"generate --pretrain {games}/model --environment trimtab:guess --env_rows 4 --max_new_tokens 3 {words}"
    assert main([*words.split(), "--output_path", str(tmp_path / "out.jsonl")]) == 2
    assert "cannot be put behind an answer" in capsys.readouterr().err
