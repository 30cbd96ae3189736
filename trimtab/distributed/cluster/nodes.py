"""The nodes of the cluster that this process has joined."""

import ray

from trimtab.distributed.cluster.seats import Node


def living_nodes() -> list[Node]:
    return [
        Node(found["NodeID"], found["NodeManagerAddress"], dict(found["Resources"]))
        for found in ray.nodes()
        if found["Alive"]
    ]
