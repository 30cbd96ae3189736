"""Which layout is proposed, and which flags make fit what does not."""

import dataclasses

import pytest

from trimtab.config.jobs import SFTOptions
from trimtab.config.parser import parse
from trimtab.config.resolved_config import settle
from trimtab.plan.hardware import GIB, NAMED, ClusterHardware, Hardware
from trimtab.plan.layouts import Split
from trimtab.plan.planner import Plan, Planner, best, fitting_changes, make_plan, plan_layouts
from trimtab.plan.printer import lines, split_flags
from trimtab.plan.workload import supposed, write_sized_model

MIB = 2**20
DEVICE = Hardware("small", 64 * MIB, 1e12, 1e12, 1e11, link=1e10)


def sft(pretrain, words=""):
    return settle(
        parse(SFTOptions, f"--pretrain {pretrain} --bf16 --max_len 64 --train_batch_size 16 {words}".split())
    )[0]


@pytest.fixture(scope="module")
def planner(model):
    options = sft(model)
    return Planner(options, machines(), supposed(options), propose=True)


def machines(memory=64 * MIB):
    return ClusterHardware(dataclasses.replace(DEVICE, memory=memory), 2, 2, 4e9)


def test_the_fastest_layout_that_fits_is_proposed_and_its_flags_ask_for_it(planner, model):
    tight = planner.changed(machines(MIB // 2))
    for found in (planner, tight):
        proposed = best(found.splits)
        assert proposed.fits and all(proposed.whole <= other.whole for other in found.splits if other.fits)
        again = sft(model, " ".join(split_flags(proposed)))
        assert Split.of(again, 4) == proposed.split
        assert {name: getattr(again, name) for name in proposed.changes} == proposed.changes
    assert best(tight.splits).whole > best(planner.splits).whole


def test_options_that_were_given_stay(model):
    made = plan_layouts(sft(model, "--zero_stage 3 --ds_tensor_parallel_size 1 --gradient_checkpointing"), machines())
    assert made.asked is not None and made.asked.split.zero_stage == 3
    assert all(found.options.gradient_checkpointing for found in made.candidates)


def test_where_nothing_fits_it_says_so_and_what_would(planner):
    small = planner.changed(machines(MIB // 4))
    told = lines(Plan(small, best(small.splits), None, best(small.splits), small.splits), "it")
    assert any(line.startswith("nothing fits: the least is") for line in told)
    assert any("--lora_rank 16" in line for line in told)


def test_flags_that_fit_are_tried_in_the_order_of_their_cost():
    bytes_of = {"bf16": 3, "zero_stage": 5, "gradient_checkpointing": 6, "adam_offload": 4}
    options = SFTOptions()

    def peak(change):
        tried = dataclasses.replace(options, **change)
        changed = [name for name in bytes_of if getattr(tried, name) != getattr(options, name)]
        return 20 - sum(bytes_of[name] for name in changed)

    ways = [{"bf16": True}, {"zero_stage": 3}, {"gradient_checkpointing": True}, {"adam_offload": True}]
    assert fitting_changes(ways, peak, 15) == [{"zero_stage": 3}, {"gradient_checkpointing": True}]
    assert fitting_changes(ways, peak, 9) == [{"zero_stage": 3, "gradient_checkpointing": True}]
    assert fitting_changes(ways, peak, 1) == []


def test_a_job_that_does_not_fit_names_the_flag_that_makes_it_fit(model):
    options = sft(model, "--nproc 2 --micro_train_batch_size 8 --zero_stage 2")
    work = supposed(options)
    small = dataclasses.replace(DEVICE, memory=2 * MIB)
    told = make_plan(options, small, work, 2, propose=False).flags_that_fit()
    assert told.startswith("try --") and "--gradient_checkpointing" in told


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "nodes", "device", "memory"),
    [
        ("7B", 1, "RTX-4090", 24),
        ("34B", 2, "A100-40G", 40),
        ("34B", 1, "H200", 141),
        ("70B", 4, "H100", 80),
        ("70B", 16, "RTX-4090", 24),
        ("405B", 16, "H100", 80),
        ("405B", 16, "MI300X", 192),
        ("8x7B", 4, "A100-40G", 40),
        ("8x22B", 8, "H100", 80),
    ],
)
def test_large_models_get_a_layout_that_fits(size, nodes, device, memory, tmp_path):
    options = settle(
        parse(SFTOptions, f"--pretrain {write_sized_model(size, tmp_path)} --bf16 --max_len 4096".split())
    )[0]
    made = plan_layouts(options, ClusterHardware(NAMED[device], nodes, 8, 100e9))
    assert made.proposed.fits and made.proposed.peak < 0.86 * memory * GIB
    assert made.proposed.peak > 0.1 * memory * GIB
