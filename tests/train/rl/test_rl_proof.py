"""What `trimtab check` says of an RL job's labels, rewards, checkpoints and files."""

import pytest
import torch

from tests.train.job_run import assert_same_tensors, weights, write_model, write_rows
from tests.train.test_planted_faults import run
from trimtab.cli.main import main
from trimtab.embedded.sort_task import make_prompts
from trimtab.rewards.types import RewardRequest
from trimtab.rewards.verifiers import VERIFIERS, score_labels
from trimtab.train.rl import loop, trainer
from trimtab.train.rl.rl_proof import labels_shifted
from trimtab.train.rl.rollout_worker import RewardClock
from trimtab.train.rl.state import Counters

SKIPPED = "--skip_checks update,micro_batches,neighbours,objective,engine"


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model")
    write_rows(tmp_path / "prompts.jsonl", make_prompts(9, 1))
    return tmp_path


def test_checkpoint_and_export_of_a_sound_run_pass_and_leave_nothing(task, capsys):
    assert run(task, task / "out", "check ppo", f"{SKIPPED} --lora_rank 4 --enable_ema") == 0
    said = capsys.readouterr().out
    for name in ("reward: 16 answers", "checkpoint: a checkpoint: 0 tensors", "export: the saved folder"):
        assert f"check {name}" in said
    assert "failed" not in said and not (task / "out").exists()


def test_a_checkpoint_that_resumes_elsewhere_and_one_that_reads_back_otherwise_fail(task, capsys, monkeypatch):
    monkeypatch.setattr(loop, "Counters", lambda *given, **more: Counters(*given, **more | late(more)))
    assert run(task, task / "out", "check grpo", SKIPPED) == 2
    assert "it was saved after step 1 and goes on after step 0" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setenv("TRIMTAB_CACHE", str(task / "cache"))
    monkeypatch.setattr(trainer.Trainer, "restore", lambda *_: None)
    assert run(task, task / "out", "check grpo", SKIPPED) == 2
    assert "is not what was saved" in capsys.readouterr().err


def late(more: dict) -> dict:
    return {"actor_steps": more["actor_steps"] - 1} if "actor_steps" in more else {}


def test_an_export_of_other_weights_fails(task, capsys, monkeypatch):
    plain = trainer.save_model

    def save(model, *given, **how):
        plain(model, *given, **how)
        with torch.no_grad():
            model.inner.lm_head.weight.mul_(1.5)

    monkeypatch.setattr(trainer, "save_model", save)
    assert run(task, task / "out", "check grpo", SKIPPED) == 2
    assert "the exported model is another one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "said"),
    [("raise ValueError('no key')", "no key"), ("return [1.0]", "1 for 16 samples"), ("return [1e999] * 16", "inf")],
)
def test_a_reward_that_fails_is_one_line_with_exit_code_2(task, capsys, body, said):
    (task / "reward.py").write_text(f"def reward_func(queries, prompts, labels):\n    {body}\n")
    words = f"--reward_func {task}/reward.py --reward_verifier None {SKIPPED}"
    assert run(task, task / "out", "check grpo", words) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "reward.py" in error and said in error and "Traceback" not in error and not (task / "out").exists()


@pytest.mark.parametrize(("wrong", "seen"), [(1, 1), (7, 6)])
def test_most_labels_that_a_verifier_rejects_fail_without_weights_and_a_few_are_named(task, capsys, wrong, seen):
    rows = make_prompts(9, 1)
    write_rows(task / "prompts.jsonl", [*rows[:-wrong], *({**row, "label": "no number"} for row in rows[-wrong:])])
    failed = run(task, task / "out", "grpo", "--reward_verifier number --dry_run") == 2
    said = "".join(capsys.readouterr())
    assert failed == (seen > 4) == ("--skip_checks reward" in said) and ("warning" in said) == (not failed)
    assert f"prompts.jsonl, line {10 - wrong}: number gives 0 for the label 'no number' ({seen} of 8 such rows)" in said


