"""--rehearse N: one process plays a rank of N, and takes what a process of a real run takes."""

import dataclasses
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import plan_layouts
from tests.command import run
from trimtab.models.policy import Policy
from trimtab.plan import planner, workload
from trimtab.rewards.models import FrozenModelReward
from trimtab.rollout.factory import EngineMemory
from trimtab.train import rehearsal, supervised_tasks
from trimtab.train.optimizer import Optimizer
from trimtab.train.rl.teacher import Teaching
from trimtab.train.supervised_tasks import SFTTask

TINY = plan_layouts.SHAPE | plan_layouts.TINY


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    plan_layouts.make_folder(place, TINY)
    return place


def parameters(folder) -> int:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return sum(p.numel() for p in model.parameters())


def rows(said: str, heading: str) -> dict[str, float]:
    """The figures below a heading, by name."""
    block = said.partition(f"{heading}\n")[2].partition("\n\n")[0]
    return {line[:48].strip(): float(line[48:57]) for line in block.splitlines() if line.startswith("  ")}


def test_zero_3_gathers_weights_twice_a_pass_and_scatters_gradients_once_a_step(folder, capsys):
    words = "--max_len 32 --train_batch_size 16 --micro_train_batch_size 2 --zero_stage 3 --rehearse 4"
    said = run(capsys, f"sft --pretrain {folder} {words}").said
    sent, size = rows(said, "GB a step by collective"), 4 * parameters(folder) / 1e9
    passes = 16 / 4 / 2
    assert sent["all-gather over 4 processes, stride 1"] == pytest.approx(passes * 2 * size, rel=0.01)
    assert sent["reduce-scatter over 4 processes, stride 1"] == pytest.approx(size, rel=0.01)
    assert {"load", "forward", "backward", "optimizer", "export", "peak"} == rows(said, "phase, GiB").keys()
    assert "rank 0 of 4 (parameters 4, --zero_stage 3)" in said and "\nfits: " in said
    assert not (folder / "out").exists()


@pytest.mark.short(8)
@pytest.mark.parametrize(
    "verb, words",
    [
        ("dpo", "--max_len 32 --rehearse 4 --ring_attn_size 2 --zero_stage 3"),
        ("rm", "--max_len 32 --rehearse 4 --shard_size 2"),
        ("kto", "--max_len 32 --rehearse 2 --zero_stage 3"),
        ("prm", "--max_len 64 --rehearse 2 --ds_tensor_parallel_size 2 --placeholder_token <pad>"),
        ("sft", "--max_len 32 --rehearse 8 --zero_stage 3 --zpg 2 --lora_rank 4"),
        ("ppo", "--rehearse 4 --ds_tensor_parallel_size 2 --rehearse_rank 3 --reward_pretrain 8B"),
        ("ppo", "--rehearse 4 --critic_num_gpus_per_node 2 --rehearse_rank 1"),
        ("grpo", "--rehearse 2 --zero_stage 3 --ref_reward_offload --n_samples_per_prompt 2"),
        ("grpo", "--rehearse 4 --controller_apart --n_samples_per_prompt 2 --pretrain_data none"),
        ("grpo", "--rehearse 4 --zero_stage 3 --n_samples_per_prompt 2 --teacher_model 8B --teacher_divergence jsd"),
        ("grpo", "--rehearse 2 --n_samples_per_prompt 2 --teacher_prompt_key hint --enable_ema --teacher_ema"),
        ("ppo", "--rehearse 2 --reward_pretrain 8B --normalize_reward --micro_reward_batch_size 1"),
        ("rm", "--max_len 32 --rehearse 2 --margin_loss"),
        ("dpo", "--max_len 32 --rehearse 2 --precompute_ref_log_probs"),
    ],
)
def test_a_model_given_by_its_size_is_rehearsed_without_weights_and_data(verb, words, capsys, monkeypatch):
    monkeypatch.setitem(workload._LLAMAS, "8B", (64, 128, 2, 4, 2, 512))
    monkeypatch.setattr(supervised_tasks, "save_cached", None)  # random data leave nothing behind
    more = "--prompt_max_len 16 --generate_max_len 16 --rollout_batch_size 4" if verb in ("ppo", "grpo") else ""
    said = run(capsys, f"{verb} --pretrain 8B --train_batch_size 8 {more} {words}").said
    assert said.startswith(f"{verb} of 8B, rank ")
    phases = rows(said, "phase, GiB")
    assert ("scoring" in phases) == (verb in ("dpo", "kto", "ppo", "grpo") and "precompute" not in words)
    assert ("rollout" in phases) == bool(more)
    assert {"forward", "backward", "optimizer"} <= rows(said, "arithmetic a step").keys()


