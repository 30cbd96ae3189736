import pytest

from trimtab.config.checks import settle
from trimtab.config.jobs import PPOOptions
from trimtab.distributed.ray.placement import Engines, Layout, Pool, table
from trimtab.errors import UserError
from trimtab.plan.layouts import layout_of

UNITS = ("actor", "reference", "critic", "reward")


def layout(words: str = "", units=UNITS) -> Layout:
    """What the options, `name=value` each or a bare switch, ask for."""
    given = {}
    for word in words.split():
        name, _, value = word.partition("=")
        given[name] = int(value) if value else True
    return layout_of(settle(PPOOptions(ray=True, **given))[0], units)


def of_each(number: int) -> str:
    return " ".join(f"{role}_num_gpus_per_node={number}" for role in ("actor", "ref", "critic", "reward"))


def test_without_numbers_all_models_share_the_processes_of_the_policy():
    assert layout() == Layout((Pool("actor", UNITS, 1, 1),), None)
    assert layout("nproc=4").pools == (Pool("actor", UNITS, 1, 4),)
    assert layout("actor_num_gpus_per_node=4 actor_num_nodes=2").size == 8


def test_a_model_with_numbers_has_processes_of_its_own():
    found = layout(f"{of_each(2)} actor_num_nodes=2")
    assert [(pool.name, pool.units, pool.size) for pool in found.pools] == [
        ("actor", ("actor",), 4),
        ("reference", ("reference",), 2),
        ("critic", ("critic",), 2),
        ("reward", ("reward",), 2),
    ]
    ranks = {unit: found.ranks_of(unit) for unit in UNITS}
    assert ranks == {"actor": range(4), "reference": range(4, 6), "critic": range(6, 8), "reward": range(8, 10)}
    assert found.size == found.devices == 10


def test_every_rank_is_in_exactly_one_pool():
    for words in (of_each(2), f"{of_each(2)} colocate_actor_ref", f"{of_each(3)} colocate_all_models", ""):
        found = layout(words)
        assert sorted(rank for pool in found.pools for rank in found.ranks_of(pool.name)) == list(range(found.size))


@pytest.mark.parametrize(
    "words, expected",
    [
        ("colocate_actor_ref", {("actor", "reference"), ("critic",), ("reward",)}),
        ("colocate_critic_reward", {("actor",), ("reference",), ("critic", "reward")}),
        ("colocate_actor_ref colocate_critic_reward", {("actor", "reference"), ("critic", "reward")}),
        ("colocate_all_models", {UNITS}),
    ],
)
def test_models_that_are_colocated_share_processes(words, expected):
    found = layout(f"{of_each(2)} {words}")
    assert {pool.units for pool in found.pools} == expected
    assert all(pool.size == 2 for pool in found.pools)


def test_of_two_that_share_the_one_with_numbers_decides():
    found = layout("critic_num_gpus_per_node=2 colocate_critic_reward")
    assert [pool.units for pool in found.pools] == [("actor", "reference"), ("critic", "reward")]
    (first, second) = layout("reward_num_gpus_per_node=2 reward_num_nodes=2 colocate_critic_reward").pools
    assert (second.units, second.nodes, second.per_node) == (("critic", "reward"), 2, 2)
    assert second.flag == "--reward_num" and first.flag == "--actor_num"
    assert len(layout("colocate_critic_reward").pools) == 1


def test_a_model_that_is_not_there_has_no_processes():
    found = layout(of_each(2), units=("actor", "reward"))
    assert [pool.name for pool in found.pools] == ["actor", "reward"]
    # Nor does it contradict anything.
    assert layout("actor_num_gpus_per_node=2 ref_num_gpus_per_node=1 colocate_actor_ref", units=("actor",)).size == 2


