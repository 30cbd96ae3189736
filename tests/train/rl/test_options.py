"""What single options of the RL jobs do to a run."""

import pytest
import torch
from safetensors.torch import load_file

from tests import warm
from tests.command import run as command
from tests.train.job_run import write_model, write_rows
from tests.train.rl.rl_run import arguments, rows, weights, without, write_task

LEARN = "--actor_learning_rate 1e-3"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    write_rows(path, [{"input": f"sort {i}{i + 1}>{i}{i + 1}"} for i in range(10)])
    return path


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain")
    run(folder, out)
    return out


def run(folder, out, *words):
    assert warm.run(arguments(folder, out, "grpo", LEARN, *words)) == 0
    return rows(out)


@pytest.mark.short(1)
@pytest.mark.parametrize("words", ["--policy_loss_type gspo", "--policy_loss_type cispo", "--loss_reduction constant",
                                   "--loss_reduction answer", "--policy_loss_type sapo", "--policy_loss_type gmpo",
                                   "--policy_loss_type clip_cov --clip_cov_range 0.1 9 --cov_ratio 0.2",
                                   "--policy_loss_type kl_cov --kl_cov_coef 9 --cov_ratio 0.2",
                                   "--entropy_target 9 --entropy_coef_step 0.3"])  # fmt: skip
def test_another_objective_learns_something_else(folder, plain, tmp_path, words):
    found = run(folder, tmp_path, words)
    assert found[1]["reward"] == rows(plain)[1]["reward"], "the first answers are the same"
    assert any(not torch.equal(w, weights(plain)[name]) for name, w in weights(tmp_path).items())


@pytest.mark.parametrize(
    "words, expected",
    [
        (
            "--policy_loss_type sap",
            "--policy_loss_type is sap: it must be one of ppo, gspo, cispo, sapo, gmpo, clip_cov",
        ),
        ("--policy_loss_type sapo --sapo_temperatures 1 0", "--sapo_temperatures has 0: each must be above 0"),
        (
            "--policy_loss_type clip_cov --clip_cov_range 5 1",
            "--clip_cov_range 5 1: the first must be below the second",
        ),
        ("--policy_loss_type kl_cov --cov_ratio 2", "--cov_ratio is 2: it must be above 0 and at most 1"),
        ("--policy_loss_type gmpo --dual_clip 3", "--dual_clip belongs to --policy_loss_type ppo, not gmpo: drop it"),
        (
            "--entropy_target 1 --entropy_loss_coef 2",
            "--entropy_loss_coef 2 is more than --entropy_coef_max 1: lower it",
        ),
        ("--entropy_target 0", "--entropy_target is 0: it must be above 0"),
    ],
)
def test_wrong_words_of_losses_and_entropy(folder, tmp_path, capsys, words, expected):
    assert expected in command(capsys, " ".join(arguments(folder, tmp_path, "grpo")), *words.split()).mistake


@pytest.mark.short(1)
@pytest.mark.parametrize("kind", ["tis", "icepop", "sequence"])
def test_without_mismatch_a_correction_changes_nothing(folder, plain, tmp_path, kind):
    found = run(folder, tmp_path, f"--mismatch_correction {kind}")
    assert [row["correction"] for row in found[1:]] == pytest.approx([1.0] * 5, abs=1e-5)
    assert [row["corrected_share"] for row in found[1:]] == [0.0] * 5
    torch.testing.assert_close(weights(tmp_path), weights(plain), atol=1e-5, rtol=1e-4)


def test_rounded_rollouts_are_seen_as_mismatch_and_corrected(folder, tmp_path):
    found = run(folder, tmp_path, "--weight_only_int8 --mismatch_correction tis --max_steps 1")
    assert found[1]["log_prob_gap"] > 1e-4
    assert found[1]["correction"] != 1.0


