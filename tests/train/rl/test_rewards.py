"""Rewards in the loop: of every source, together, and when they fail."""

import json
import shutil

import pytest

from tests import warm
from tests.train.job_run import assert_same_tensors, write_model, write_rows
from tests.train.rl.rl_run import PROMPTS, arguments, assert_identical, result, rows, weights, without
from trimtab.cli.main import main
from trimtab.config.rl_jobs import PPOOptions
from trimtab.embedded.sort_task import make_prompts, make_tokenizer
from trimtab.train.metrics import read_rows
from trimtab.train.rl.checks import critic_start
from trimtab.train.rl.loop import RLRun
from trimtab.train.rl.source import Recording

FAILS = """
import pathlib

def reward_func(queries, prompts, labels):
    if pathlib.Path({flag!r}).exists():
        raise ValueError("the judge is out for lunch")
    return [len(set(query)) / 10 for query in queries]
"""


def test_several_reward_models_are_summed_with_their_weights(folder, tmp_path):
    words = without(arguments(folder, tmp_path, "grpo"), "--reward_verifier")
    words += f"--reward_pretrain {folder}/judge,{folder}/other --reward_weights 1.0 0.5 --max_steps 2".split()
    assert warm.run(words) == 0
    for row in rows(tmp_path)[1:]:
        assert row["reward"] == pytest.approx(row["reward/judge"] + 0.5 * row["reward/other"], abs=1e-5)


def test_a_constant_reward_moves_nothing(folder, tmp_path):
    words = without(arguments(folder, tmp_path, "reinforce"), "--reward_verifier", "--entropy_loss_coef", "--gamma")
    words += ["--reward_verifier", "length(0-1000):0.1", "--init_kl_coef", "0", "--max_steps", "2"]
    assert warm.run(words) == 0
    assert_same_tensors(weights(tmp_path), weights(folder / "model"))


def test_a_critic_starts_from_the_reward_model_and_is_saved(folder, tmp_path):
    words = without(arguments(folder, tmp_path, "ppo"), "--reward_verifier")
    words += f"--reward_pretrain {folder}/judge --save_value_network --max_steps 1".split()
    assert warm.run(words) == 0
    config = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]


@pytest.fixture(scope="module")
def judged(folder, tmp_path_factory):
    """The words of a run whose reward function may fail, the file that makes it fail, and the run that it lets be."""
    place = tmp_path_factory.mktemp("judged")
    flag, function, whole = place / "lunch", place / "reward.py", place / "whole"
    function.write_text(FAILS.format(flag=str(flag)))

    def words(out):
        return [*without(arguments(folder, out, "grpo"), "--reward_verifier"), "--remote_rm_url", str(function)]

    assert warm.run(words(whole)) == 0
    return words, flag, result(whole)


