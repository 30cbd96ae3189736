"""Over several processes the policy is gathered whole to answer: where that cannot fit, nothing is loaded."""

import pytest

from tests.tiny import tiny_model
from trimtab.config.parser import parse
from trimtab.config.resolved_config import settle
from trimtab.config.rl_jobs import GRPOOptions
from trimtab.distributed.device import find_device
from trimtab.distributed.process_group import World
from trimtab.errors import UserError
from trimtab.plan.hardware import NAMED, ClusterHardware, Hardware
from trimtab.plan.planner import Planner
from trimtab.plan.workload import supposed
from trimtab.train import launch as micro_batches
from trimtab.train.launch import with_planned_micro_batches


@pytest.fixture
def options_of(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    count = sum(p.numel() for p in model.parameters())

    def make(words):
        fixed = f"--pretrain {tmp_path} --prompt_data none --reward_func none.py --zero_stage 3 --nproc 2"
        return settle(parse(GRPOOptions, f"{fixed} {words}".split()))[0], count

    return make


def sizes(options, processes, *, accelerator=True):
    hardware = NAMED["H200"] if accelerator else Hardware("CPU", 2**30, accelerator=False)
    planner = Planner(options, ClusterHardware(hardware, 1, processes), supposed(options), propose=False)
    process = planner.bare_process()
    parts = [part for part in (*process.gathered_to_answer(), *process.state) if "rollout" in part.phases]
    return {part.name: part.size for part in parts if part.size}


def test_the_whole_policy_and_a_share_of_everything_else_are_counted(options_of):
    options, count = options_of("--bf16 --init_kl_coef 0.1")
    assert sizes(options, 4) == {
        "actor: weights, gathered to answer": 2 * count,
        "actor: fp32 masters, 1 / 4": count,
        "actor: Adam's moments, 1 / 4": 2 * count,
        "reference: weights": count // 2,
    }
    options, count = options_of("--adam_offload --init_kl_coef 0.1 --ref_reward_offload")
    assert sizes(options, 4) == {"actor: weights, gathered to answer": 4 * count}
    assert len(sizes(options, 4, accelerator=False)) == 4


def test_what_cannot_fit_is_refused_before_loading_and_what_can_is_not(options_of, monkeypatch):
    options, count = options_of("--init_kl_coef 0")
    device = find_device()
    needed = 4 * count + 6 * count
    for spare, processes in ((0, 2), (-2, 2)):
        hardware = Hardware("small", needed + spare, accelerator=False)
        monkeypatch.setattr(micro_batches, "of_device", lambda device, hardware=hardware: hardware)
        if spare < 0:
            with pytest.raises(
                UserError,
                match=r"weights, 0\.0 GiB.* of 0\.0 GiB \(small\); try --ds_tensor_parallel_size 2, --bf16, or",
            ):
                with_planned_micro_batches(options, device, World(0, processes), None)
        else:
            assert with_planned_micro_batches(options, device, World(0, processes), None) == (options, None)


def test_shares_are_of_the_processes_that_a_model_is_in(options_of):
    options, count = options_of("--init_kl_coef 0.1 --ref_num_gpus_per_node 1 --controller_apart")
    found = sizes(options, 3)
    assert found["actor: fp32 masters, 1 / 2"] == 2 * count and found["actor: Adam's moments, 1 / 2"] == 4 * count
    assert found["reference: weights"] == 4 * count


def test_a_reward_model_that_cannot_be_counted_does_not_keep_a_run_from_starting(options_of, tmp_path, monkeypatch):
    from transformers import BertConfig, BertForSequenceClassification

    small = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50)
    BertForSequenceClassification(BertConfig(num_labels=1, **small)).save_pretrained(tmp_path / "encoder")
    options, _ = options_of(f"--init_kl_coef 0 --reward_pretrain {tmp_path}/encoder")
    monkeypatch.setattr(micro_batches, "of_device", lambda device: Hardware("none", 0, accelerator=False))
    assert with_planned_micro_batches(options, find_device(), World(0, 2), None) == (options, None)


def test_one_process_has_nothing_to_gather(options_of, monkeypatch):
    monkeypatch.setattr(micro_batches, "of_device", None)
    options, _ = options_of("")
    assert with_planned_micro_batches(options, find_device(), World(), None) == (options, None)