@pytest.mark.parametrize(
    "words, mistake",
    [
        ("sft --rehearse 4 --ds_tensor_parallel_size 3", "4 processes cannot be shared out so"),
        ("sft --rehearse 6 --ds_tensor_parallel_size 3", "--ds_tensor_parallel_size 3: --pretrain"),
        ("sft --rehearse 4 --rehearse_rank 4", "--rehearse_rank 4: the ranks are 0 to 3"),
        ("sft --rehearse 4 --nproc 2", "--nproc 2 and --rehearse 4: leave --nproc out"),
        ("sft --rehearse 0", "--rehearse is 0: it must be above 0"),
        ("grpo --rehearse 4 --ray", "without --ray"),
        ("grpo --rehearse 4 --controller_apart --rehearse_rank 0", "it holds no model"),
        ("grpo --rehearse 2 --generate_max_len 200000", "has a context of 131072"),
        ("kto --rehearse 2 --max_len 1", "at least 2 tokens"),
    ],
)
def test_a_layout_that_cannot_be_is_one_line(words, mistake, capsys, monkeypatch):
    monkeypatch.setitem(workload._LLAMAS, "8B", (64, 128, 2, 4, 2, 512))
    verb, _, rest = words.partition(" ")
    found = run(capsys, f"{verb} --pretrain 8B {rest}")
    assert mistake in found.mistake


def test_what_main_memory_cannot_hold_is_one_line(capsys, monkeypatch):
    monkeypatch.setitem(workload._LLAMAS, "8B", (64, 128, 2, 4, 2, 512))
    monkeypatch.setattr(rehearsal, "total_memory", lambda _: 2**20)
    found = run(capsys, "sft --pretrain 8B --rehearse 2 --max_len 64 --train_batch_size 16")
    assert "does not fit: it takes about" in found.mistake and "this machine has 0" in found.mistake


def passes_of(monkeypatch, capsys, words) -> list[int]:
    """Samples of every pass of a reward model."""
    monkeypatch.setitem(workload._LLAMAS, "8B", (64, 128, 2, 4, 2, 512))
    seen = []
    own = FrozenModelReward.run

    def counted(self, score, *samples):
        return own(self, lambda batch: seen.append(len(batch.spans)) or score(batch), *samples)

    monkeypatch.setattr(FrozenModelReward, "run", counted)
    fixed = "--prompt_max_len 16 --generate_max_len 16 --rollout_batch_size 4 --n_samples_per_prompt 2"
    run(capsys, f"grpo --pretrain 8B --reward_pretrain 8B --train_batch_size 8 {fixed} {words}")
    return seen


@pytest.mark.parametrize(
    "words, passes",
    [
        ("--rehearse 2 --micro_reward_batch_size 1", [1] * 4),
        ("--rehearse 4 --micro_reward_batch_size 2", [2]),
        ("--rehearse 2 --use_dynamic_batch --train_max_tokens_per_gpu 64", [4] * 2),  # also of rows that are full
    ],
)
def test_a_reward_model_scores_this_ranks_samples_in_its_own_passes(words, passes, monkeypatch, capsys):
    assert passes_of(monkeypatch, capsys, words) == passes


@pytest.mark.parametrize(
    "words, lengths",
    [
        # Samples of 30 tokens leave 10 of 40 free; two of 20 do not.
        ("sft --max_len 30 --packing_samples --train_max_tokens_per_gpu 40", [[40], [30, 30], [30, 30]]),
        # So do two pairs of 18.
        ("dpo --max_len 9 --packing_samples --train_max_tokens_per_gpu 32", [[32], [18, 18], [18, 18]]),
        # A group of 8 + 2 x 16 leaves 10 of 50 free, and two with answers of 8 leave 2.
        (
            "grpo --prompt_max_len 8 --generate_max_len 16 --n_samples_per_prompt 2 --rollout_batch_size 4"
            " --use_dynamic_batch --train_max_tokens_per_gpu 50",
            [[48], [40, 40], [40, 40]],
        ),
    ],
)
def test_the_first_step_fills_the_rows(words, lengths, capsys, monkeypatch):
    """Of 4 samples or groups, this rank of two has two."""
    monkeypatch.setitem(workload._LLAMAS, "8B", (64, 128, 2, 4, 2, 512))
    seen, forward, measured = [[]], Policy.forward, rehearsal._measured

    def counted(self, batch, **more):
        if torch.is_grad_enabled():
            seen[-1].append(batch.ids_T.numel())
        return forward(self, batch, **more)

    monkeypatch.setattr(Policy, "forward", counted)
    monkeypatch.setattr(rehearsal, "_measured", lambda *given: seen.append([]) or measured(*given))
    size = 8 if words.startswith("grpo") else 4
    run(capsys, f"{words} --pretrain 8B --rehearse 2 --train_batch_size {size}")
    assert seen[1:] == lengths


