"""A stand-in for a run: an actor on every node, each waiting. `python -m tests.cluster.plain_job NODES [FILE]`.

It says which nodes have an actor, whether each can read FILE, and then what happens first.
"""

import sys
import time
from pathlib import Path

import ray


@ray.remote(num_cpus=1)
class Waiting:
    def where(self, path: str | None) -> tuple[str, bool]:
        return ray.util.get_node_ip_address(), path is not None and Path(path).exists()

    def wait(self) -> None:
        time.sleep(600)


def main() -> None:
    size, path = int(sys.argv[1]), (sys.argv[2:] or [None])[0]
    ray.init(log_to_driver=False)
    actors = [Waiting.options(scheduling_strategy="SPREAD").remote() for _ in range(size)]
    places = ray.get([actor.where.remote(path) for actor in actors], timeout=60)
    waits = {actor.wait.remote(): place for actor, (place, _) in zip(actors, places)}
    print("all wait", *(f"{place}:{found}" for place, found in sorted(places)), flush=True)
    (first,), _ = ray.wait([*waits], num_returns=1)
    try:
        ray.get(first)
    except ray.exceptions.RayError as error:
        print("lost", waits[first], type(error).__name__, flush=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
