"""What is told of a rollout's rewards: sums that discounting does not touch."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.train.rl.rl_run import arguments, rows, write_task
from tests.train.rl.test_experience import make
from trimtab.cli.main import main
from trimtab.config.rl_jobs import PPOOptions
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.train.rl import loop
from trimtab.train.rl.experience import FINISHES
from trimtab.train.rl.token_advantages import compute_advantages


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "rloo"])
def test_the_return_is_the_plain_sum_of_token_rewards(estimator):
    steps = [[(0, 0.5)] for _ in range(9)]
    experience = make(steps=steps)
    experience.old_N = experience.sampled_N
    experience.reference_N = experience.sampled_N - 0.5
    experience.values_N = torch.zeros_like(experience.sampled_N)
    options = PPOOptions(advantage_estimator=estimator, gamma=0.3, lambd=0.5, n_samples_per_prompt=3)
    figures = compute_advantages(experience, options, kl_coefficient=0.1)
    kl = 0.1 * 0.5 * float(experience.lengths_S.float().mean())
    rewards = 0.0 if estimator == "rloo" else float(experience.rewards_S.mean()) + 0.5
    assert figures["return"] == pytest.approx(rewards - kl, abs=1e-6)


def test_a_cut_off_answer_is_continued_by_the_critic(tmp_path, monkeypatch):
    """V after its last token is the score that transformers' classifier gives the whole sequence; of others it is 0. In
    the returns it weighs (gamma lambda)^k gamma, k tokens before the end."""
    task = write_task(tmp_path)
    torch.manual_seed(3)
    critic = AutoModelForSequenceClassification.from_pretrained(task / "model", num_labels=1).eval()
    torch.nn.init.normal_(critic.score.weight, std=0.3)
    critic.save_pretrained(tmp_path / "critic")
    make_tokenizer().save_pretrained(tmp_path / "critic")
    seen = []

    def look(experience, *settings):
        found = compute_advantages(experience, *settings)
        seen.append(experience)
        return found

    monkeypatch.setattr(loop, "compute_advantages", look)
    fixed = f"--critic_pretrain {tmp_path}/critic --max_steps 1 --generate_max_len 24 --freezing_actor_steps 0"
    for name, more in (("plain", ""), ("bootstrapped", "--bootstrap_truncated")):
        assert main(arguments(task, tmp_path / name, "ppo", fixed, "--gamma 0.9", more)) == 0
        assert rows(tmp_path / name)[-1]["policy_loss"] is not None  # nothing was frozen
    plain, bootstrapped = seen
    assert plain.after_N is None and torch.equal(plain.values_N, bootstrapped.values_N)
    gained_N = bootstrapped.returns_N - plain.returns_N
    cut_off = bootstrapped.finishes_S == FINISHES.index("length")
    assert cut_off.any() and not cut_off.all()
    for sample, run in enumerate(bootstrapped.drawn_of(torch.arange(len(bootstrapped)))):
        after = 0.0
        if cut_off[sample]:
            start = bootstrapped.offsets_S[sample]
            ids = bootstrapped.ids_T[start : start + bootstrapped.sequence_lengths_S[sample]].long()
            with torch.no_grad():
                after = critic(input_ids=ids[None]).logits.item()
        length = run.stop - run.start
        expected = [0.9 * after * (0.9 * 0.9) ** (length - 1 - token) for token in range(length)]
        assert not cut_off[sample] or abs(after) > 1e-3
        assert gained_N[run].tolist() == pytest.approx(expected, abs=1e-5)
