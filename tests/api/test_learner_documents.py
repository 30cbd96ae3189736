"""docs/learner.md, run as it stands; and whether its loops do what they say."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.api.test_learner import by_hand
from tests.docs.pages import DOCS, blocks
from trimtab.algos.tail import push_down_advantages, push_down_factor
from trimtab.config.rl_jobs import TailOptions
from trimtab.embedded import bad_word_task
from trimtab.rewards.types import RewardResult
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.rl.experience import Experience
from trimtab.train.tail.tail_run import compute_proposal_advantages

PAGE = DOCS / "learner.md"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The names of the page after all of it has run, in a folder of its own."""
    folder, names = tmp_path_factory.mktemp("page"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        bad_word_task.write(folder / "toy")
        for block in blocks("learner", "python"):
            exec(compile(block, str(PAGE), "exec"), names)
        yield names


def test_grpo_has_thirty_lines_and_raises_the_reward(ran):
    assert len([line for line in blocks("learner", "python")[0].splitlines() if line.strip()]) <= 30
    assert len(ran["history"]) == 20
    assert np.mean(ran["history"][-5:]) > np.mean(ran["history"][:5]) + 0.2


def test_repulse_has_forty_lines_and_its_numbers_are_those_of_the_tail_job(ran):
    assert len([line for line in blocks("learner", "python")[1].splitlines() if line.strip()]) <= 40
    policy, proposal = ran["policy"], ran["proposal"]
    before = {name: (one.log_probs, one.optim_step) for name, one in (("policy", policy), ("proposal", proposal))}
    gathered = {}

    def gathering(name, one):
        def step(**how):
            gathered[name] = {key: grad.clone() for key, grad in one._optimizer.gradients().items()}, how
            return before[name][1](**how)

        return step

    models = {name: clone(one) for name, one in (("policy", policy), ("proposal", proposal))}
    policy.optim_step, proposal.optim_step = gathering("policy", policy), gathering("proposal", proposal)
    own, proposed = ran["repulse_update"]()
    worth = ran["worth"]
    rewards = [worth(sample.text) for sample in proposed]
    rollouts = [Trajectory(s.prompt, s.answer, s.ids[:1], s.ids[1:], s.log_probs, s.finish) for s in proposed]
    experience = Experience.of([s.prompt for s in proposed], rollouts, RewardResult(rewards, rewards))
    experience.old_N = experience.sampled_N
    experience.policy_N = torch.cat([by_hand(models["policy"], s).detach() for s in proposed])
    experience.twist_N = experience.old_N - experience.policy_N
    options = dataclasses.replace(
        TailOptions(), alpha=ran["ALPHA"], target_dist_beta=ran["BETA"], n_samples_per_prompt=ran["N"],
        token_reduction="token_sum", push_down_scale="per_sample", proposal_loss="ctl",
    )  # fmt: skip
    _, pushed_N = compute_proposal_advantages(experience, options)
    # The proposal: contrastive twist learning.
    found = torch.cat([by_hand(models["proposal"], s) for s in proposed])
    (-experience.advantages_N * found).sum().backward()
    assert_gradients(gathered["proposal"][0], models["proposal"])
    assert gathered["proposal"][1] == {"per": "answers"}
    # The policy: REINFORCE on its own answers, and the push-down term on the proposal's.
    own_rewards = torch.tensor([worth(s.text) for s in own]).view(-1, ran["N"])
    others = (own_rewards.sum(1, keepdim=True) - own_rewards) / (ran["N"] - 1)
    loss = -sum((a * by_hand(models["policy"], s)).sum() for a, s in zip((own_rewards - others).flatten(), own))
    loss = loss - (pushed_N * torch.cat([by_hand(models["policy"], s) for s in proposed])).sum()
    models["policy"].zero_grad()
    loss.backward()
    assert_gradients(gathered["policy"][0], models["policy"])
    assert gathered["policy"][1] == {"per": len(own)}
    factor = push_down_factor(ran["ALPHA"], ran["N"], "per_sample")
    assert push_down_advantages(torch.full((4,), 0.25), factor, ran["N"]).tolist() == [-0.25] * 4


def clone(one):
    """Hugging Face's model with the weights as they are."""
    model = bad_word_task.make_model()
    model.load_state_dict(one._policy.inner.state_dict())
    return model


def assert_gradients(found, model):
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-4, msg=name)
