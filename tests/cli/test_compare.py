"""Runs that were trained, compared: two precisions of one training agree, other trainings do not."""

import json
from pathlib import Path

import pytest

from tests.docs.pages import commands
from tests.tiny import tiny_model
from tests.train.job_run import write_rows
from tests.train.rl.rl_run import REWARD, rows
from trimtab.cli.main import main
from trimtab.embedded.sort_task import make_prompts, make_rows, make_tokenizer

STEPS = 8
JOBS = {
    "sft": "--dataset {folder}/rows.jsonl --max_len 40 --max_epochs 1 --train_batch_size 4 --learning_rate 1e-3",
    "grpo": "--prompt_data {folder}/prompts.jsonl --label_key label --apply_chat_template --prompt_max_len 40 "
    f"--generate_max_len 12 --rollout_batch_size 4 --n_samples_per_prompt 4 --train_batch_size 16 {REWARD} "
    "--init_kl_coef 0.1 --actor_learning_rate 1e-4",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    tokenizer = make_tokenizer()
    for name, seed in (("model", 0), ("another", 1)):
        tiny_model("llama", seed=seed, vocab_size=len(tokenizer)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    write_rows(folder / "rows.jsonl", make_rows(4 * STEPS, 1))
    write_rows(folder / "prompts.jsonl", make_prompts(4 * STEPS, 1))
    for verb, words in (("sft", ""), ("grpo", f"--record {folder}/recording")):
        train(folder, verb, "first", words)
    return folder


def train(folder: Path, verb: str, name: str, words: str = "", model: str = "model") -> Path:
    out = folder / verb / name
    fixed = f"{verb} --pretrain {folder}/{model} {JOBS[verb].format(folder=folder)} --micro_train_batch_size 4"
    assert main([*f"{fixed} --lr_warmup_ratio 0 --save_path {out} {words}".split()]) == 0
    return out


def against_the_first(trimtab, folder: Path, out: Path) -> tuple[int, dict]:
    done = trimtab(f"compare {folder / out.parent.name / 'first'} {out} --json")
    return done.code, json.loads(done.out)


@pytest.mark.long
def test_a_run_in_bf16_agrees_with_fp32(trimtab, folder):
    code, found = against_the_first(trimtab, folder, train(folder, "sft", "bf16", "--bf16"))
    assert code == 0, found["complaints"]
    assert found["allowed_differences"] == ["precision: float32 and bfloat16"]
    assert 0 < found["figures"]["loss"]["weighted"] < 0.02, "bf16 rounds, and what it rounds is seen"
    assert found["figures"]["loss"]["steps"] == STEPS


def test_another_order_fails_by_its_fingerprint_and_its_first_step(trimtab, folder):
    code, found = against_the_first(trimtab, folder, train(folder, "sft", "order", "--seed 1"))
    assert code == 1
    assert any("another order" in told for told in found["disagreements"])
    assert any("of the first step" in told for told in found["complaints"])


def test_another_initial_model_fails_by_its_fingerprint_and_its_first_step(trimtab, folder):
    code, found = against_the_first(trimtab, folder, train(folder, "sft", "another", model="another"))
    assert code == 1 and found["disagreements"] == ["they begin with different weights"]
    assert any("of the first step" in told for told in found["complaints"])


def test_a_higher_learning_rate_is_named_and_its_error_told(trimtab, folder):
    """By its errors alone it would pass."""
    code, found = against_the_first(trimtab, folder, train(folder, "sft", "rate", "--learning_rate 1.1e-3"))
    assert code == 1 and found["complaints"] == ["--learning_rate is 0.001 and 0.0011"]
    assert 0 < found["figures"]["loss"]["weighted"] < 0.02 and found["figures"]["loss"]["first"] == 0


def test_rl_in_two_precisions_agrees_on_the_same_answers(trimtab, folder):
    out = train(folder, "grpo", "bf16", f"--bf16 --replay {folder}/recording")
    code, found = against_the_first(trimtab, folder, out)
    assert code == 0, found["complaints"]
    apart = {name: figure["weighted"] for name, figure in found["figures"].items()}
    assert found["same_answers"] and apart["policy_loss"] < 1e-6, "with one update an iteration every ratio is 1"
    assert all(0 < apart[name] < 0.02 for name in ("log_prob", "kl", "grad_norm"))


def test_the_kl_of_a_replay_in_the_same_precision_is_that_of_the_recording(trimtab, folder):
    """Whatever the replay learnt, so that it is not judged."""
    out = train(folder, "grpo", "rate", f"--actor_learning_rate 2e-4 --replay {folder}/recording")
    _, found = against_the_first(trimtab, folder, out)
    assert found["figures"]["kl"]["as_recorded"] and found["figures"]["kl"]["weighted"] < 1e-6
    assert found["figures"]["log_prob"]["weighted"] > 1e-4


def test_the_log_prob_of_a_row_is_that_of_the_tokens_that_were_drawn(folder):
    """In fp32, and with one update an iteration, the trainer's log-probs are those of the sampler."""
    for row in rows(folder / "grpo" / "first"):
        assert row["log_prob"] == pytest.approx(-row["sampled_entropy"], rel=1e-4)


def test_log_probs_of_another_precision_are_not_taken_for_the_own(folder):
    """In the first iteration the policy is the reference, so that its KL is 0 if both are rounded alike."""
    train(folder, "grpo", "recorded_in_bf16", f"--bf16 --max_steps 2 --record {folder}/recording_bf16")
    out = train(folder, "grpo", "replayed_in_fp32", f"--max_steps 2 --replay {folder}/recording_bf16")
    assert abs(rows(out)[0]["kl"]) < 1e-10
    assert rows(out)[0]["log_prob_gap"] > 1e-4, "what was drawn was rounded to bf16"


@pytest.mark.long
def test_the_commands_of_the_page_work_and_their_pairs_agree(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in commands("compare"):
        shorter = ["--steps", "100", "--iterations", "1"] if words[1] == "quickstart" else []
        # After a shorter quickstart no answer is quite right.
        words = ["regex(^[0-4])" if word == "exact" else word for word in words]
        assert main([*words[1:], *shorter]) == 0, words
    told = capsys.readouterr().out
    assert told.count("A and B agree") == 2 and "both learnt from the same recorded answers" in told
