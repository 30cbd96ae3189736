"""The nodes of the cluster that this process has joined."""

from trimtab.distributed.cluster.seats import Node


def living_nodes() -> list[Node]:
    import ray

    return [
        Node(found["NodeID"], found["NodeManagerAddress"], dict(found["Resources"]))
        for found in ray.nodes()
        if found["Alive"]
    ]
