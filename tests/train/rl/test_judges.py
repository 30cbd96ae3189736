"""A judge and a code verifier in the loop: together with others, when they fail, and resumed."""

import json
import re
import signal
import zlib
from collections import Counter
from functools import partial

import pytest

from tests import warm
from tests.command import run
from tests.rewards.judging import digits, judging, score_digits
from tests.train.job_run import write_rows
from tests.train.rl.rl_run import EVALUATION, arguments, assert_identical, at, result, rows, without
from trimtab.cli.main import main
from trimtab.train.metrics import read_rows


def words_of(folder, out, url, *more: str, estimator="grpo") -> list[str]:
    words = without(arguments(folder, out, estimator), "--reward_verifier")
    return [*words, "--judge", url, "--judge_retries", "0", *" ".join(more).split()]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce", pytest.param("ppo", marks=pytest.mark.long)])
def test_a_judge_is_a_reward_among_others(folder, tmp_path, estimator):
    with judging() as judge:
        more = "--reward_verifier length(0-6):0.5 --reward_weights 2.0 --max_steps 2"
        assert warm.run(words_of(folder, tmp_path, judge.url, more, estimator=estimator)) == 0
    for row in rows(tmp_path)[1:]:
        assert row["reward"] == pytest.approx(2 * row["reward/judge"] + 0.5 * row["reward/length"], abs=1e-5)
        assert row["reward/judge/prompt_tokens"] == 7 and row["reward/judge/completion_tokens"] == 3
        assert row["failed_rewards"] == 0
    assert all(row["reward/judge/seconds"] > 0 for row in read_rows(tmp_path / "metrics.jsonl")[1:])
    assert "eval_reward/judge" in rows(tmp_path)[0]
    answers = [row for row in read_rows(tmp_path / "rollouts.jsonl") if "response" in row]
    assert len({answer["parts"]["judge"] for answer in answers}) > 1
    for answer in answers:
        assert answer["parts"]["judge"] == pytest.approx(digits(answer["response"]) / 10)
    assert "Bearer" not in (tmp_path / "judge.jsonl").read_text()
    assert max(Counter(judge.asked).values()) == 1


def failing_now_and_then(response: str):
    return (503, {"error": "busy"}) if zlib.crc32(response.encode()) % 29 == 0 else score_digits(response)


def test_killed_and_resumed_asks_nothing_twice_and_leaves_the_same_groups_out(folder, tmp_path):
    share = "--max_failed_rewards 1"
    with judging(failing_now_and_then) as judge:
        assert warm.run(words_of(folder, tmp_path / "whole", judge.url, share)) == 0
        whole = Counter(judge.asked)
    assert sum(row.get("failed_rewards", 0) for row in rows(tmp_path / "whole")) > 0
    with judging(failing_now_and_then) as judge:
        words = words_of(folder, tmp_path / "killed", judge.url, share)
        assert warm.run(words, prepare=partial(at, (3, "update", 1), signal.SIGKILL)) == -signal.SIGKILL
        with (tmp_path / "killed" / "judge.jsonl").open("ab") as file:
            file.write(b'{"key": "to')
        before = len(judge.asked)
        assert warm.run([*words, "--load_checkpoint"]) == 0
        assert 0 < before < len(judge.asked) and Counter(judge.asked) == whole and max(whole.values()) == 1
    assert_identical(result(tmp_path / "killed"), result(tmp_path / "whole"))


def test_too_many_failures_end_the_run_which_goes_on_when_the_judge_is_back(folder, tmp_path, capsys):
    down = True

    def answer(response):
        return (503, {"error": "lunch"}) if down else score_digits(response)

    with judging(answer) as judge:
        words = without(words_of(folder, tmp_path, judge.url, "--max_steps 2"), *EVALUATION)
        assert main(words) == 1
        told = capsys.readouterr()
        assert "--max_failed_rewards" in told.err and "HTTP status 503" in told.err and "prompts.jsonl" in told.err
        down = False
        assert main([*words, "--load_checkpoint"]) == 0
    assert [row["failed_rewards"] for row in rows(tmp_path)] == [0.0, 0.0]


def test_too_many_failures_in_an_evaluation_end_the_run(folder, tmp_path, capsys):
    """Answers to two of its five prompts have no reward."""
    seen: list[str] = []

    def answer(response):
        seen.append(response)
        return (503, {}) if len(seen) <= 2 else score_digits(response)

    with judging(answer) as judge:
        words = without(words_of(folder, tmp_path / "run", judge.url, "--max_steps 1"), "--eval_n_samples_per_prompt")
        assert main([*words, "--judge_concurrency", "1"]) == 1
    assert "a reward failed for 2 of the evaluation's " in capsys.readouterr().err