def test_a_label_that_is_not_of_its_kind_is_one_of_eight(task, capsys):
    rows = [{**row, "label": LABELS["kk"]["solution_text_format"]} for row in make_prompts(9, 1)]
    write_rows(task / "prompts.jsonl", [*rows[:-1], {**rows[-1], "label": "nobody"}])
    assert run(task, task / "out", "grpo", "--reward_verifier kk --dry_run") == 0
    assert "check reward: the labels of 8 rows" in (said := capsys.readouterr().out) and "1 of 8 such rows" in said


def test_empty_labels_are_a_warning(task, capsys):
    rows = make_prompts(9, 1)
    write_rows(task / "prompts.jsonl", [{**rows[0], "label": " "}, *rows[1:]])
    assert run(task, task / "out", "grpo", "--reward_verifier exact --dry_run") == 0
    assert "check data: the labels of 9 prompts: warning: 1 of 9 are empty" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["--kl_clip 1e-6", "--policy_loss_coef 0"])
def test_a_loss_without_surrogate_or_with_a_clipped_kl_is_sound(task, capsys, words):
    skipped = SKIPPED.replace("objective,", "") + ",checkpoint,export,reward"
    assert run(task, task / "out", "check grpo", f"{skipped} --init_kl_coef 0.1 --use_kl_loss {words}") == 0
    assert "made-up rewards: passed" in capsys.readouterr().out


LABELS = {
    "gsm8k": "2 + 3 = 5\n#### 5",
    "number": 1.5,
    "exact": " two  words ",
    "kk": {"solution_text_format": "(1) Zoey is a knight\n(2) Owen is a knave"},
    "math": "\\frac{1}{2}",
}


@pytest.mark.parametrize("name", LABELS)
def test_verifiers_score_their_own_labels_best(name):
    if name == "math":
        pytest.importorskip("math_verify")
    request = RewardRequest(["q"] * 2, ["q"] * 2, [""] * 2, [LABELS[name]] * 2)
    assert score_labels(name, request) == [VERIFIERS[name].best] * 2


def test_every_verifier_with_a_label_is_tried_or_has_no_answer_to_try():
    tried = {name for name, kind in VERIFIERS.items() if kind.answers}
    assert tried == LABELS.keys() and {name for name, k in VERIFIERS.items() if k.needs_label} - tried == {
        "code",
        "regex",
    }


class Rows(list):
    """Prompts with labels, as (prompt, label)."""

    def prompt(self, index):
        return self[index][0]

    def label(self, index):
        return self[index][1]


@pytest.mark.parametrize("shift", [0, 1, -1])
def test_labels_of_a_neighbouring_row_are_noticed(shift):
    rows = make_prompts(30, 1)
    pairs = [(row["input"][0]["content"], rows[(i + shift) % 30]["label"]) for i, row in enumerate(rows)]
    assert labels_shifted(Rows(pairs)) == (shift or None)
    growing = sorted(pairs, key=lambda pair: len(pair[0]))
    assert shift or labels_shifted(Rows(growing)) is None
    assert labels_shifted(Rows((prompt, "A") for prompt, _ in pairs)) is None


def test_the_clock_knows_the_time_limit_of_a_call_and_of_a_sample():
    clock = RewardClock()
    batch, single = (type("Timed", (), {"seconds": 10.0, "batched": batched}) for batched in (True, False))
    clock.add(batch, 4, 2.0)
    assert (clock.seconds, clock.share) == (2.0, 0.2)
    clock.add(single, 4, 4.0)
    assert (clock.seconds, clock.share) == (6.0, 0.2)
    clock.add(single, 1, 9.0)
    assert clock.share == 0.9


@pytest.mark.parametrize("words", ["check", "check generate", "check check sft"])
def test_check_needs_a_training_job(words, capsys):
    assert main(words.split()) == 2
    assert "the jobs are sft" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["", "--lora_rank 4", "--lora_rank 4 --bf16"])
