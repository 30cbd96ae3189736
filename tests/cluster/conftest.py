"""One Ray for all short tests, on loopback, with devices that it only believes in."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from tests.cluster.machines import Machines, refusal
from tests.cluster.warm_workers import WarmWorkers
from tests.train.conftest import folder  # noqa: F401

# Ray reads these when it is imported, which other tests may do first. Without the first a local Ray listens to the
# whole network.
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
os.environ |= {LOOPBACK_ONLY: "0", "RAY_AUTH_MODE": "token"}

DEVICES = 8


@dataclass(frozen=True)
class Cluster:
    environment: dict[str, str]
    """Of commands that shall join it."""
    workers: WarmWorkers


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    place = Path(tempfile.mkdtemp(prefix="tt"))  # short, because the paths of sockets have a limit
    token = place / "token"
    token.write_text(os.urandom(32).hex())
    token.chmod(0o600)
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        LOOPBACK_ONLY: "0",
    }
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        patched.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        import ray

        warm_workers = WarmWorkers(place)
        with mock.patch.object(sys, "executable", str(warm_workers.interpreter)):
            context = ray.init(
                num_cpus=DEVICES,
                num_gpus=DEVICES,
                include_dashboard=False,
                object_store_memory=80 * 2**20,
                log_to_driver=False,
                _temp_dir=str(place),
            )
        yield Cluster(environment | {"RAY_ADDRESS": context.address_info["gcs_address"]}, warm_workers)
        ray.shutdown()
        warm_workers.close()
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """A head and three more, with their networks but without Ray nodes yet."""
    reason = refusal()
    if reason:
        pytest.skip(reason)
    made = Machines(4)
    try:
        yield made
    finally:
        made.close()