FLAKY = """
def reward_func(queries, prompts, labels):
    if any(len(query) % 11 == 0 for query in queries):
        raise ValueError("eleven")
    return [len(set(query)) / 10 for query in queries]
"""


def test_functions_leave_groups_out_only_where_they_may(folder, tmp_path, capsys):
    (tmp_path / "flaky.py").write_text(FLAKY)
    words = without(arguments(folder, tmp_path / "out", "grpo"), "--reward_verifier", *EVALUATION)
    words += ["--reward_func", str(tmp_path / "flaky.py"), "--max_steps", "2"]
    assert main(words) == 1
    assert "eleven" in capsys.readouterr().err
    assert main([*words, "--max_failed_rewards", "1", "--overwrite", "--save_path", str(tmp_path / "again")]) == 0
    assert sum(row["failed_rewards"] for row in rows(tmp_path / "again")) > 0


def test_asynchronous_groups_without_a_reward_are_left_out(folder, tmp_path):
    with judging(failing_now_and_then) as judge:
        more = "--max_failed_rewards 1 --async_train --async_queue_size 2 --max_steps 3"
        words = without(words_of(folder, tmp_path, judge.url, more), *EVALUATION)
        assert warm.run(words) == 0
    assert sum(row["failed_rewards"] for row in rows(tmp_path)) > 0


def test_a_dry_run_asks_the_judge(folder, tmp_path, capsys):
    with judging() as judge:
        assert main([*words_of(folder, tmp_path / "out", judge.url), "--dry_run"]) == 0
        assert "reward, tried on the first prompt" in capsys.readouterr().out and len(judge.asked) == 2
    assert not (tmp_path / "out").exists(), "nothing is written"


@pytest.mark.parametrize(
    "more, words",
    [
        ("--judge http://127.0.0.1:1", "no answer"),
        ("--judge http://127.0.0.1:1 --judge_template {folder}/prompts.jsonl", "it has no {response}"),
        ("--judge_model x --reward_verifier exact", "--judge"),
        ("--judge http://127.0.0.1:1 --reward_weights 1 2", "2 numbers for 1 rewards"),
        ("--reward_verifier coed", "there is no verifier coed"),
        ("--reward_verifier code", "the label is"),
    ],
)
def test_wrong_input_is_one_line(folder, tmp_path, capsys, more, words):
    given = without(arguments(folder, tmp_path / "out", "grpo"), "--reward_verifier")
    found = run(capsys, "", *given, *more.format(folder=folder).split())
    if words == "--judge":
        assert "--judge_model" in found.err + found.out
    else:
        assert not (tmp_path / "out").exists()
        assert found.code == 2 and words in found.err and found.err.count("\n") == 1, found.err


def test_programs_are_a_reward(folder, tmp_path):
    """Answers of two characters: `48` is a program that ends well and prints nothing, `zj` is none."""
    tests = json.dumps([{"input": "", "output": ""}, {"input": "", "output": "never printed"}])
    with (folder / "prompts.jsonl").open() as file:
        write_rows(tmp_path / "prompts.jsonl", [{**json.loads(line), "label": tests} for line in file])
    gone = ("--reward_verifier", "--prompt_data", "--generate_max_len", *EVALUATION)
    words = [*without(arguments(folder, tmp_path / "out", "grpo"), *gone), "--generate_max_len", "2"]
    words += ["--reward_verifier", "code", "--prompt_data", str(tmp_path / "prompts.jsonl"), "--max_steps", "1"]
    assert warm.run(words) == 0
    answers = read_rows(tmp_path / "out" / "rollouts.jsonl")
    assert {answer["reward"] for answer in answers} == {0.0, 0.5}
    for answer in answers:
        assert answer["reward"] == 0.5 * ends_well(re.sub("<[a-z]+>", "", answer["response"])), answer


def ends_well(program: str) -> bool:
    try:
        exec(program, {})
        return True
    except Exception:
        return False


def test_generation_scores_with_a_judge_and_leaves_out_what_it_failed_on(folder, tmp_path, capsys):
    failed: list[str] = []

    def answer(response):
        if not failed:
            failed.append(response)
        return (400, {"error": "no"}) if response == failed[0] else score_digits(response)

    given = f"--pretrain {folder}/model --dataset {folder}/prompts.jsonl --apply_chat_template --max_new_tokens 6 "
    with judging(answer) as judge:
        more = f"--output_path {tmp_path}/out.jsonl --judge {judge.url} --max_failed_rewards 0.5 --temperature 1.0"
        said = run(capsys, f"generate {given} {more}").said
    with (tmp_path / "out.jsonl").open() as file:
        found = [json.loads(line) for line in file]
    assert len(found) == 8 and "1 prompts have no answer, since the environment or a reward failed" in said
    assert all(row["reward"] == pytest.approx(digits(row["output"]) / 10) for row in found)
