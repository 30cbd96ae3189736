"""What a job is made of, and the largest passes that fit."""

import dataclasses

import pytest
import torch

from tests.tiny import tiny_model
from trimtab.config.jobs import DPOOptions, SFTOptions
from trimtab.config.rl_jobs import GRPOOptions, PPOOptions
from trimtab.models.policy import Policy
from trimtab.plan.hardware import GIB, NAMED, Hardware
from trimtab.plan.memory import FILL, Memory, Part
from trimtab.plan.planner import largest, make_plan
from trimtab.plan.printer import lines
from trimtab.plan.speed import PLAIN
from trimtab.plan.workload import supposed
from trimtab.rollout.builtin.engine import BuiltinEngine

SMALL = Hardware("small", 16 * 2**20, 1e12, 1e12, 1e11)
RL = {"prompt_max_len": 16, "generate_max_len": 16, "rollout_batch_size": 4, "train_batch_size": 32, "max_samples": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    return str(folder)


def parts(options) -> list[Part]:
    """On one device, in micro-batches of 64 tokens."""
    return make_plan(options, NAMED["H200"], supposed(options), propose=True).shown.first[0].at(64).parts


def sizes(options) -> dict[str, int]:
    return {part.name: part.size for part in parts(options)}


def test_each_job_has_its_parts(model):
    sft = sizes(SFTOptions(pretrain=model, bf16=True, max_len=32))
    dpo = sizes(DPOOptions(pretrain=model, bf16=True, max_len=32))
    grpo = sizes(GRPOOptions(pretrain=model, bf16=True, **RL))
    ppo = sizes(PPOOptions(pretrain=model, bf16=True, reward_pretrain=model, **RL))
    assert "reference: weights" not in sft and dpo["reference: weights"] == sft["model: working weights"]
    assert grpo["reference: weights"] == dpo["reference: weights"] and not any("critic" in name for name in grpo)
    assert ppo["critic: fp32 masters"] == 2 * ppo["critic: working weights"]
    assert any(name.startswith("reward model") for name in ppo) and "keys and values of 192 tokens" in ppo


def test_batches_under_way_ahead_have_keys_and_values_too(model):
    def tokens(**changes):
        found = sizes(PPOOptions(pretrain=model, bf16=True, reward_pretrain=model, **RL, **changes))
        (name,) = (name for name in found if name.startswith("keys and values"))
        return int(name.split()[4].replace(",", ""))

    whole = tokens()
    assert tokens(async_train=True, async_queue_size=2) == 3 * whole
    assert tokens(async_train=True, async_queue_size=2, async_staleness=0) == whole
    assert tokens(async_train=True, async_queue_size=200, rollout_slots=1) < whole, "but no more than have a place"


def test_lora_needs_no_reference_and_little_optimiser_state(model):
    whole = sizes(DPOOptions(pretrain=model, bf16=True, max_len=32))
    adapters = sizes(DPOOptions(pretrain=model, bf16=True, max_len=32, lora_rank=1))
    assert "reference: weights" not in adapters
    assert adapters["model: Adam's moments"] < 0.2 * whole["model: Adam's moments"]


def test_an_offloaded_optimiser_and_reference_are_not_on_the_accelerator(model):
    options = DPOOptions(pretrain=model, bf16=True, max_len=32, adam_offload=True, ref_offload=True)
    found = parts(options)
    assert not any("Adam" in part.name or "masters" in part.name for part in found)
    assert [part.phases for part in found if part.name.startswith("reference")] == [("scoring",)]


def test_keys_and_values_are_those_that_the_engine_takes(model):
    options = GRPOOptions(pretrain=model, **{**RL, "n_samples_per_prompt": 2})
    said = next(size for name, size in sizes(options).items() if name.startswith("keys"))
    engine = BuiltinEngine(Policy(tiny_model("llama")))
    with torch.no_grad():
        cache = engine.memory.cache(8, 32, torch.device("cpu"))
    assert said == sum(tensor[:, 1:].nbytes for tensor in cache.tensors)


def test_the_proposal_fills_the_device_and_does_not_overfill_it(model):
    options = SFTOptions(pretrain=model, bf16=True, max_len=64)
    plan = make_plan(options, SMALL, supposed(options), propose=True)
    assert 0.8 * SMALL.memory < plan.memory.peak <= FILL * SMALL.memory and plan.fits
    assert plan.memory.tokens < supposed(options).tokens


def test_the_proposal_is_no_larger_than_a_step_and_no_smaller_than_a_sample(model):
    options = SFTOptions(pretrain=model, bf16=True, max_len=64, train_batch_size=8, micro_train_batch_size=8)
    work = supposed(options)
    assert make_plan(options, NAMED["H200"], work, propose=True).memory.tokens == 8 * 64
    nothing = dataclasses.replace(SMALL, memory=2**16)
    plan = make_plan(options, nothing, work, propose=True)
    assert plan.memory.tokens == 64 and not plan.fits
    assert any("does not fit" in line and "no flag makes it fit" in line for line in lines(plan, "it"))
    small = make_plan(options, dataclasses.replace(SMALL, memory=600 * 2**10), work, propose=False)
    assert any("does not fit" in line and "--gradient_checkpointing" in line for line in lines(small, "it"))


@pytest.mark.parametrize("room", [100, 1000, 5000, 50_000])
def test_the_search_comes_near_the_largest_size_of_a_convex_function(room):
    def at(tokens: int) -> Memory:
        return Memory(tokens, [Part("it", max(50 + tokens, 3 * tokens - 900, 10 * tokens - 20_000))])

    found = largest(at, room, 1, 4000).tokens
    best = max(tokens for tokens in range(1, 4001) if at(tokens).peak <= room)
    assert at(found).peak <= room and found >= 0.9 * best


def test_times_follow_the_arithmetic(model):
    options = SFTOptions(pretrain=model, bf16=True, max_len=64)
    slow, fast = (dataclasses.replace(SMALL, bf16_flops=flops) for flops in (1e9, 2e9))
    times = [make_plan(options, hardware, supposed(options), propose=True).time.whole for hardware in (slow, fast)]
    assert times[0] == pytest.approx(2 * times[1], rel=0.01)
    weights = sum(p.numel() for name, p in tiny_model("llama").named_parameters() if "embed" not in name)
    forward = 2 * weights + 2 * 64 * 32 * 2  # two layers of width 32
    assert times[0] == pytest.approx(3 * forward * 128 * 64 / (PLAIN.arithmetic * 1e9), rel=0.01)


def test_an_unknown_accelerator_gets_no_time(model):
    options = SFTOptions(pretrain=model, bf16=True, max_len=32)
    plan = make_plan(options, Hardware("unheard of", GIB), supposed(options), propose=True)
    assert plan.time is None and not any("assumed" in line for line in lines(plan, "it"))
