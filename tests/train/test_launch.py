"""What is said between the options and the first step."""

from types import SimpleNamespace

import pytest

from trimtab.config.jobs import DPOOptions, SFTOptions
from trimtab.config.parser import parse
from trimtab.config.rl_jobs import PPOOptions
from trimtab.distributed.device import find_device
from trimtab.distributed.process_group import World
from trimtab.errors import UserError
from trimtab.train.launch import check_processes
from trimtab.train.rl.checks import check_shares
from trimtab.train.rl.launch import Controller
from trimtab.train.supervised import without_evaluation

QUANTISED = {"load_in_4bit": True, "bf16": True, "lora_rank": 8}


@pytest.mark.parametrize("job_class", [SFTOptions, PPOOptions])
def test_four_bit_weights_are_refused_in_a_world_of_several_processes(job_class):
    check_processes(job_class(**QUANTISED), 1)
    with pytest.raises(UserError, match="4-bit weights cannot be split"):
        check_processes(job_class(**QUANTISED), 2)


def test_rl_asks_before_anything_is_loaded():
    with pytest.raises(UserError, match="4-bit weights cannot be split"):
        Controller(PPOOptions(**QUANTISED), find_device(), World(0, 2))
    with pytest.raises(UserError, match=r"^--shard_size 2 must divide 3 processes$"):
        Controller(PPOOptions(shard_size=2), find_device(), World(0, 3))


def test_every_model_of_a_run_is_asked_for_its_own_processes():
    """A critic alone in several, on a cluster and without; a reference may be in fewer than the policy."""
    cluster = {"ray": True, "actor_num_gpus_per_node": 1}
    with pytest.raises(UserError, match=r"4-bit weights cannot be split; train in one process \(of the critic\)$"):
        options = PPOOptions(**QUANTISED, **cluster, critic_num_gpus_per_node=2)
        check_shares(options, Controller.units(options, 1))
    options = PPOOptions(shard_size=2, nproc=4, critic_num_gpus_per_node=3, ref_num_gpus_per_node=1)
    with pytest.raises(UserError, match=r"^--shard_size 2 must divide 3 processes \(of the critic\)$"):
        check_shares(options, Controller.units(options, 4))
    options = PPOOptions(shard_size=2, nproc=4, ref_num_gpus_per_node=1, zero_stage=3)
    check_shares(options, Controller.units(options, 4))


@pytest.mark.parametrize("words", ["--eval_steps 5", "--eval_max_samples 5"])
def test_how_to_evaluate_without_evaluation_data_has_no_effect_and_says_so(words):
    options = parse(DPOOptions, words.split())
    (line,) = without_evaluation(options, SimpleNamespace(evaluation_samples=0))
    assert line == f"warning: {words.split()[0]} has no effect without --eval_dataset, or a test split in the data"
    assert without_evaluation(options, SimpleNamespace(evaluation_samples=7)) == []
    assert without_evaluation(DPOOptions(), SimpleNamespace(evaluation_samples=0)) == []
