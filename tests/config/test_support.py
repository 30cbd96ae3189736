import pytest

from trimtab.config import resolved_config
from trimtab.config.jobs import GenerateOptions, SFTOptions
from trimtab.config.resolved_config import device_problems, hardware_problems, refuse_unimplemented
from trimtab.config.rl_jobs import PPOOptions
from trimtab.errors import UserError


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    monkeypatch.setattr(resolved_config, "find_spec", lambda module: None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def problems(options, here=0):
    return hardware_problems(options, lambda: here)


@pytest.mark.parametrize("name", ["use_ds_universal_ckpt", "use_ms"])
def test_what_is_not_implemented_is_refused_by_name(name):
    with pytest.raises(UserError, match=f"^--{name} "):
        refuse_unimplemented(SFTOptions(**{name: True}))


def test_what_one_process_can_do_is_accepted_and_flash_attn_never_needs_a_package():
    given = {"zero_stage": 3, "overlap_comm": True, "local_rank": 0, "adam_offload": True, "grad_accum_dtype": "bf16"}
    options = SFTOptions(**given, disable_ds_ckpt=True, flash_attn=True)
    refuse_unimplemented(options)
    assert problems(options) == []


@pytest.mark.parametrize(
    "changes, package",
    [
        ({"use_wandb": "True"}, "wandb"),
        ({"use_visualdl": "board"}, "visualdl"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"use_liger_kernel": True}, "liger_kernel"),
        ({"attn_implementation": "flash_attention_2"}, "flash_attn"),
    ],
)
def test_a_missing_package_is_a_problem_only_where_it_is_missing(changes, package, monkeypatch):
    (problem,) = problems(SFTOptions(**changes))
    assert f"needs the package {package}" in problem
    monkeypatch.setattr(resolved_config, "find_spec", lambda module: object() if module == package else None)
    assert problems(SFTOptions(**changes)) == []


EIGHT = {f"{role}_num_gpus_per_node": 8 for role in ("actor", "ref", "critic", "reward")}


@pytest.mark.parametrize(
    "changes, gpus",
    [
        ({"actor_num_gpus_per_node": 4}, 4),
        ({"actor_num_gpus_per_node": 2, "ref_num_gpus_per_node": 2}, 4),
        ({"actor_num_gpus_per_node": 2, "ref_num_gpus_per_node": 2, "colocate_actor_ref": True}, 2),
        ({"critic_num_gpus_per_node": 2, "reward_num_gpus_per_node": 2, "colocate_critic_reward": True}, 2),
        ({"actor_num_gpus_per_node": 1, "vllm_num_engines": 1}, 2),
        ({"actor_num_gpus_per_node": 2, "vllm_num_engines": 2, "vllm_tensor_parallel_size": 2}, 6),
        ({**EIGHT, "vllm_num_engines": 4, "vllm_tensor_parallel_size": 2}, 40),
        ({**EIGHT, "vllm_num_engines": 4, "vllm_tensor_parallel_size": 2, "colocate_all_models": True}, 8),
    ],
)
def test_gpus_are_added_up_and_more_than_are_here_is_a_problem(changes, gpus):
    options = PPOOptions(**changes)
    (problem,) = problems(options, here=gpus - 1)
    assert f"ask for {gpus} GPUs, and this machine has {gpus - 1}: " in problem
    assert ("--colocate_all_models" in problem) is not options.colocate_all_models
    assert problems(options, here=gpus) == []


def test_what_asks_for_one_device_runs_without_an_accelerator():
    def never():
        raise AssertionError("counting accelerators imports torch")

    for changes in ({}, {"actor_num_gpus_per_node": 1, "vllm_num_engines": 1, "colocate_all_models": True}):
        assert hardware_problems(PPOOptions(**changes), never) == []


def test_several_machines_are_a_problem_of_their_own():
    (problem,) = problems(PPOOptions(actor_num_nodes=2), here=8)
    assert problem.startswith("--actor_num_nodes 2 asks for several machines")


def test_with_ray_the_cluster_is_asked_and_not_this_machine(monkeypatch):
    options = PPOOptions(ray=True, actor_num_nodes=4, **EIGHT)
    (problem,) = problems(options)
    assert problem == (
        "--ray needs the package ray: pip install 'trimtab[ray]', or stay on this machine with --ray False"
    )
    monkeypatch.setattr(resolved_config, "find_spec", lambda module: object())
    assert problems(options) == []


def test_an_engine_larger_than_this_machine_is_a_problem():
    (problem,) = problems(GenerateOptions(tp_size=4), here=2)
    assert problem == "--tp_size 4 asks for more GPUs than the 2 of this machine: leave it out"
    assert problems(GenerateOptions(tp_size=2), here=2) == problems(GenerateOptions(tp_size=1)) == []


NEEDS_MORE = {
    "ring attention": (SFTOptions, {"ring_attn_size": 2, "nproc": 2}, "--ring_attn_size 2"),
    "tensor parallel": (SFTOptions, {"ds_tensor_parallel_size": 2, "nproc": 2}, "--ds_tensor_parallel_size 2"),
    "four bit": (SFTOptions, {"load_in_4bit": True}, "--load_in_4bit"),
    "liger": (SFTOptions, {"use_liger_kernel": True}, "--use_liger_kernel"),
    "sleeping engines": (
        PPOOptions,
        {"ray": True, "rollout_engine": "vllm", "vllm_num_engines": 1, "vllm_enable_sleep": True},
        "--vllm_enable_sleep with --rollout_engine vllm",
    ),
}


@pytest.mark.parametrize("feature", NEEDS_MORE)
def test_what_a_device_does_not_offer_is_refused_there_alone_with_something_to_do_instead(feature):
    kind, changes, flag = NEEDS_MORE[feature]
    found = device_problems(kind(**changes), lambda asked: "such a device" if asked == feature else None)
    assert len(found) == 1 and found[0].startswith(f"{flag} is not offered on such a device: ")
    assert len(found[0].partition("such a device: ")[2]) > 5
    assert device_problems(kind(**changes), lambda asked: None) == []
    assert device_problems(kind(), lambda asked: "such a device") == []


def test_a_package_is_not_asked_for_where_it_would_not_help():
    everything = lambda feature: "such a device"  # noqa: E731
    (problem,) = hardware_problems(SFTOptions(load_in_4bit=True), lambda: 1, everything)
    assert "is not offered on such a device" in problem
    # A device without the package has an operator of its own.
    assert hardware_problems(SFTOptions(attn_implementation="flash_attention_2"), lambda: 1, everything) == []


def test_the_devices_of_a_cluster_are_not_those_of_this_machine(monkeypatch):
    monkeypatch.setattr(resolved_config, "find_spec", lambda module: object())
    kind, changes, _ = NEEDS_MORE["sleeping engines"]
    assert hardware_problems(kind(**changes), lambda: 0, lambda feature: "such a device") == []
