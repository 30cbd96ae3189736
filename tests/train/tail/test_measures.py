"""What a tail run measures is what there is: exact sums, held-out samples, rare events."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.train.job_run import NoStop, write_rows
from tests.train.tail.small_world import ANSWERS, REWARDS, all_log_probs, make_run, reward_of, write_world
from tests.train.tail.tail_run import metric_files
from trimtab.errors import UserError
from trimtab.train.tail.measurements import bad_tokens, finite

THRESHOLD = sorted(REWARDS.tolist())[2] - 0.01  # two of the answers are bad


@pytest.fixture
def folder(tmp_path):
    write_world(tmp_path)
    write_rows(tmp_path / "held_out.jsonl", [{"question": "a b b"}])
    return tmp_path


def words(folder, group: int, episodes: int) -> str:
    return (
        f"--method repulse --n_samples_per_prompt {group} --train_batch_size {group} --micro_train_batch_size {group} "
        f"--num_episodes {episodes} --actor_learning_rate 0 --proposal_learning_rate 3e-3 --target_dist_beta -1 "
        f"--evaluate_heldout_sampling --heldout_prompt_data {folder}/held_out.jsonl --heldout_input_key question "
        f"--bad_threshold {THRESHOLD} --sampling_iters 3"
    )


def test_rare_events_from_the_proposal_are_those_of_the_policy(folder, monkeypatch):
    run = make_run(folder, monkeypatch, words(folder, 200, 15), "--init_kl_coef 0.5")
    run.train(NoStop)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    log_probs = all_log_probs(model).detach()
    exact = float(log_probs[REWARDS < THRESHOLD].logsumexp(0))
    files = metric_files(folder / "out")
    rewards, returns, token_kl, surprisal = files["info"]
    assert len(rewards) == 600 and returns == rewards and token_kl == pytest.approx([0] * 600, abs=1e-6)
    by_reward = {round(reward_of(a), 4): -float(p) for a, p in zip(ANSWERS, log_probs)}
    assert surprisal == pytest.approx([by_reward[round(reward, 4)] for reward in rewards], abs=1e-4)
    (found,) = files["summary"]["rare_events"].values()
    importance, plain = found["importance"], found["plain"]
    assert importance["log_low"] < exact < importance["log_high"]
    assert plain["low"] < math.exp(exact) < plain["high"]
    assert importance["log_high"] - importance["log_low"] < math.log(plain["high"] / plain["low"])
    assert files["summary"]["below"][f"{THRESHOLD:g}"]["value"] == plain["value"]


def test_bad_words_are_measured_before_and_after_each_fit_step(folder, monkeypatch):
    run = make_run(
        folder,
        monkeypatch,
        "--method reinforce --n_samples_per_prompt 8 --train_batch_size 8 --micro_train_batch_size 8 --num_episodes 3",
        "--fit_steps 2 --actor_learning_rate 1e-2 --analytic_bad_word_calc --bad_token_ids 2 --init_kl_coef 0.3",
        "--single_prompt a",
    )
    run.train(NoStop)
    assert run.counters.iteration == 6
    log_bad, rewards, returns = metric_files(folder / "out")["analyticlogprob"]
    assert len(log_bad) == len(rewards) == len(returns) == 3
    assert returns[0] == pytest.approx(rewards[0], abs=1e-5) and returns[2] < rewards[2] - 0.01, "the KL grows from 0"
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    assert log_bad[-1] == pytest.approx(log_bad_by_hand(model, [2], bad=2), abs=1e-5)
    start = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert log_bad[0] == pytest.approx(log_bad_by_hand(start, [2], bad=2), abs=1e-5)


@torch.no_grad()
def log_bad_by_hand(model, prompt: list[int], bad: int) -> float:
    def after(*said):
        return model(torch.tensor([[*prompt, *said]])).logits[0, -1].softmax(-1)

    first = after()
    return math.log(float(first[bad] + sum(first[token] * after(token)[bad] for token in (0, 3))))


def test_the_swear_words_are_known_in_gpt2_s_vocabulary_only(folder, monkeypatch):
    run = make_run(folder, monkeypatch, words(folder, 2, 1))
    with pytest.raises(UserError, match="--bad_token_ids"):
        bad_tokens(run.options, run.files.tokenizer)


def test_what_is_not_finite_is_not_written():
    assert finite({"a": [1], "b": {"c": -math.inf, "d": 2.0}}) == {"a": [1], "b": {"c": None, "d": 2.0}}