@pytest.fixture(scope="module")
def foreign(folder, tmp_path_factory):
    """A reward model of another tokenizer: two tokens have changed places."""
    place = shutil.copytree(folder / "judge", tmp_path_factory.mktemp("foreign") / "judge")
    known = json.loads((place / "tokenizer.json").read_text())
    vocabulary = known["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (place / "tokenizer.json").write_text(json.dumps(known))
    return place


def test_a_critic_does_not_start_from_a_reward_model_of_another_tokenizer(folder, foreign, tmp_path, capsys):
    words = without(arguments(folder, tmp_path, "ppo"), "--reward_verifier")
    words += f"--reward_pretrain {foreign} --dry_run".split()
    assert main(words) == 0
    assert f"the critic starts from the policy: {foreign} has another tokenizer" in capsys.readouterr().out
    tokenizer = make_tokenizer()
    options = PPOOptions(pretrain=f"{folder}/model", reward_pretrain=f"{foreign},{folder}/judge")
    assert critic_start(options, tokenizer)[0] == f"{folder}/model"
    options = PPOOptions(pretrain=f"{folder}/model", reward_pretrain=f"{folder}/judge,{foreign}")
    assert critic_start(options, tokenizer) == (f"{folder}/judge", None)
    assert main([*words, "--critic_pretrain", str(foreign)]) == 2
    assert f"--critic_pretrain {foreign}: its tokenizer is not --pretrain's" in capsys.readouterr().err


@pytest.mark.short(1)
@pytest.mark.parametrize("what, iteration, told", [("sample", 2, 3), ("evaluate", 0, 0), ("evaluate", 1, 2)])
def test_a_reward_that_fails_for_good_stops_the_run_after_a_checkpoint_from_which_it_goes_on(
    judged, tmp_path, what, iteration, told
):
    words, flag, whole = judged
    said = warm.output(words(tmp_path), 1, prepare=FailLater(flag, what, iteration))
    flag.unlink()
    assert "the judge is out for lunch" in said and "checkpoint saved in" in said
    assert len(rows(tmp_path)) == told, "nothing was trained on made-up rewards"
    assert warm.run([*words(tmp_path), "--load_checkpoint"]) == 0
    assert_identical(result(tmp_path), whole)


class FailLater:
    """The reward fails from when the run does `what` in this iteration."""

    def __init__(self, flag, what, iteration):
        self.flag, self.what, self.iteration = flag, what, iteration

    def __call__(self):
        plain = getattr(RLRun, self.what)

        def failing(run, stop):
            if run.counters.iteration == self.iteration:
                self.flag.write_text("")
            return plain(run, stop)

        setattr(RLRun, self.what, failing)


@pytest.mark.short(1)
@pytest.mark.parametrize("estimator", ["reinforce", "grpo"])
def test_rewards_of_steps_stand_within_the_answers(folder, tmp_path, estimator):
    write_model(tmp_path / "prm", seed=7)
    words = without(arguments(folder, tmp_path / "out", estimator), "--reward_verifier")
    words += f"--reward_pretrain {tmp_path}/prm --placeholder_token . --reward_tokens y n --step_reward steps".split()
    words += ["--step_separator", "3", "--max_steps", "2"]
    assert warm.run(words) == 0
    found = rows(tmp_path / "out")
    assert all(0 < row["eval_reward"] < 1 for row in found if "eval_reward" in row)
    for row in found[1:]:
        assert 0 < row["reward"] < 1 and row["reward_std"] > 0 and row["equal_groups"] < 1
        assert not any("rewards are equal" in alarm for alarm in row["alarms"])
    assert len({row["reward"] for row in read_rows(tmp_path / "out" / "rollouts.jsonl")}) > 1


def test_dynamic_filtering_trains_only_on_groups_in_the_range(folder, tmp_path):
    assert warm.run(arguments(folder, tmp_path, "filtered", f"--record {tmp_path}/recorded")) == 0
    found = rows(tmp_path)[1:]
    assert sum(row["filtered_groups"] for row in found) > 0
    recording = Recording(tmp_path / "recorded", {"n_samples_per_prompt": 4, "rollout_batch_size": 4}, None)
    for iteration, row in enumerate(found):
        experience, _, _ = recording.read(iteration)
        means = experience.scores_S.view(-1, 4).mean(1)
        assert len(experience) == row["samples"] and ((means > 0.5) & (means < 1.0)).all()


def test_missing_labels_are_counted_before_the_run(folder, tmp_path, capsys):
    path, labelled = tmp_path / "prompts.jsonl", make_prompts(PROMPTS, 1)
    write_rows(path, [{**row, "label": None if i in (3, 5) else row["label"]} for i, row in enumerate(labelled)])
    words = without(arguments(folder, tmp_path, "grpo"), "--reward_verifier", "--prompt_data")
    words += ["--prompt_data", str(path), "--reward_verifier", "exact"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert f"2 of 9 prompts of the train data have none (the first: {path}, line 4)" in told
    assert not (tmp_path / "metrics.jsonl").exists()


def test_one_answer_without_a_reward_fails_the_run_in_a_line(folder, tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def reward_func(queries, prompts, labels):\n    return [None, *map(len, queries[1:])]\n")
    words = without(arguments(folder, tmp_path, "grpo"), "--reward_verifier", "--eval_dataset")
    told = warm.output([*words, "--remote_rm_url", str(path)], 1, limit=60).splitlines()[-1]
    assert "none of reward_func gives it a reward" in told and f"its prompt stands in {folder}/prompts.jsonl" in told


def test_a_reward_that_fails_on_a_row_says_where_the_row_stands(folder, tmp_path, capsys):
    path = tmp_path / "reward.py"
    path.write_text("def reward_func(queries, prompts, labels):\n    return [1 / (label != '') for label in labels]\n")
    labelled = make_prompts(PROMPTS, 1)
    labelled[6]["label"] = ""
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n" + "".join(json.dumps(row) + "\n" for row in labelled))
    words = without(arguments(folder, tmp_path, "grpo"), "--reward_verifier", "--prompt_data", "--eval_dataset")
    assert main([*words, "--prompt_data", str(data), "--remote_rm_url", str(path)]) == 1
    told = capsys.readouterr().err
    assert "division by zero" in told and f"; its prompt stands in {data}, line 8; checkpoint saved in" in told
