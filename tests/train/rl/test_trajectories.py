"""Several turns of model and world in one sequence, in groups of different sizes: what is learnt, written out."""

import signal
import statistics

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests import warm
from tests.train.rl.rl_run import arguments, at, rows, without
from tests.train.rl.test_recording import complaint
from trimtab.config.objective_options import ESTIMATORS
from trimtab.config.rl_jobs import PPOOptions
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.rewards.types import RewardResult
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.rl.experience import Experience, block_sums
from trimtab.train.rl.micro_batches import make_slice
from trimtab.train.rl.objective import policy_loss_term
from trimtab.train.rl.source import Recording
from trimtab.train.rl.token_advantages import compute_advantages

# (prompt, turns of (drawn by the model, tokens)) of every sample, in groups of 2, 3 and 2.
MODEL, WORLD = True, False
FIRST, SECOND, THIRD = [5, 6, 7], [8, 9], [4, 4, 3, 2]
SAMPLES = [
    (0, FIRST, [(MODEL, [1, 2]), (WORLD, [9, 8, 7]), (MODEL, [3])]),
    (0, FIRST, [(MODEL, [4, 5, 6])]),
    (1, SECOND, [(MODEL, [2]), (WORLD, [7, 7]), (MODEL, [5, 1]), (WORLD, [6])]),
    (1, SECOND, [(WORLD, [3]), (MODEL, [8, 2])]),
    (1, SECOND, [(MODEL, [1, 1, 1, 1])]),
    (2, THIRD, [(MODEL, [2, 3])]),
    (2, THIRD, [(MODEL, [6]), (WORLD, [1, 2, 3]), (MODEL, [7, 8, 9])]),
]
REWARDS = [1.0, 0.0, 0.3, -0.7, 2.0, 0.5, 0.25]
GROUPS = [REWARDS[:2], REWARDS[2:5], REWARDS[5:]]


def rollout_of(sample: int, log_prob: float = -1.0) -> Trajectory:
    group, prompt, turns = SAMPLES[sample]
    ids = [token for _, tokens in turns for token in tokens]
    drawn = np.array([mine for mine, tokens in turns for _ in tokens])
    log_probs = np.full(drawn.sum(), log_prob, dtype=np.float32)
    return Trajectory(group, sample, prompt, ids, log_probs, "stop", drawn=drawn)


def make(steps=None) -> Experience:
    rollouts = [rollout_of(sample) for sample in range(len(SAMPLES))]
    return Experience.of([group for group, _, _ in SAMPLES], rollouts, RewardResult(list(REWARDS), steps=steps))


def drawn_places(sample: int) -> list[int]:
    """Where in the sequence the model's tokens are."""
    _, prompt, turns = SAMPLES[sample]
    owners = [False] * len(prompt) + [mine for mine, tokens in turns for _ in tokens]
    return [place for place, mine in enumerate(owners) if mine]


def test_lengths_and_columns_are_those_of_drawn_tokens():
    experience = make()
    assert experience.lengths_S.tolist() == [len(drawn_places(i)) for i in range(len(SAMPLES))]
    assert len(experience.owners_N) == len(experience.sampled_N) == sum(experience.lengths_S.tolist())
    assert experience.sizes_G.tolist() == [2, 3, 2]
    experience.old_N = experience.sampled_N
    experience.reference_N = experience.sampled_N - 0.5
    options = PPOOptions(advantage_estimator="rloo", n_samples_per_prompt=2)
    figures = compute_advantages(experience, options, kl_coefficient=0.1)
    assert figures["length"] == pytest.approx(statistics.fmean(experience.lengths_S.tolist()))
    assert figures["kl"] == pytest.approx(0.5) and figures["equal_groups"] == 0
    # Drawn tokens alone answer for the KL, and each for what is still to come.
    shaped = REWARDS[0] - REWARDS[1]
    expected = [shaped - 0.1 * 0.5 * count for count in (3, 2, 1)]
    assert experience.advantages_N[:3].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_step_that_ends_in_the_worlds_words_ends_at_the_models_last_token():
    steps = [[(1, 0.5), (3, 0.25), (5, 1.0)], *[[] for _ in SAMPLES[1:]]]
    assert make(steps).step_tokens[0] == [1, 1, 2]


def defined(estimator: str, group: list[float], i: int) -> float:
    others = [reward for j, reward in enumerate(group) if j != i]
    return {
        "gae": group[i],
        "reinforce": group[i],
        "rloo": group[i] - statistics.fmean(others),
        "reinforce_baseline": group[i] - statistics.fmean(group),
        "dr_grpo": group[i] - statistics.fmean(group),
        "group_norm": (group[i] - statistics.fmean(group)) / (statistics.stdev(group) + 1e-9),
    }[estimator]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_groups_of_different_sizes_are_shaped_one_by_one(estimator):
    experience = make()
    experience.old_N = experience.sampled_N
    experience.values_N = torch.zeros_like(experience.sampled_N)
    options = PPOOptions(advantage_estimator=estimator, n_samples_per_prompt=2, gamma=1.0, lambd=1.0)
    compute_advantages(experience, options, kl_coefficient=0.0)
    expected = torch.tensor([defined(estimator, group, i) for group in GROUPS for i in range(len(group))])
    expected_N = expected[experience.owners_N]
    if ESTIMATORS[estimator].whitened:
        expected_N = (expected_N - expected_N.mean()) / expected_N.std(correction=0)
    torch.testing.assert_close(experience.advantages_N, expected_N, atol=1e-5, rtol=1e-5)


