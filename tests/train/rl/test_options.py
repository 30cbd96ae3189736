"""What single options of the RL jobs do to a run."""

import pytest
import torch
from safetensors.torch import load_file

from tests import warm
from tests.train.job_run import write_rows
from tests.train.rl.rl_run import arguments, assert_identical, result, rows, weights, write_task

LEARN = "--actor_learning_rate 1e-3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_task(tmp_path_factory.mktemp("task"))
    write_rows(folder / "text.jsonl", [{"input": f"sort {i}{i + 1}>{i}{i + 1}"} for i in range(10)])
    return folder


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain")
    assert warm.run(arguments(folder, out, "grpo", LEARN, f"--record {out}/recorded")) == 0
    return out


def run(folder, out, *words, estimator="grpo", log=None):
    assert warm.run(arguments(folder, out, estimator, LEARN, *words), log=log) == 0
    return rows(out)


def test_a_replayed_run_makes_the_updates_of_the_recorded_one(folder, plain, tmp_path):
    run(folder, tmp_path, f"--replay {plain}/recorded")
    assert_identical(result(tmp_path), result(plain))


def test_a_replay_that_ends_early_or_has_other_groups_is_refused(folder, plain, tmp_path):
    words = arguments(folder, tmp_path, "grpo", LEARN, f"--replay {plain}/recorded --num_episodes 9")
    assert warm.run(words, log=tmp_path / "log") == 2
    assert "has no iteration 6" in (tmp_path / "log").read_text()
    words = arguments(folder, tmp_path, "reinforce", LEARN, f"--replay {plain}/recorded")
    assert warm.run(words, log=tmp_path / "other") == 2
    assert "--n_samples_per_prompt 4, not 2" in (tmp_path / "other").read_text()


@pytest.mark.parametrize("words", ["--policy_loss_type gspo", "--policy_loss_type cispo", "--loss_reduction constant",
                                   "--loss_reduction answer"])  # fmt: skip
def test_another_objective_learns_something_else(folder, plain, tmp_path, words):
    found = run(folder, tmp_path, words)
    assert found[1]["reward"] == rows(plain)[1]["reward"], "the first answers are the same"
    assert any(not torch.equal(w, weights(plain)[name]) for name, w in weights(tmp_path).items())


@pytest.mark.parametrize("kind", ["tis", "icepop", "sequence"])
def test_without_mismatch_a_correction_changes_nothing(folder, plain, tmp_path, kind):
    found = run(folder, tmp_path, f"--mismatch_correction {kind}")
    assert [row["correction"] for row in found[1:]] == pytest.approx([1.0] * 5, abs=1e-5)
    for name, tensor in weights(tmp_path).items():
        torch.testing.assert_close(tensor, weights(plain)[name], atol=1e-5, rtol=1e-4)


def test_rounded_rollouts_are_seen_as_mismatch_and_corrected(folder, tmp_path):
    found = run(folder, tmp_path, "--weight_only_int8 --mismatch_correction tis")
    assert found[1]["log_prob_gap"] > 1e-4
    assert found[1]["correction"] != 1.0


def test_the_saved_model_is_the_average_of_the_weights_where_that_is_asked_for(folder, plain, tmp_path):
    run(folder, tmp_path, "--enable_ema --ema_beta 0.5")
    assert_same_metrics(tmp_path, plain)
    state = load_file(tmp_path / "checkpoints" / "global_step4" / "actor" / "tensors.safetensors")
    assert {name.split("/")[0] for name in state} >= {"average", "weight"}
    moved = [float((w - weights(plain)[name]).abs().max()) for name, w in weights(tmp_path).items()]
    assert 0 < max(moved) < 0.02, "near the last weights, but not them"


def test_text_beside_the_answers_becomes_more_likely(folder, tmp_path):
    found = run(folder, tmp_path, f"--pretrain_data {folder}/text.jsonl --ptx_coef 1.0")
    losses = [row["ptx_loss"] for row in found[1:]]
    assert losses[-1] < losses[0] - 0.1


def test_a_teacher_draws_the_policy_towards_itself(folder, tmp_path):
    teacher = tmp_path / "teacher"
    write_task(teacher, seed=3)
    words = f"--teacher_model {teacher}/model --advantage_estimator reinforce --gamma 0 --init_kl_coef 0"
    found = run(folder, tmp_path / "out", words, "--actor_learning_rate 1e-2 --num_episodes 6")
    kls = [row["teacher_kl"] for row in found[1:]]
    assert sum(kls[-3:]) < 0.7 * sum(kls[:3])


def test_samples_without_advantage_are_left_out_without_changing_the_result(folder, tmp_path):
    words = ("--init_kl_coef 0", "--reward_verifier regex([0-9])")
    first, second = tmp_path / "first", tmp_path / "second"
    run(folder, first, *words)
    assert any(row["equal_groups"] > 0 for row in rows(first)[1:])
    assert warm.run(arguments(folder, second, "grpo", LEARN, *words), prepare=keep_every_sample) == 0
    for mine, theirs in zip(rows(first)[1:], rows(second)[1:]):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def keep_every_sample():
    from trimtab.train.rl import loop

    loop.loud = lambda experience, samples: samples


def assert_same_metrics(first, second):
    assert rows(first) == rows(second)
