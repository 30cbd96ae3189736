"""Options that change what is drawn or how it is scored: what a run makes of them."""

import signal
from functools import partial

import pytest

from tests import warm
from tests.train.job_run import assert_same_tensors
from tests.train.rl.rl_run import EVALUATION, arguments, assert_identical, at, result, rows, weights, without
from trimtab.train.rl.source import Recording

ONE = "--max_steps 1 --temperature 0.7 --init_kl_coef 0 --lr_scheduler constant"


def run(folder, out, *words, estimator="grpo", **how):
    assert warm.run(unevaluated(folder, out, estimator, *words), **how) == 0
    return rows(out)


def unevaluated(folder, out, estimator, *words):
    fixed = without(arguments(folder, out, estimator), *EVALUATION, "--max_epochs", "--save_steps")
    return [*fixed, *" ".join(words).split()]


def answers(folder):
    cut = {"n_samples_per_prompt": 4, "rollout_batch_size": 4}
    experience, _, _ = Recording(folder, cut, None).read(0)
    return experience


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain")
    return out, run(folder, out, f"{ONE} --max_epochs 1 --record {out}/kept")[0]


def repeated(experience) -> float:
    """The share of tokens that stood in their answer before."""
    found = [experience.response(i) for i in range(len(experience))]
    return sum(1 - len(set(ids)) / len(ids) for ids in found) / len(found)


def test_with_a_least_length_and_a_penalty_log_probs_are_still_the_policys_own(folder, plain, tmp_path):
    words = f"{ONE} --generate_min_len 9 --repetition_penalty 1.5 --record {tmp_path}/kept --actor_learning_rate 0"
    found = run(folder, tmp_path / "out", words)[0]
    drawn, freely = answers(tmp_path / "kept"), answers(plain[0] / "kept")
    assert int(drawn.lengths_S.min()) >= 9 > int(freely.lengths_S.min())
    assert repeated(drawn) < 0.7 * repeated(freely)
    # Two updates that change nothing: the second compares what was sampled with what the trainer computes.
    assert found["log_prob_gap"] < 1e-5 and found["log_prob_ratio"] == pytest.approx(1, abs=1e-5)
    assert found["policy_kl"] < 1e-8 and found["clip_fraction"] == 0


def count_passes():
    """Write down the samples of every pass of scoring."""
    from pathlib import Path

    from trimtab.train.rl.micro_batches import MicroBatcher

    send = MicroBatcher.send

    def told(self, role, method, parts, **shared):
        sizes = [n for part in parts for found in part for n in found.samples]
        with (Path(self.options.save_path) / "passes").open("a") as file:
            file.write(f"{method} {max(sizes)}\n")
        return send(self, role, method, parts, **shared)

    MicroBatcher.send = told


def test_passes_of_scoring_have_the_sizes_that_were_asked_for_and_the_numbers_stay(folder, tmp_path):
    words = "--max_steps 1 --n_samples_per_prompt 4 --skip_checks all"
    words += " --weight_only_int8"  # not exact, so that the policy scores too
    found, passes = [], []
    for name, sizes in {"one": "", "two": "--micro_logprob_batch_size 3 --micro_value_batch_size 1"}.items():
        (tmp_path / name).mkdir()
        found += run(folder, tmp_path / name, words, sizes, estimator="ppo", prepare=count_passes)
        passes.append(set((tmp_path / name / "passes").read_text().splitlines()))
    assert passes == [{"log_probs 8", "values 8", "update 2"}, {"log_probs 3", "values 1", "update 2"}]
    for name in ("loss", "kl", "critic_loss", "explained_variance"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4, abs=1e-6)


@pytest.mark.long
def test_a_killed_run_goes_on_with_the_moments_of_all_rewards(folder, tmp_path):
    words = ["--running_reward_norm", "--max_steps", "3"]
    whole = tmp_path / "whole"
    assert warm.run([*arguments(folder, whole, "reinforce"), *words]) == 0
    means = [row["reward_mean_so_far"] for row in rows(whole)[1:]]
    seen = [(row["reward"], row["samples"]) for row in rows(whole)[1:]]
    for count in range(1, len(means) + 1):
        expected = sum(reward * n for reward, n in seen[:count]) / sum(n for _, n in seen[:count])
        assert means[count - 1] == pytest.approx(expected, rel=1e-5)
    parted = [*arguments(folder, tmp_path / "parted", "reinforce"), *words]
    assert warm.run(parted, prepare=partial(at, (1, "update", 0), signal.SIGTERM)) == 128 + signal.SIGTERM
    assert warm.run([*parted, "--load_checkpoint"]) == 0
    assert_identical(result(tmp_path / "parted"), result(whole))