def test_loss_and_gradient_equal_the_sums_over_drawn_tokens(folder):
    """Two turns of the model with a tool's text between them, beside others; cut into passes that share prompts."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager").train()
    experience = make()
    experience.advantages_N = torch.linspace(-1, 2, len(experience.sampled_N))
    total, column = torch.zeros(()), experience.advantages_N.tolist()
    for sample, (_, prompt, turns) in enumerate(SAMPLES):
        ids = prompt + [token for _, tokens in turns for token in tokens]
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for place in drawn_places(sample):
            log_prob = log_probs[place - 1, ids[place]]
            total = total - column.pop(0) * (log_prob - log_prob.detach()).exp()  # the ratio, which is 1
    expected = total / len(experience.sampled_N)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}

    trained = AutoModelForCausalLM.from_pretrained(folder / "model")
    policy = Policy(trained)
    choose_path(policy)
    totals = {"tokens": float(len(experience.sampled_N)), "answers": 7.0, "seen_tokens": 1.0}
    piece = make_slice(experience, [[0, 1], [2, 3, 4, 6], [5]], "advantages_N", "sampled_N")
    loss = 0.0
    for batch in piece.batches():
        share = policy_loss_term(policy, batch, totals, PPOOptions(temperature=1.0), kl_coefficient=0.0)
        share.loss.backward()
        loss += share.loss.item()
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    for name, parameter in trained.named_parameters():
        scale = gradients[name].abs().max()
        torch.testing.assert_close(parameter.grad / scale, gradients[name] / scale, atol=1e-4, rtol=0)


def record(folder) -> None:
    """An iteration of two groups of other sizes than --n_samples_per_prompt, of several turns."""
    experience = make().take(range(5))
    experience.rows_S = torch.tensor([1, 1, 0, 0, 0])
    folder.mkdir(parents=True)
    Recording(folder, {}, None).write(0, (experience, 2, {}))


def words_of(folder, out, recording, estimator="grpo") -> list[str]:
    words = without(arguments(folder, out, estimator), "--reward_verifier", "--eval_dataset", "--num_episodes")
    return [*words, "--replay", str(recording), "--max_samples", "2", "--num_episodes", "1"]


def test_a_recording_of_several_turns_and_uneven_groups_trains(folder, tmp_path):
    record(tmp_path / "recording")
    assert warm.run(words_of(folder, tmp_path / "out", tmp_path / "recording")) == 0
    (row,) = rows(tmp_path / "out")
    assert row["samples"] == 5 and row["tokens"] == 3 + 3 + 3 + 2 + 4 and row["prompt_tokens"] == 5
    assert row["grad_norm"] > 0 and row["skipped_steps"] == 0


def test_a_group_of_one_and_too_many_groups_are_refused_in_one_line(folder, tmp_path):
    for name, experience in (("lone", make().take([0, 2, 3])), ("many", make())):
        (tmp_path / name).mkdir()
        Recording(tmp_path / name, {}, None).write(0, (experience, 2, {}))
    lone, many = (words_of(folder, tmp_path / "out", tmp_path / name) for name in ("lone", "many"))
    assert "a group has a single answer" in complaint(lone)
    assert "it has 3 groups; --rollout_batch_size allows 2" in complaint([*many, "--rollout_batch_size", "2"])
    assert "it speaks of row 3 of the prompts, of which there are 2" in complaint(many)


def test_a_recording_of_an_earlier_version_is_refused_in_one_line(folder, tmp_path):
    record(tmp_path / "recording")
    (path,) = (tmp_path / "recording").iterdir()
    tensors = load_file(path)
    tensors["response_ids"] = tensors.pop("ids_T")
    metadata = {"iteration": '{"cut": {}, "data": null, "prompts": 2, "figures": {}}'}
    save_file(tensors, path, metadata=metadata)
    told = complaint(words_of(folder, tmp_path / "out", tmp_path / "recording"))
    assert "earlier version" in told and "record again" in told
    assert not (tmp_path / "out").exists()


def write_as_an_earlier_version() -> None:
    """And stop inside an iteration."""
    tensors = Experience.tensors

    def earlier(self):
        found = tensors(self)
        return {("response_ids" if name == "ids_T" else name): value for name, value in found.items()}

    Experience.tensors = earlier
    at((1, "update", 0), signal.SIGTERM)


def test_a_checkpoint_inside_an_iteration_of_an_earlier_version_is_refused_in_one_line(folder, tmp_path):
    words = without(arguments(folder, tmp_path, "grpo", "--max_steps 2"), "--eval_dataset")
    assert warm.run(words, prepare=write_as_an_earlier_version) == 128 + signal.SIGTERM
    told = complaint([*words, "--load_checkpoint"])
    assert "earlier version" in told and "the checkpoint before it" in told


def test_sums_of_blocks_of_any_length_also_of_none():
    values = torch.tensor([True, False, True, True, False, True])
    assert block_sums(values, torch.tensor([0, 2, 0, 3, 1, 0])).tolist() == [0, 1, 0, 2, 1, 0]
    assert block_sums(values[:0], torch.tensor([0, 0])).tolist() == [0, 0]
