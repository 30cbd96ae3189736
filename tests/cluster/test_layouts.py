"""Layouts on a real Ray: what is learnt is what one process learns, and Ray has put things where the flags say."""

from functools import partial

import pytest

from tests import warm
from tests.cluster.ray_run import LAYOUTS, keep_gradients_of_processes
from tests.train.rl.test_groups import assert_same_gradients, keep_gradients, words


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """A recording by one process, and its gradients."""
    place = tmp_path_factory.mktemp("alone")
    command = words(folder, place / "out", f"--record {place}/recorded")
    assert warm.run(command, prepare=partial(keep_gradients, place / "kept")) == 0
    return place


@pytest.mark.short(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_recorded_rollouts_are_those_of_one_process(cluster, folder, alone, tmp_path, layout):
    kept = tmp_path / "kept"
    kept.mkdir()
    command = words(folder, tmp_path / "out", f"--replay {alone}/recorded --ray {LAYOUTS[layout]}")
    cluster.workers.prepare(partial(keep_gradients_of_processes, kept))
    try:
        warm.output(command, environment=cluster.environment)
    finally:
        cluster.workers.prepare(None)
    for role in ("actor", "critic"):
        processes = list(kept.glob(f"*-{role}.safetensors"))
        assert len(processes) == (2 if "--actor_num_gpus_per_node 2" in LAYOUTS[layout] else 1)
        for found in processes:
            assert_same_gradients(found, alone / f"kept-{role}.safetensors")
