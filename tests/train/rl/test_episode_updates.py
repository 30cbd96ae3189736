"""What an update learns of episodes: branches count once, and what was cut off carries no loss where that is asked."""

import signal
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import warm
from tests.train.job_run import assert_same_tensors, weights
from tests.train.rl.played import Played, experience_of
from tests.train.rl.rl_run import at, rows
from tests.train.rl.test_trajectories import words_of
from trimtab.config.rl_jobs import GRPOOptions, PPOOptions
from trimtab.errors import UserError
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.micro_batches import make_slice, totals_of
from trimtab.train.rl.objective import policy_loss_term, token_weights
from trimtab.train.rl.rollout_files import best_and_worst, distributions, of_evaluation, whole_groups
from trimtab.train.rl.source import Recording, useful_groups
from trimtab.train.rl.token_advantages import compute_advantages, penalties, trained

BRANCHED = Played([([1, 2], 0.5), ([3], 0.0), ([4, 5, 6], 0.5)], branches=[1, 2])
SHORT = Played([([7], 0.0)])
CUT = Played([([8, 9], 1.0), ([1], 0.5)], finish="turns")
GROUPS = [[BRANCHED, SHORT], [CUT, Played([([2], 0.25), ([3, 3], 0.0)], branches=[1])]]


def weights_of(experience: Experience, samples: list[int], **options) -> list[float]:
    """Of the tokens of these samples in a pass of their own."""
    (batch,) = make_slice(experience, [samples], "counts_N").batches()
    totals = totals_of(experience, list(range(len(experience))))
    return token_weights(batch, totals, PPOOptions(**{"generate_max_len": 10} | options)).tolist()


def test_every_token_of_an_episode_weighs_alike_and_all_episodes_too():
    experience = experience_of(GROUPS)
    samples = list(range(len(experience)))
    assert totals_of(experience, samples) == {"tokens": 13.0, "answers": 4.0}
    expected = [1 / (4 * length) for length in (6, 1, 3, 3) for _ in range(length)]
    assert weights_of(experience, samples, loss_reduction="answer") == pytest.approx(expected)
    assert weights_of(experience, samples, loss_reduction="token") == pytest.approx([1 / 13] * 13)
    assert weights_of(experience, samples, loss_reduction="constant") == pytest.approx([1 / 40] * 13)
    # In another pass than the rest of its episode, a branch still counts by the whole.
    assert weights_of(experience, [1], loss_reduction="answer") == pytest.approx([1 / 24])


