"""Log-probs of the policy before an update: asked for only where the update's own are not the same."""

import pytest

from tests.train.rl.rl_run import arguments, rows, without
from trimtab.cli.main import main
from trimtab.train.rl.loop import RLRun
from trimtab.train.rl.trainer import PolicyTrainer


def trained(folder, out, monkeypatch, left: bool, *more: str) -> tuple[list[dict], int]:
    """A run of one update an iteration whose engine rounds otherwise than the trainer, and how often the trainer was
    asked for log-probs."""
    asked = []
    monkeypatch.setattr(RLRun, "leaves_kl_to_update", left)
    own = PolicyTrainer.log_probs
    monkeypatch.setattr(PolicyTrainer, "log_probs", lambda self, slices: asked.append(1) or own(self, slices))
    words = without(arguments(folder, out, "grpo"), "--max_epochs", "--train_batch_size", "--eval_dataset")
    words = [word for word in words if word != "--keep_dropout"]
    assert main([*words, "--train_batch_size", "16", "--max_steps", "3", "--bf16", "--skip_checks", "all", *more]) == 0
    monkeypatch.undo()
    return rows(out), len(asked)


@pytest.mark.short(1)
@pytest.mark.parametrize("more", [("--use_kl_loss", "False", "--kl_estimator", "k1"), ("--kl_target", "0.05")])
def test_a_kl_measured_in_the_update_is_the_one_measured_before_it(folder, tmp_path, monkeypatch, more):
    before = trained(folder, tmp_path / "before", monkeypatch, False, *more)
    left = trained(folder, tmp_path / "left", monkeypatch, True, *more)
    assert before[1] == 3 and left[1] == 0
    assert any(row["kl"] != 0 for row in before[0])
    for one, other in zip(before[0], left[0], strict=True):
        assert one.keys() == other.keys()
        for name in ("kl", "kl_answer", "return", "advantage_size", "loss", "grad_norm", "reward", "kl_coefficient"):
            assert other[name] == pytest.approx(one[name], rel=2e-3, abs=2e-5), name