def test_a_step_is_taken_although_sums_of_copies_are_no_numbers(capsys, monkeypatch):
    """Without it nothing shows the memory of Adam's moments."""
    monkeypatch.setitem(workload._LLAMAS, "8B", (64, 128, 2, 4, 2, 512))
    loss, taken, own = SFTTask.loss, [], Optimizer.apply

    def broken(*given):
        term = loss(*given)
        return dataclasses.replace(term, loss=term.loss * torch.nan)

    def apply(*given, **more):
        taken.append(own(*given, **more))
        return taken[-1]

    monkeypatch.setattr(SFTTask, "loss", broken)
    monkeypatch.setattr(Optimizer, "apply", apply)
    run(capsys, "sft --pretrain 8B --rehearse 2 --max_len 16 --train_batch_size 16 --zero_stage 3")
    assert [step.applied for step in taken] == [True] * 3


def test_for_a_loss_over_the_vocabulary_the_teacher_gives_its_hidden_states(capsys, monkeypatch):
    """4 x 2 answers of 16 tokens in 4 processes, with hidden states of 64 numbers."""
    monkeypatch.setitem(workload._LLAMAS, "8B", (64, 128, 2, 4, 2, 512))
    asked = []
    states = Teaching.states
    monkeypatch.setattr(Teaching, "states", lambda *given: asked.append(states(*given)) or asked[-1])
    fixed = "--prompt_max_len 16 --generate_max_len 16 --rollout_batch_size 4 --n_samples_per_prompt 2"
    words = "--teacher_model 8B --teacher_divergence reverse_kl --rehearse 4"
    said = run(capsys, f"grpo --pretrain 8B --train_batch_size 8 {fixed} {words}").said
    assert [tuple(found.shape) for found in asked] == [(8 * 16, 64)] * 3 and "scoring" in rows(said, "phase, GiB")


def test_slots_of_the_engine_are_shared_by_all_processes_of_a_row(capsys, monkeypatch):
    """Processes that split rows generate samples of their own."""
    monkeypatch.setitem(workload._LLAMAS, "8B", (64, 128, 2, 4, 2, 512))
    slots = []
    own = EngineMemory.keys_and_values
    monkeypatch.setattr(
        EngineMemory, "keys_and_values", lambda self, *given: slots.append(given[0]) or own(self, *given)
    )
    fixed = "--prompt_max_len 16 --generate_max_len 16 --rollout_batch_size 8 --n_samples_per_prompt 2"
    for words in ("--ring_attn_size 2", "--ds_tensor_parallel_size 2"):
        run(capsys, f"grpo --pretrain 8B --train_batch_size 16 --rehearse 4 {fixed} {words}")
    assert slots == [8 * 2 // 4] * 2 + [8 * 2 // 2] * 2  # the plan's and the rehearsal's


@pytest.mark.short(1)
@pytest.mark.parametrize("words", ["--ds_tensor_parallel_size 2", "--zero_stage 3 --shard_size 2"])
def test_one_process_may_play_one_rank_after_another(words, folder, capsys):
    for rank in (0, 3, 1):
        said = run(capsys, f"sft --pretrain {folder} --max_len 16 --rehearse 4 --rehearse_rank {rank} {words}").said
        assert f"rank {rank} of 4" in said


def test_folders_of_the_run_are_left_alone(folder, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("mine")
    words = f"--max_len 16 --train_batch_size 4 --micro_train_batch_size 2 --save_path {out} --ckpt_path {out}/ck"
    assert "\nfits: " in run(capsys, f"sft --pretrain {folder} {words} --rehearse 2").said
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "config.json"]
    assert (out / "config.json").read_text() == "mine"


@pytest.mark.parametrize("where", ["at the end", "in a pass"])
def test_too_little_memory_is_one_line_with_flags_that_help(where, folder, capsys, monkeypatch):
    monkeypatch.setattr("trimtab.plan.hardware.total_memory", lambda _: 2**20)
    if where == "in a pass":
        message = "CUDA out of memory. Tried to allocate 2 GiB"
        monkeypatch.setattr(SFTTask, "loss", Mock(side_effect=torch.OutOfMemoryError(message)))
    monkeypatch.setattr(planner, "flag_changes", lambda *_, **__: [{"lora_rank": 16}])
    found = run(capsys, f"sft --pretrain {folder} --max_len 32 --train_batch_size 8 --rehearse 2")
    assert ("\npeak memory by phase, GiB" in found.out) == (where == "at the end")
    assert found.mistake.startswith("does not fit: ") and "more processes" in found.mistake
    assert ("out of memory in the forward phase" in found.mistake) == (where == "in a pass")


# ---- against real runs


@pytest.mark.long
@pytest.mark.parametrize("name, verb, processes, words", plan_layouts.TABLE)
def test_the_played_rank_takes_the_memory_of_the_worst_real_process(name, verb, processes, words, tmp_path):
    plan_layouts.make_folder(tmp_path, plan_layouts.SMALL)
    plan_layouts.write_data(tmp_path)
    played, planned, _ = plan_layouts.rehearsed(verb, tmp_path, words, processes)
    measured = max(plan_layouts.measured(verb, tmp_path, words, processes))
    assert played == pytest.approx(measured, rel=0.05)
    assert planned == pytest.approx(played, rel=0.15)
