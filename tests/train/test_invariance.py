"""How a step is cut into micro-batches, and whether samples are packed, does not change what is learnt."""

import pytest
import torch

from tests.train.sft_run import NoStop, make_run, relative_difference, step_gradient, write_task

EIGHT = "--train_batch_size 8 --micro_train_batch_size"


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("extra", ["", "--lora_rank 4", "--gradient_checkpointing"])
def test_one_by_eight_two_by_four_and_eight_by_one_give_the_same_gradient(tmp_path, family, extra):
    write_task(tmp_path, family)
    whole, row = step_gradient(make_run(tmp_path, f"{EIGHT} 8 {extra}"))
    assert row["micro_batches"] == 1
    for size, count in ((2, 4), (1, 8)):
        cut, other = step_gradient(make_run(tmp_path, f"{EIGHT} {size} {extra}"))
        assert other["micro_batches"] == count
        assert relative_difference(whole, cut) < 1e-6
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_packed_padded_and_unpacked_give_the_same_gradient(tmp_path, family):
    write_task(tmp_path, family)
    unpacked, row = step_gradient(make_run(tmp_path, f"{EIGHT} 2"))
    packed, packed_row = step_gradient(make_run(tmp_path, f"{EIGHT} 2 --packing_samples"))
    padded, _ = step_gradient(make_run(tmp_path, f"{EIGHT} 4 --attn_implementation eager"))
    assert packed_row["micro_batches"] < row["micro_batches"], "packing fills rows"
    assert packed_row["samples"] == row["samples"] and packed_row["tokens"] == row["tokens"]
    assert relative_difference(unpacked, packed) < 1e-5
    assert relative_difference(unpacked, padded) < 1e-5


def test_gradient_checkpointing_changes_nothing(tmp_path):
    write_task(tmp_path)
    plain, _ = step_gradient(make_run(tmp_path, f"{EIGHT} 4"))
    for extra in ("", "--gradient_checkpointing_use_reentrant"):
        saved, _ = step_gradient(make_run(tmp_path, f"{EIGHT} 4 --gradient_checkpointing {extra}"))
        assert relative_difference(plain, saved) < 1e-6


def test_bf16_weights_follow_fp32_within_their_rounding(tmp_path):
    write_task(tmp_path)
    full, _ = step_gradient(make_run(tmp_path, f"{EIGHT} 1"))
    half, _ = step_gradient(make_run(tmp_path, f"{EIGHT} 1 --bf16"))
    assert all(g.dtype == torch.float32 for g in half.values())
    assert 1e-6 < relative_difference(full, half) < 0.05


@pytest.mark.parametrize("family", ["llama", "llama_tied", "mixtral", "qwen2_moe", "gemma2", "bloom"])
@pytest.mark.parametrize("extra", ["", "--bf16"])
def test_every_parameter_of_a_fresh_model_moves(tmp_path, family, extra):
    write_task(tmp_path, family, rows=64)
    more = "--aux_loss_coef 0.01" if family in ("mixtral", "qwen2_moe") else ""
    fixed = "--train_batch_size 32 --micro_train_batch_size 8 --learning_rate 1e-2 --lr_warmup_ratio 0"
    run = make_run(tmp_path, f"{fixed} {extra} {more}")
    before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    row = run.train_step(NoStop())
    assert ("aux_loss" in row) == bool(more)
    still = [n for n, p in run.model.named_parameters() if torch.equal(p, before[n])]
    assert not still


def test_with_lora_adapters_move_and_nothing_else(tmp_path):
    write_task(tmp_path)
    run = make_run(tmp_path, f"{EIGHT} 4 --lora_rank 4 --learning_rate 1e-2 --lr_warmup_ratio 0")
    names = dict(run.model.named_parameters())
    before = {n: p.detach().clone() for n, p in names.items()}
    run.train_step(NoStop())
    first = {n for n, p in names.items() if not torch.equal(p, before[n])}
    assert first == {n for n in names if "lora_B" in n}, "A has no gradient while B is zero"
    run.train_step(NoStop())
    second = {n for n, p in names.items() if not torch.equal(p, before[n])}
    assert second == {n for n in names if "lora_" in n}


@pytest.mark.parametrize(("words", "rate"), [("--max_steps 1", 1e-2), ("--lr_warmup_ratio 1 --max_steps 2", 5e-3)])
def test_the_first_step_moves_the_model_with_and_without_warm_up(tmp_path, words, rate):
    write_task(tmp_path)
    run = make_run(tmp_path, f"{EIGHT} 4 --learning_rate 1e-2 {words}")
    before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    assert run.train_step(NoStop())["learning_rate"] == pytest.approx(rate)
    assert not any(torch.equal(p, before[n]) for n, p in run.model.named_parameters())