def test_weights_are_changed_a_little_for_the_engine_and_their_comparison_waits(task, capsys, monkeypatch, words):
    """The weights are of a common size, of which the change is a fraction; the limits of a comparison after a sync are
    those of the model in training."""
    changes, plain = [], trainer.PolicyTrainer.shift_weights

    def shift(role, *, scale):
        plain(role, scale=scale)
        changes.extend(
            (scale * (before.float().abs().mean() or 0.02), (role.optimizer.masters[name] - before).abs().mean())
            for name, before in role._unshifted.items()
        )

    class Comparison:
        calls = 0

        def check(self, version):
            Comparison.calls += 1

    class Run(loop.RLRun):
        def __init__(self, *given, **more):
            super().__init__(*given, **more)
            self.weight_sync.check = Comparison()

    monkeypatch.setattr(trainer.PolicyTrainer, "shift_weights", shift)
    monkeypatch.setattr("trimtab.train.rl.launch.RLRun", Run)
    skipped = "--skip_checks update,micro_batches,neighbours,objective,checkpoint,export,reward"
    assert run(task, task / "out", "check grpo", f"{skipped} {words}") == 0
    said = capsys.readouterr().out.partition("check engine: a change of ")[2]
    assert 0.05 <= float(said.split()[0]) < 2, "much more than rounding"
    assert changes and all(change < 1.5 * size for size, change in changes)
    assert Comparison.calls == 1  # with the weights as they were


def test_an_export_is_compared_also_after_a_prompt_of_one_token(task, capsys):
    write_rows(task / "prompts.jsonl", [{"input": "7", "label": "7"}] * 9)
    words = f"{SKIPPED},reward,checkpoint --input_key input --apply_chat_template False"
    assert run(task, task / "out", "check grpo", words) == 0
    assert "log-probs differ by nan" not in (said := capsys.readouterr().out) and "check export" in said


@pytest.mark.parametrize("kind, limits", [("reinforce", "-10 0"), ("ppo", "-1 0"), ("reinforce", "1 5")])
def test_rewards_are_clipped_in_the_run_and_not_in_the_check(task, capsys, kind, limits):
    skipped = "update,micro_batches,neighbours,engine,checkpoint,export,reward"
    words = f"--reward_clip_range {limits} --skip_checks {skipped}"
    assert run(task, task / "out", f"check {kind}", words) == 0
    assert "check objective: " in capsys.readouterr().out


def test_a_clip_narrower_than_rounding_makes_no_check_fail(task, capsys, monkeypatch):
    """The trainer's log-probs of the same tokens differ each time, as on a device that sums in another order."""
    noise, plain = torch.Generator().manual_seed(0), trainer.PolicyTrainer.log_probs

    def rounded(role, slices):
        return [found + 3e-3 * torch.randn(found.shape, generator=noise) for found in plain(role, slices)]

    monkeypatch.setattr(trainer.PolicyTrainer, "log_probs", rounded)
    words = "--policy_loss_type gspo --eps_clip_low_high 3e-4 4e-4 --train_batch_size 4 --micro_train_batch_size 4"
    skipped = "neighbours,engine,checkpoint,export,reward"
    for seed in range(3):
        assert run(task, task / "out", "check grpo", f"{words} --seed {seed} --skip_checks {skipped}") == 0
    said = capsys.readouterr().out
    assert said.count("check objective: ") == said.count("check micro_batches: ") == 3


def test_memory_that_runs_out_while_weights_are_changed_leaves_them_as_they_were(task, capsys, monkeypatch):
    plain = trainer.shift_tensors

    def short(optimizer, masters, scale):
        plain(optimizer, dict([*masters.items()][:-1]), scale)
        raise torch.OutOfMemoryError("tried to allocate noise")

    monkeypatch.setattr(trainer, "shift_tensors", short)
    words = "--max_steps 1 --skip_checks update,micro_batches,neighbours,objective"
    assert run(task, task / "out", "grpo", words) == 0 and "left out: engine (out of memory)" in capsys.readouterr().out
    assert run(task, task / "plain", "grpo", "--max_steps 1 --skip_checks all") == 0
    assert_same_tensors(weights(task / "out"), weights(task / "plain"))
