"""What the options ask for is where Ray has put it, told by the processes themselves."""

import os

import pytest

from trimtab.config.parser import parse
from trimtab.config.resolved_config import settle
from trimtab.config.rl_jobs import PPOOptions
from trimtab.errors import UserError
from trimtab.interrupts import StopRequest
from trimtab.models.parallel.sharded_model import mesh_of
from trimtab.train.rl.checks import locations_of
from trimtab.train.rl.roles import layout_of_units, make_units_in_processes

OF_EACH = " ".join(f"--{role}_num_gpus_per_node 2" for role in ("actor", "ref", "critic", "reward"))
COMMAND = "--pretrain owner/policy --prompt_data owner/prompts --reward_pretrain owner/judge"


def options_of(words: str, folder) -> PPOOptions:
    places = f"--save_path {folder}/out --ckpt_path {folder}/checkpoints"
    return settle(parse(PPOOptions, f"{COMMAND} {places} --ray {words}".split()))[0]


def nothing(options) -> None:
    """There is nothing to prepare."""


def found_by(options: PPOOptions) -> tuple[dict[str, list[int]], list[dict]]:
    """The ranks of every unit, and what each process says of itself."""
    from trimtab.distributed.ray.launcher import RayLauncher
    from trimtab.distributed.ray.preflight import preflight
    from trimtab.distributed.ray.workers import RayJob

    units = make_units_in_processes(options, 1)
    layout = layout_of_units(options, units)
    placement = preflight(layout, locations_of(options))
    launcher = RayLauncher(
        RayJob(options, make_units_in_processes, mesh_of, (), nothing, os.getcwd()),
        layout,
        placement,
        60,
        StopRequest(),
    )
    try:
        launcher.open()
        return {unit.name: list(unit.ranks) for unit in units if not unit.apart}, launcher.found
    finally:
        launcher.close(kindly=False)


@pytest.mark.parametrize(
    "words, expected",
    [
        (OF_EACH, {"actor": [0, 1], "reference": [2, 3], "critic": [4, 5], "reward": [6, 7]}),
        (
            f"{OF_EACH} --colocate_actor_ref --colocate_critic_reward",
            {"actor": [0, 1], "reference": [0, 1], "critic": [2, 3], "reward": [2, 3]},
        ),
        (f"{OF_EACH} --colocate_all_models", {name: [0, 1] for name in ("actor", "reference", "critic", "reward")}),
    ],
)
def test_every_process_has_a_device_of_its_own_and_models_share_as_they_were_told(cluster, tmp_path, words, expected):
    import ray

    ranks, found = found_by(options_of(words, tmp_path))
    assert ranks == expected
    devices = [one["devices"] for one in found]
    assert len(found) == len({rank for group in expected.values() for rank in group})
    assert all(len(own) == 1 for own in devices) and len({own[0] for own in devices}) == len(found)
    assert len({one["process"] for one in found}) == len(found)
    assert {one["node"] for one in found} == {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def test_more_than_the_cluster_has_is_refused_before_anything_waits(cluster, tmp_path):
    with pytest.raises(UserError) as error:
        found_by(options_of("--actor_num_gpus_per_node 8 --ref_num_gpus_per_node 2", tmp_path))
    assert str(error.value) == (
        "actor and critic and reward (1 x 8); reference (1 x 2) need 10 GPUs, and the cluster has one node, with 8: "
        "lower --actor_num_gpus_per_node, --ref_num_gpus_per_node, or let all models share them with "
        "--colocate_all_models"
    )
    with pytest.raises(UserError, match="need 2 GPUs on each of 2 nodes, and the cluster has one node"):
        found_by(options_of("--actor_num_gpus_per_node 2 --actor_num_nodes 2", tmp_path))


def test_what_another_job_holds_is_said_to_be_taken(cluster, tmp_path, monkeypatch):
    from ray.util.placement_group import placement_group, remove_placement_group

    monkeypatch.setattr("trimtab.distributed.ray.launcher.TO_PLACE", 1.0)
    held = placement_group([{"GPU": 5}])
    assert held.wait(30)
    try:
        with pytest.raises(
            UserError, match=r"need 4 GPUs, and of those of the cluster 3 are free: wait for other jobs"
        ):
            found_by(options_of("--actor_num_gpus_per_node 4", tmp_path))
    finally:
        remove_placement_group(held)


def test_what_the_devices_of_the_cluster_do_not_offer_is_refused_before_anything_is_loaded(tmp_path):
    from trimtab.distributed.device import DEVICE_KINDS, kind_of_resource
    from trimtab.train.rl.ray_run import refuse_on

    options = options_of("--actor_num_gpus_per_node 2 --ds_tensor_parallel_size 2", tmp_path)
    for resource in ("GPU", None):
        refuse_on(kind_of_resource(resource), options)
    with pytest.raises(UserError, match=r"^--ds_tensor_parallel_size 2 is not offered on an Ascend NPU: "):
        refuse_on(kind_of_resource("NPU"), options)
    asking = options_of("--actor_num_gpus_per_node 2 --use_liger_kernel", tmp_path)
    refuse_on(kind_of_resource("GPU"), asking)  # an Intel GPU is known for one when its process has started
    with pytest.raises(UserError, match=r"^--use_liger_kernel is not offered on an Intel GPU: "):
        refuse_on(DEVICE_KINDS["xpu"], asking)
