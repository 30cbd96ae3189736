"""`trimtab tail`, and the commands of train_ppo that are meant for it."""

import sys
import types

import pytest

from trimtab.cli import train_ppo, train_tail

PLACES = ["--pretrain", "owner/model", "--prompt_data", "owner/prompts", "--reward_pretrain", "owner/judge"]
REPULSE = [
    *("--do_harmlessness_training", "--parameterization", "policy_psi_q_p_s_t", "--actor_loss_type", "ctl"),
    *("--harmlessness_training_loss_type", "neg_training", "--reinforce_baseline_type", "expectation"),
    *("--alpha", "0.1", "--target_dist_beta", "-10", "--duplicate_rollout_batch_by", "5"),
]


@pytest.fixture
def rehearsed(monkeypatch):
    """The options that reach the trainer in a dry run."""
    seen = []
    module = types.ModuleType("trimtab.train.tail")
    module.dry_run_tail = lambda options: seen.append(options) or ["2 updates"]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return seen


def test_both_spellings_reach_the_tail_trainer_with_the_same_method(rehearsed, capsys):
    assert train_tail.main([*PLACES, "--method", "repulse", "--dry_run"]) == 0
    assert train_ppo.main([*PLACES, *REPULSE, "--dry_run"]) == 0
    ours, theirs = rehearsed
    assert (
        (ours.verb, ours.method, ours.alpha) == (theirs.verb, theirs.method, theirs.alpha) == ("tail", "repulse", 0.1)
    )
    output = capsys.readouterr()
    assert output.out.startswith("# trimtab tail\n") and output.out.endswith("# 2 updates\n") and output.err == ""


def test_the_process_s_own_words_are_translated_in_place(rehearsed, monkeypatch):
    """Loggers copy them, and keys are taken out of them there."""
    monkeypatch.setattr(sys, "argv", ["train_ppo", *PLACES, *REPULSE, "--dry_run", "--use_wandb", "0123456789"])
    monkeypatch.setattr("trimtab.config.resolved_config.find_spec", lambda module: object())
    assert train_ppo.main() == 0
    assert "--method" in sys.argv and "--actor_loss_type" not in sys.argv and "0123456789" not in sys.argv


def test_a_command_that_means_no_method_is_refused_in_one_line(rehearsed, capsys):
    assert train_ppo.main([*PLACES, *REPULSE, "--reward_transform", "minus_alpha_exp_beta_r"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "trimtab tail: error: --harmlessness_training_loss_type neg_training with --reward_transform"
    )
    assert not rehearsed
