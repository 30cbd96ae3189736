import pytest

from tests.distributed.cluster.test_layout import layout, of_each
from trimtab.distributed.ray.placement import CPU_SHARE, Engines, Layout, Node, Pool, missing, place
from trimtab.errors import UserError


def nodes(*gpus: int, resource: str = "GPU", cpus: float = 16) -> list[Node]:
    """Named by their places, and given in an order that means nothing."""
    made = [
        Node(f"n{at}", f"10.0.0.{at + 1}", {"CPU": cpus, **({resource: float(number)} if number else {})})
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
    head = Node("head", "10.0.0.0", {"GPU": 8.0, "CPU": 0.0})
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