def test_the_saved_model_is_the_average_of_the_weights_where_that_is_asked_for(folder, plain, tmp_path):
    found = run(folder, tmp_path, "--enable_ema --ema_beta 0.5")
    trained = [[{k: v for k, v in row.items() if "eval_" not in k} for row in rows(out)] for out in (tmp_path, plain)]
    assert trained[0] == trained[1], "what is learnt does not change"
    state = load_file(tmp_path / "checkpoints" / "global_step4" / "actor" / "tensors.safetensors")
    assert {name.split("/")[0] for name in state} >= {"average", "weight"}
    moved = [float((w - weights(plain)[name]).abs().max()) for name, w in weights(tmp_path).items()]
    assert 0 < max(moved) < 0.02, "near the last weights, but not them"
    again = run(folder, tmp_path / "again", f"--pretrain {tmp_path} --num_episodes 1")
    evaluated = [{k: v for k, v in row.items() if "eval_" in k} for row in (found[-1], again[0], rows(plain)[-1])]
    assert evaluated[0] == evaluated[1] != evaluated[2], "what is evaluated is what is saved"


def test_a_model_with_dropout_is_trained_without_it_unless_that_is_asked_for(folder, tmp_path):
    write_model(tmp_path / "model", attention_dropout=0.3)
    gaps = []
    for words in ([], ["--keep_dropout"]):
        out = tmp_path / f"out{len(words)}"
        fixed = [word for word in arguments(folder, out, "grpo", "--max_samples 4") if word != "--keep_dropout"]
        printed = warm.output([*fixed, "--pretrain", str(tmp_path / "model"), *words])
        assert ("the model's own dropout is off" in printed) == (not words)
        gaps.append(rows(out)[1]["log_prob_gap"])
    assert gaps[0] < 1e-5 < 1e-3 < gaps[1]


def test_text_beside_the_answers_becomes_more_likely(folder, text, tmp_path):
    found = run(folder, tmp_path, f"--pretrain_data {text} --ptx_coef 1.0")
    losses = [row["ptx_loss"] for row in found[1:]]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("how", ["", "--dry_run"])
def test_a_split_that_the_text_lacks_is_one_line(folder, text, tmp_path, how):
    words = f"--pretrain_data {text} --pretrain_split validation {how}"
    told = warm.output(arguments(folder, tmp_path / "out", "grpo", words), 2)
    assert "has no split 'validation': found train (see --pretrain_split)" in told and "Traceback" not in told


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    words = "--advantage_estimator reinforce --gamma 0 --init_kl_coef 0 --actor_learning_rate 1e-2 --num_episodes 6"
    return f"--teacher_model {write_task(tmp_path_factory.mktemp('teacher'), seed=3)}/model {words}"


def test_a_teacher_draws_the_policy_towards_itself(folder, teacher, tmp_path):
    found = run(folder, tmp_path, teacher)
    kls = [row["teacher_kl"] for row in found[1:]]
    assert sum(kls[-3:]) < 0.7 * sum(kls[:3])


@pytest.mark.long
def test_a_teacher_needs_no_reward_beside_it(folder, teacher, tmp_path):
    words = without(arguments(folder, tmp_path, "grpo", teacher), "--reward_verifier", "--eval_dataset")
    assert "reward: 1 x log-probability by the teacher" in warm.output(words)
    found = rows(tmp_path)
    assert {row["reward"] for row in found} == {row["score"] for row in found} == {0.0}
    kls = [row["teacher_kl"] for row in found]
    assert sum(kls[-3:]) < 0.7 * sum(kls[:3])


def test_samples_without_advantage_are_left_out_without_changing_the_result(folder, tmp_path):
    words = ("--init_kl_coef 0", "--reward_verifier regex([0-9])", "--max_steps 2 --eval_steps -1")
    first, second = tmp_path / "first", tmp_path / "second"
    run(folder, first, *words)
    assert any(row["equal_groups"] > 0 for row in rows(first)[1:])
    assert warm.run(arguments(folder, second, "grpo", LEARN, *words), prepare=keep_every_sample) == 0
    for mine, theirs in zip(rows(first)[1:], rows(second)[1:]):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def keep_every_sample():
    from trimtab.train.rl import micro_batches

    micro_batches.with_advantage = lambda experience, samples: samples