@pytest.mark.parametrize(
    "limits, most", [({}, 30), ({"episode_max_len": 100}, 30), ({"episode_max_len": 20}, 20), ({"max_turns": 1}, 10)]
)
def test_the_constant_of_an_episode_is_the_most_that_it_can_draw(limits, most):
    """With the constant of one turn, episodes of several would count more than answers."""
    given = {"environment": "trimtab:guess", "max_turns": 3, "loss_reduction": "constant", **limits}
    full = Played([([1] * (most - most // 2), 0.0), ([2] * (most // 2), 1.0)])
    weights = weights_of(experience_of([[full, SHORT]]), [0, 1], **given)
    assert weights == pytest.approx([1 / (2 * most)] * (most + 1))
    assert sum(weights[:most]) == pytest.approx(1 / 2), "as much as any of two answers"


def test_figures_filters_and_what_is_shown_count_an_episode_once():
    experience = experience_of(GROUPS)
    found = distributions(experience)
    assert sum(found["reward_histogram"][2:]) == sum(found["length_histogram"][2:]) == 4
    assert found["prompt_scores"] == [[0, 0.5], [1, 0.875]]  # (1 + 0) / 2, not (1 + 1 + 1 + 0) / 4
    narrow = {"dynamic_filtering": True, "n_samples_per_prompt": 2, "dynamic_filtering_reward_range": (0.4, 0.6)}
    assert useful_groups(experience, PPOOptions(**narrow)) == [0]
    figures = compute_advantages(experience, PPOOptions(advantage_estimator="rloo"), 0.0)
    assert figures["reward"] == pytest.approx((1 + 0 + 1.5 + 0.25) / 4) and figures["length"] == 13 / 4
    assert figures["truncated"] == 0.25
    # Of an episode in several branches the last is shown.
    assert sorted(best_and_worst(experience, 10)) == [2, 3, 4, 6]
    assert whole_groups(experience, 1, 100) == [2, 3, 4, 6]
    assert len(of_evaluation(experience)) == len(experience)


def test_what_was_cut_off_is_compared_with_but_not_learnt():
    experience, masked = experience_of(GROUPS), experience_of(GROUPS)
    options = {"advantage_estimator": "reinforce_baseline", "n_samples_per_prompt": 2}
    compute_advantages(experience, PPOOptions(**options), 0.0)
    figures = compute_advantages(masked, PPOOptions(mask_truncated=True, **options), 0.0)
    assert figures["masked"] == 0.25 and figures["reward"] == pytest.approx((1 + 0 + 1.5 + 0.25) / 4)
    left = trained(masked, list(range(7)), PPOOptions(mask_truncated=True))
    assert left == [0, 1, 2, 3, 5, 6] and trained(masked, [4, 5, 6], PPOOptions()) == [4, 5, 6]
    assert totals_of(masked, left) == {"tokens": 10.0, "answers": 3.0}
    tokens = masked.tokens_of(left)
    assert not masked.advantages_N[masked.tokens_of([4])].any()
    # Whitened over what is learnt alone, and seen against the one that was cut off all the same.
    raw = torch.tensor([0.5] * 6 + [-0.5] + [-0.625] * 3)
    expected = (raw - raw.mean()) / raw.std(correction=0)
    torch.testing.assert_close(masked.advantages_N[tokens], expected, atol=1e-6, rtol=0)
    assert (experience.advantages_N[tokens] - expected).abs().max() > 0.05


def test_an_episode_is_too_long_by_the_sequence_it_ends_in():
    experience = experience_of(GROUPS)
    assert experience.sequence_lengths_S[experience.lasts_E].tolist() == [13, 4, 8, 8]
    options = PPOOptions(overlong_buffer_len=8.0, overlong_penalty_factor=2.0, episode_max_len=14)
    assert penalties(experience, options).tolist() == pytest.approx([2 * 7 / 8, 0, 2 * 2 / 8, 2 * 2 / 8])


@pytest.mark.parametrize(
    "given, told",
    [
        ({"turn_reward": "returns", "policy_loss_type": "gspo"}, "gspo has one advantage a sequence"),
        ({"overlong_buffer_len": 8.0}, "set --episode_max_len"),
        ({"overlong_buffer_len": 8.0, "episode_max_len": 4, "generate_max_len": 4}, "more than --episode_max_len 4"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_line(given, told):
    options = GRPOOptions(
        pretrain="model", prompt_data="data", n_samples_per_prompt=2, environment="trimtab:game", **given
    )
    with pytest.raises(UserError, match=told):
        list(options.check())


def test_loss_and_gradient_are_those_of_every_drawn_token_once(folder):
    """Episodes in branches, cut into passes that hold parts of them: against a plain loop over sequences and tokens."""
    experience = experience_of(GROUPS)
    compute_advantages(experience, PPOOptions(advantage_estimator="rloo", turn_reward="returns"), 0.0)
    plain = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager").train()
    expected, column = torch.zeros(()), experience.advantages_N.tolist()
    for episodes in GROUPS:
        for episode in episodes:
            tokens = sum(len(turn) for turn, _ in episode.turns)
            for rollout in episode.rollouts(0, 0, [5, 6, 7 + GROUPS.index(episodes)]):
                ids = rollout.prompt_ids + rollout.ids
                log_probs = plain(torch.tensor([ids])).logits[0].log_softmax(-1)
                for place in rollout.drawn.nonzero()[0] + len(rollout.prompt_ids):
                    log_prob = log_probs[place - 1, ids[place]]
                    ratio = (log_prob - log_prob.detach()).exp()
                    expected = expected - column.pop(0) * ratio / (tokens * 4)
    expected.backward()
    assert not column and len(GROUPS) * 2 == 4

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    policy = Policy(model)
    choose_path(policy)
    options = PPOOptions(temperature=1.0, loss_reduction="answer")
    totals = totals_of(experience, list(range(7))) | {"seen_tokens": 13.0}
    loss = 0.0
    for batch in make_slice(experience, [[0, 3, 4], [2, 5], [1, 6]], "advantages_N", "sampled_N", "counts_N").batches():
        share = policy_loss_term(policy, batch, totals, options, kl_coefficient=0.0)
        share.loss.backward()
        loss += share.loss.item()
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    for (name, found), wanted in zip(model.named_parameters(), plain.parameters()):
        scale = wanted.grad.abs().max()
        torch.testing.assert_close(found.grad / scale, wanted.grad / scale, atol=1e-4, rtol=0, msg=name)


def record(folder, groups: list[list[Played]]) -> None:
    folder.mkdir(parents=True)
    Recording(folder, {}, None).write(0, (experience_of(groups), 2, {}))


def test_recorded_episodes_in_branches_train_and_resume_inside_the_iteration(folder, tmp_path):
    record(tmp_path / "recording", GROUPS)
    more = "--turn_reward returns --init_kl_coef 0.1 --loss_reduction answer --train_batch_size 2 --mask_truncated"
    words = [*words_of(folder, tmp_path / "out", tmp_path / "recording"), *more.split()]
    assert warm.run(words) == 0
    (row,) = rows(tmp_path / "out")
    assert row["samples"] == 4 and row["tokens"] == 13 and row["grad_norm"] > 0 and row["masked"] == 0.25
    stopped = [word.replace(str(tmp_path / "out"), str(tmp_path / "again")) for word in words]
    assert warm.run(stopped, prepare=partial(at, (0, "update", 0), signal.SIGTERM)) == 128 + signal.SIGTERM
    assert warm.run([*stopped, "--load_checkpoint"]) == 0
    (again,) = rows(tmp_path / "again")
    for name in ("loss", "grad_norm", "policy_loss", "kl", "return", "advantage_size", "masked"):
        assert again[name] == row[name], name


@pytest.mark.long
@pytest.mark.parametrize("job", ["ppo", "reinforce", "rloo"])
def test_recorded_episodes_in_branches_train_in_other_jobs(folder, tmp_path, job):
    record(tmp_path / "recording", GROUPS)
    more = "--turn_reward returns --init_kl_coef 0.1 --loss_reduction answer --mask_truncated"
    assert warm.run([*words_of(folder, tmp_path / "out", tmp_path / "recording", job), *more.split()]) == 0
    (row,) = rows(tmp_path / "out")
    assert row["samples"] == 4 and row["grad_norm"] > 0 and row["skipped_steps"] == 0
    assert (job == "ppo") == ("critic_loss" in row)


def test_an_iteration_of_which_nothing_may_be_learnt_changes_nothing(folder, tmp_path):
    record(tmp_path / "recording", [[CUT, CUT], [CUT, CUT]])
    more = "--mask_truncated --init_kl_coef 0.1 --use_kl_loss --kl_estimator k3 --entropy_loss_coef 0.1"
    words = [*words_of(folder, tmp_path / "out", tmp_path / "recording"), *more.split()]
    assert warm.run(words) == 0
    (row,) = rows(tmp_path / "out")
    assert row["masked"] == 1 and row["grad_norm"] == 0 and row["loss"] == 0 and row["skipped_steps"] == 0
    assert_same_tensors(weights(folder / "model"), weights(tmp_path / "out"))