def test_the_teacher_is_with_the_reference_and_what_nobody_places_with_the_policy():
    units = ("actor", "reference", "teacher", "proposal")
    found = layout("ref_num_gpus_per_node=2", units)
    assert [pool.units for pool in found.pools] == [("actor", "proposal"), ("reference", "teacher")]
    # With LoRA there is no reference of its own.
    (_, second) = layout("ref_num_gpus_per_node=2", ("actor", "teacher")).pools
    assert second == Pool("teacher", ("teacher",), 1, 2) and second.flag == "--ref_num"


def test_engines_have_devices_of_their_own_unless_all_share():
    apart = layout("actor_num_gpus_per_node=2 vllm_num_engines=2 vllm_tensor_parallel_size=4")
    assert apart.engines == Engines(2, 4, None) and (apart.size, apart.devices) == (2, 10)
    hybrid = layout("colocate_all_models vllm_num_engines=4 vllm_tensor_parallel_size=2")
    assert hybrid.engines == Engines(4, 2, "actor") and (hybrid.size, hybrid.devices) == (8, 8)
    assert layout("vllm_num_engines=0").engines is None


def test_engines_that_say_how_many_gpus_there_are_say_it_for_all_nodes():
    found = layout("colocate_all_models vllm_num_engines=4 vllm_tensor_parallel_size=4 actor_num_nodes=2")
    assert (found.pools[0].nodes, found.pools[0].per_node) == (2, 8)


@pytest.mark.parametrize(
    "words, told",
    [
        (
            "actor_num_gpus_per_node=4 ref_num_gpus_per_node=2 colocate_actor_ref",
            "--colocate_actor_ref lets models share .*--actor_num_gpus_per_node 4 differs .*--ref_num_gpus_per_node 2",
        ),
        (
            "critic_num_gpus_per_node=2 reward_num_gpus_per_node=2 reward_num_nodes=2 colocate_critic_reward",
            "--colocate_critic_reward .*--critic_num_nodes 1 .* differs from --reward_num_nodes 2",
        ),
        (
            "actor_num_gpus_per_node=4 reward_num_gpus_per_node=2 colocate_all_models",
            "--colocate_all_models .* differs from --reward_num_nodes 1 --reward_num_gpus_per_node 2",
        ),
        ("ref_num_nodes=2", "--ref_num_nodes 2 needs --ref_num_gpus_per_node"),
        (
            "colocate_all_models actor_num_gpus_per_node=2 vllm_num_engines=2 vllm_tensor_parallel_size=2",
            "2 engines of --vllm_tensor_parallel_size 2 share the policy's 2 GPUs",
        ),
        # Six GPUs, but an engine is on one node.
        (
            "colocate_all_models actor_num_gpus_per_node=3 actor_num_nodes=2 vllm_num_engines=3 "
            "vllm_tensor_parallel_size=2",
            "3 on a node.*, where 2 have room: lower --vllm_num_engines",
        ),
        # Four processes, but those of a layer are on one node.
        (
            "actor_num_gpus_per_node=2 actor_num_nodes=2 ds_tensor_parallel_size=4",
            "--actor_num_gpus_per_node 2: the 4 processes of --ds_tensor_parallel_size .* on one node",
        ),
        ("actor_num_gpus_per_node=4 nproc=2", "--nproc 2 and --actor_num_gpus_per_node 4 both say"),
    ],
)
def test_a_contradiction_is_one_line_that_names_the_options(words, told):
    with pytest.raises(UserError, match=told):
        layout(words)


def test_the_table_has_a_row_for_every_model_and_the_engines():
    found = layout(f"{of_each(2)} actor_num_nodes=2 ref_num_nodes=2 colocate_actor_ref vllm_num_engines=3")
    assert table(found.rows("GPU")) == [
        "role          nodes  processes  devices",
        "actor             2          4  4 GPUs",
        "reference         2          4  those of actor",
        "critic            1          2  2 GPUs",
        "reward            1          2  2 GPUs",
        "engines                      3  3 x 1 GPU",
    ]
    assert [row["devices"] for row in layout("colocate_all_models vllm_num_engines=1").rows(None)] == [
        *("CPU", "those of actor", "those of actor", "those of actor", "those of actor"),
    ]
