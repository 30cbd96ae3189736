import pytest

from trimtab.config.resolved_config import settle
from trimtab.config.rl_jobs import PPOOptions
from trimtab.distributed.ray.placement import CPU_SHARE, ClusterNode, Engines, Layout, Pool, missing, place, table
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


def nodes(*gpus: int, resource: str = "GPU", cpus: float = 16) -> list[ClusterNode]:
    """Named by their places, and given in an order that means nothing."""
    made = [
        ClusterNode(f"n{at}", f"10.0.0.{at + 1}", {"CPU": cpus, **({resource: float(number)} if number else {})})
        for at, number in enumerate(gpus)
    ]
    return [*made[1::2], *made[::2]]


def pools(*sizes: tuple[int, int]) -> tuple[Pool, ...]:
    names = ("actor", "reference", "critic", "reward")
    return tuple(Pool(name, (name,), count, per_node) for name, (count, per_node) in zip(names, sizes))


def where(placement) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for seat in placement.workers:
        found.setdefault(seat.pool, []).append(seat.node.id)
    return found


def taken(placement, resource="GPU") -> dict[str, float]:
    found: dict[str, float] = {}
    for bundle, node in zip(placement.bundles, placement.bundle_nodes):
        found[node.id] = found.get(node.id, 0) + bundle.get(resource, 0)
    return found


def test_ranks_of_a_node_are_neighbours_and_nodes_go_by_address():
    many = nodes(*[2] * 11)
    placement = place(Layout(pools((11, 2)), None), many)
    assert [seat.rank for seat in placement.workers] == list(range(22))
    # 10.0.0.10 comes after 10.0.0.2.
    assert [seat.node.id for seat in placement.workers] == [f"n{at}" for at in range(11) for _ in range(2)]
    assert [seat.bundle for seat in placement.workers] == list(range(22))
    assert [node.id for node in placement.bundle_nodes] == [seat.node.id for seat in placement.workers]


def test_a_process_has_a_device_and_a_little_of_a_processor():
    placement = place(Layout(pools((1, 2)), None), nodes(2))
    assert placement.resource == "GPU" and placement.share == 1.0 and placement.engines == []
    assert placement.bundles == [{"CPU": CPU_SHARE, "GPU": 1.0}] * 2
    assert place(Layout(pools((1, 2)), None), nodes(2, resource="NPU")).bundles[0] == {"CPU": CPU_SHARE, "NPU": 1.0}


def test_without_accelerators_processes_are_counted():
    placement = place(layout(of_each(4)), nodes(0, cpus=2))
    assert placement.resource is None and placement.bundles == [{"CPU": CPU_SHARE}] * 16
    hybrid = place(layout("colocate_all_models vllm_num_engines=2"), nodes(0, cpus=2))
    assert hybrid.bundles == [{"CPU": 2 * CPU_SHARE}] * 2 and hybrid.engines == [[0], [1]]


def test_a_pool_over_two_nodes_is_on_different_ones():
    assert where(place(Layout(pools((2, 2)), None), nodes(8, 8))) == {"actor": ["n0", "n0", "n1", "n1"]}
    with pytest.raises(UserError, match="actor needs 2 GPUs on each of 2 nodes, and the cluster has one node"):
        place(Layout(pools((2, 2)), None), nodes(8))


def test_engines_apart_have_one_bundle_with_all_their_devices():
    placement = place(Layout(pools((1, 4)), Engines(3, 4, None)), nodes(8, 8))
    assert placement.engines == [[4], [5], [6]] and placement.bundles[4] == {"CPU": CPU_SHARE, "GPU": 4.0}
    assert taken(placement) == {"n0": 8, "n1": 8} and placement.share == 1.0


