"""Memory of one process of a split job: parts that can be worked out by hand."""

import dataclasses

import pytest

from tests.tiny import tiny_model
from trimtab.config.jobs import DPOOptions, SFTOptions
from trimtab.config.parser import parse
from trimtab.config.resolved_config import settle
from trimtab.config.rl_jobs import GRPOOptions
from trimtab.distributed import fsdp
from trimtab.plan.hardware import NAMED, Hardware
from trimtab.plan.memory import LEARNT_KEYS
from trimtab.plan.planner import make_plan
from trimtab.plan.workload import supposed

WORDS = "--bf16 --max_len 64 --train_batch_size 64 --micro_train_batch_size 4 --zero_stage"
RL = "--prompt_max_len 16 --generate_max_len 16 --rollout_batch_size 8 --train_batch_size 8 --micro_train_batch_size 2"


MODEL = tiny_model("llama", num_hidden_layers=6)
COUNT = sum(p.numel() for p in MODEL.parameters())


def sizes(model, words, processes, job=SFTOptions):
    options = settle(parse(job, f"--pretrain {model} {words} --nproc {processes}".split()))[0]
    memory = make_plan(options, NAMED["H200"], supposed(options), processes, propose=False).memory
    return {part.name.partition(": ")[2] or part.name: part.size for part in memory.parts if part.size}, memory


def test_masters_and_moments_are_split_at_every_stage_and_weights_at_the_third(model):
    layer = sum(p.numel() for p in MODEL.model.layers[0].parameters())
    root = COUNT - 6 * layer
    third, _ = sizes(model, f"{WORDS} 3", 4)
    second, _ = sizes(model, f"{WORDS} 2", 4)
    for found in (second, third):
        assert found["fp32 masters, 1 / 4"] == COUNT and found["Adam's moments, 1 / 4"] == 2 * COUNT
        assert found["gradient sums, whole"] == 4 * COUNT, "small ones are kept whole between passes"
    assert second["working weights, gathered"] == 2 * COUNT
    assert third["embedding, head and two layers, gathered"] == 2 * root + 4 * layer
    assert sizes(model, f"{WORDS} 3 --shard_size 2", 4)[0]["fp32 masters, 1 / 2"] == 2 * COUNT
    assert sizes(model, f"{WORDS} 3 --zpg 2", 4)[0]["working weights, 1 / 2"] == COUNT
    assert sizes(model, f"{WORDS} 3 --overlap_comm", 4)[1].peak == sizes(model, f"{WORDS} 3", 4)[1].peak + 2 * layer
    assert not [name for name in sizes(model, f"{WORDS} 3 --adam_offload", 4)[0] if "masters" in name]


def test_large_gradients_are_split_after_every_pass_and_one_pass_has_no_sums(model, monkeypatch):
    whole, _ = sizes(model, f"{WORDS} 3 --train_batch_size 16", 4)
    assert "gradient sums, whole" not in whole and whole["gradients, 1 / 4"] == COUNT, "of the end of the one pass"
    monkeypatch.setattr(fsdp, "WHOLE_SUMS", 0)
    split, _ = sizes(model, f"{WORDS} 3", 4)
    assert split["gradient sums, 1 / 4"] == COUNT and "gradient sums, whole" not in split


def test_frozen_models_are_split_with_the_trained_one_or_whole(model):
    assert sizes(model, f"{WORDS} 3", 4, DPOOptions)[0]["weights"] == COUNT // 2
    assert sizes(model, f"{WORDS} 2", 4, DPOOptions)[0]["weights"] == 2 * COUNT


def test_who_answers_has_all_weights_and_who_is_cut_has_a_part(model):
    found, memory = sizes(model, f"--bf16 {RL} --zero_stage 3 --init_kl_coef 0", 2, GRPOOptions)
    assert found["weights, gathered to answer"] == 2 * COUNT and memory.during("rollout") > 2 * COUNT
    options = settle(parse(GRPOOptions, f"--pretrain {model} {RL} --init_kl_coef 0 --nproc 2".split()))[0]
    here = make_plan(options, Hardware("CPU", 2**30, accelerator=False), supposed(options), 2, propose=False).memory
    assert here.during("rollout") > 4 * COUNT, "of a CPU as well"
    cut, _ = sizes(model, f"--bf16 {RL} --zero_stage 3 --init_kl_coef 0 --ds_tensor_parallel_size 2", 2, GRPOOptions)
    assert 0.5 * 2 * COUNT <= cut["weights, gathered to answer"] < 0.55 * 2 * COUNT


def test_a_row_is_shared_out_and_the_keys_of_the_whole_one_are_gathered(model):
    options = SFTOptions(pretrain=model, bf16=True, max_len=64, micro_train_batch_size=4, ring_attn_size=2)
    work = supposed(options)
    found = {part.name: part.size for part in make_plan(options, NAMED["H200"], work, 4, propose=False).memory.parts}
    plain = make_plan(dataclasses.replace(options, ring_attn_size=1), NAMED["H200"], work, 4, propose=False)
    whole = {part.name: part.size for part in plain.memory.parts}
    assert found["model: activations of 128 tokens"] == pytest.approx(
        whole["model: activations of 256 tokens"] / 2, rel=0.05
    )
    assert found["model: keys and values of 256 tokens"] == LEARNT_KEYS * 256 * 8 * 2, "of one head, 8 wide, in bf16"
