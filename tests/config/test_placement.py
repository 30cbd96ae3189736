"""What is said of processes, devices and machines that are asked for and not used, or that cannot be had together."""

import pytest

from tests.config.every_job import RL, SFT, lines_of, refusal


def test_sixteen_gpus_asked_for_and_four_used_is_said():
    words = " ".join(f"--{role}_num_gpus_per_node 4" for role in ("actor", "ref", "critic", "reward"))
    (line,) = lines_of("ppo", f"{RL} {words}")
    assert line.startswith("all models share 4 processes, on as many of the 16 GPUs that are asked for: --actor_num")
    assert lines_of("ppo", f"{RL} {words} --colocate_all_models") == []
    assert lines_of("ppo", f"{RL} --nproc 4 --ref_num_gpus_per_node 2 --reward_num_gpus_per_node 1") == []
    (line,) = lines_of("ppo", f"{RL} --nproc 2 --actor_num_gpus_per_node 1 --critic_num_gpus_per_node 1")
    assert line == "all models share 2 processes: --actor_num_gpus_per_node set aside"


def test_with_ray_the_placement_is_followed_and_nothing_is_said():
    words = " ".join(f"--{role}_num_gpus_per_node 4 --{role}_num_nodes 2" for role in ("actor", "ref", "reward"))
    for more in ("", "--colocate_all_models", "--colocate_actor_ref False"):
        assert lines_of("ppo", f"{RL} --ray {words} {more}") == []
    (line,) = lines_of("ppo", f"{RL} --colocate_actor_ref False")
    assert line == "--colocate_actor_ref False has no effect without --ray: all models share the processes"
    (line,) = lines_of("ppo", f"{RL} --ray --controller_apart")
    assert line.startswith("--controller_apart has no effect with --ray")


@pytest.mark.parametrize(
    "role, words, why",
    [
        ("critic", "--advantage_estimator reinforce", "--advantage_estimator reinforce has no critic"),
        ("ref", "--init_kl_coef 0", "--init_kl_coef is 0"),
        ("ref", "--lora_rank 4", "with --lora_rank the reference is the policy"),
    ],
)
def test_devices_of_a_model_that_is_not_there_are_said_to_be_unused(role, words, why):
    told = f"--{role}_num_gpus_per_node has no effect with --ray: {why}"
    assert lines_of("ppo", f"{RL} --ray --{role}_num_gpus_per_node 2 {words}") == [told]
    teaching = lines_of("ppo", f"{RL} --ray --ref_num_gpus_per_node 2 --lora_rank 4 --teacher_model e/f")
    assert not [line for line in teaching if "num_gpus" in line]


def test_with_ray_a_step_per_device_is_counted_over_all_machines_of_the_policy():
    words = "--per_device_train_batch_size 4 --ray --actor_num_gpus_per_node 4 --actor_num_nodes 2"
    (line,) = lines_of("ppo", f"{RL} {words}")
    assert line == "a step is 32 samples: 4 in a pass x 1 passes x 8 processes"


@pytest.mark.parametrize("verb, words", [("sft", SFT), ("dpo", SFT), ("ppo", RL)])
def test_four_bit_weights_are_refused_over_several_processes(verb, words):
    quantised = f"{words} --load_in_4bit --bf16 --lora_rank 8"
    assert lines_of(verb, quantised) == []
    several = ["--nproc 2"] + ["--actor_num_gpus_per_node 2", "--actor_num_nodes 2 --ray"] * (verb == "ppo")
    for processes in several:
        assert "4-bit weights cannot be split" in refusal(lines_of, verb, f"{quantised} {processes}")