def test_engines_that_share_take_neighbouring_devices_of_one_node():
    placement = place(Layout(pools((2, 3)), Engines(2, 2, "actor")), nodes(3, 3))
    assert placement.engines == [[0, 1], [3, 4]] and placement.share == 0.5
    assert placement.bundles == [{"CPU": 2 * CPU_SHARE, "GPU": 1.0}] * 6
    fewer = place(Layout(pools((2, 4)), Engines(3, 2, "actor")), nodes(4, 4))
    assert fewer.engines == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    "sizes, engines, gpus",
    [
        # In the order of the pools, or on the first node with room, each of these would fail.
        ([(1, 4), (1, 8)], None, (8, 4)),
        ([(1, 4), (2, 4)], None, (8, 4)),
        ([(1, 2), (1, 2)], Engines(2, 4, None), (4, 8)),
        ([(1, 4), (1, 3), (1, 3), (1, 2)], None, (6, 6)),
        ([(1, 1), (1, 1), (1, 1)], Engines(1, 8, None), (3, 8)),
        ([(2, 8), (1, 4), (1, 4)], Engines(4, 2, None), (8, 8, 8, 8)),
        ([(1, 1), (4, 1)], Engines(1, 2, None), (1, 3, 1, 2)),
    ],
)
def test_what_fits_is_placed(sizes, engines, gpus):
    placement = place(Layout(pools(*sizes), engines), nodes(*gpus))
    for number, (node, used) in zip(gpus, sorted(taken(placement).items())):
        assert used <= number, node
    for pool, (count, per_node) in zip(pools(*sizes), sizes):
        here = where(placement)[pool.name]
        assert len(set(here)) == count and all(here.count(one) == per_node for one in here)


def test_a_node_without_processors_holds_nothing():
    head = ClusterNode("head", "10.0.0.0", {"GPU": 8.0, "CPU": 0.0})
    assert set(taken(place(Layout(pools((1, 2)), None), [head, *nodes(2)]))) == {"n0"}


@pytest.mark.parametrize(
    "wanted, gpus, told",
    [
        (
            Layout(pools((2, 8), (1, 8)), None),
            (8, 4),
            "actor needs 8 GPUs on each of 2 nodes, and the cluster has nodes with 8, 4: lower "
            "--actor_num_gpus_per_node or --actor_num_nodes, or let all models share them with --colocate_all_models",
        ),
        (
            Layout(pools((1, 8)), None),
            (4,),
            "actor needs 8 GPUs on one node, and the cluster has one node, with 4: lower --actor_num_gpus_per_node",
        ),
        (
            Layout(pools((1, 4), (1, 4)), Engines(2, 2, None)),
            (8,),
            "actor (1 x 4); reference (1 x 4); engines (2 x 2) need 12 GPUs, and the cluster has one node, with 8: "
            "lower --actor_num_gpus_per_node, --ref_num_gpus_per_node, --vllm_num_engines, or let all models share "
            "them with --colocate_all_models",
        ),
        (
            Layout(pools((1, 3), (1, 3)), Engines(1, 2, None)),
            (4, 4),
            "actor (1 x 3); reference (1 x 3); engines (1 x 2) need 8 GPUs that fit together, and the cluster has "
            "nodes with 4, 4: lower --actor_num_gpus_per_node, --ref_num_gpus_per_node, --vllm_num_engines, or let all "
            "models share them with --colocate_all_models",
        ),
        (
            Layout(pools((1, 1)), Engines(1, 4, None)),
            (2, 2),
            "an engine of --vllm_tensor_parallel_size 4 needs 4 GPUs on one node, and the cluster has nodes with 2, 2: "
            "lower --vllm_tensor_parallel_size",
        ),
        (Layout(pools((1, 1)), None), (), "actor needs one process on one node, and the cluster has no node"),
    ],
)
def test_what_is_missing_is_said_with_the_option_to_change(wanted, gpus, told):
    with pytest.raises(UserError) as error:
        place(wanted, nodes(*gpus))
    assert str(error.value).startswith(told) and "\n" not in str(error.value)


def test_processes_that_a_cpu_cluster_has_no_room_for_are_said():
    with pytest.raises(UserError, match="needs 30 processes on one node, and the cluster has one node, with room"):
        place(Layout(pools((1, 30)), None), nodes(0, cpus=2))


def test_what_other_jobs_hold_is_said_to_be_taken():
    wanted = Layout(pools((1, 8)), None)
    told = missing(wanted, nodes(8, 8), available={"GPU": 4.0})
    assert told == (
        "actor (1 x 8) need 8 GPUs, and of those of the cluster 4 are free: wait for other jobs, or ask for fewer"
    )
    assert "not where they are needed" in missing(wanted, nodes(8, 8), available={"GPU": 12.0})