def test_more_passes_over_the_same_answers_are_more_updates(folder, plain, tmp_path):
    """PaddleNLP's update_iters."""
    out, once = plain
    thrice = run(folder, tmp_path, f"{ONE} --max_epochs 3")[0]
    assert once["reward"] == thrice["reward"], "the same answers"
    assert once["policy_kl"] < thrice["policy_kl"], "the policy has moved while it learnt"
    start, *ends = (weights(place) for place in (folder / "model", out, tmp_path))
    moved = [sum(float((end[name] - weight).abs().sum()) for name, weight in start.items()) for end in ends]
    assert moved[1] > 1.5 * moved[0]


def test_prompts_in_the_order_of_the_data_and_whole_iterations_alone(folder, tmp_path):
    words = f"--no_shuffle --drop_last --record {tmp_path}/kept"
    found = run(folder, tmp_path / "out", words)
    assert [row["samples"] for row in found] == [16] * 4, "two episodes of 9 prompts, 8 of them used"
    assert [row["epoch"] for row in found] == [0.5, 1.0, 1.5, 2.0]
    assert answers(tmp_path / "kept").rows_S[::4].tolist() == [0, 1, 2, 3]
    replayed = run(folder, tmp_path / "again", f"--no_shuffle --drop_last --replay {tmp_path}/kept")
    assert [row["loss"] for row in replayed] == [row["loss"] for row in found]


@pytest.mark.parametrize("how", ["", "--dry_run"])
def test_drop_last_that_would_leave_nothing_is_one_line(folder, tmp_path, how):
    words = arguments(folder, tmp_path / "out", "grpo", "--rollout_batch_size 16 --drop_last", how)
    told = "--drop_last leaves out all 9 prompts: they do not fill an iteration, which takes 16"
    assert told in warm.output(words, 2)


@pytest.mark.long
def test_two_processes_learn_with_all_of_it_what_one_does(folder, tmp_path):
    words = (
        "--max_steps 2 --temperature 0.7 --generate_min_len 3 --repetition_penalty 1.2 --running_reward_norm "
        "--no_shuffle --drop_last --policy_loss_coef 0.5 --micro_logprob_batch_size 3 --adam_eps 1e-6 "
        "--dynamic_filtering --dynamic_filtering_rule differing --dynamic_filtering_batches 2 "
        "--n_samples_per_prompt 4 --train_batch_size 16 --use_kl_loss --kl_estimator k3 --kl_clip 0.5"
    )
    one = run(folder, tmp_path / "one", words, estimator="reinforce")
    assert warm.run_world(unevaluated(folder, tmp_path / "two", "reinforce", words), 2) == [0, 0]
    for mine, theirs in zip(one, rows(tmp_path / "two"), strict=True):
        assert mine["reward"] == theirs["reward"] and mine["filtered_groups"] == theirs["filtered_groups"]
        for name in ("loss", "kl_loss", "grad_norm", "reward_mean_so_far", "reward_std_so_far"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


@pytest.mark.long
def test_checkpoints_of_weights_alone_load_as_models_and_are_nothing_to_go_on_from(folder, tmp_path):
    """PaddleNLP's ignore_save_lr_and_optim."""
    out, log = tmp_path / "out", tmp_path / "log"
    words = f"--max_steps 2 --save_steps 1 --save_hf_ckpt --disable_ds_ckpt --ckpt_path {out}/checkpoints"
    run(folder, out, words)
    kept = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert kept == ["global_step1_hf", "global_step2_hf"]
    assert not list((out / "checkpoints").glob("**/tensors*")), "no state of an optimiser"
    last = weights(out / "checkpoints" / "global_step2_hf")
    assert_same_tensors(last, weights(out))
    run(folder, tmp_path / "again", f"{words} --load_checkpoint", log=log)
    assert "starting from the beginning" in log.read_text()
