"""Groups that outlive an update in several processes: those of a tensor group go on and stop together."""

import random
import threading
import time

import torch

from tests import warm
from tests.train.rl.scripted_engine import ScriptedEngine, length_of
from tests.train.rl.test_async_worker import DRAWN, Judge, Words, admission
from trimtab.distributed.device import find_device
from trimtab.distributed.process_group import find_world, leave_world
from trimtab.train.rl.async_worker import AsyncRolloutWorker


class Slow(Judge):
    """Takes its time for some."""

    def __call__(self, request):
        if int(request.prompts[0]) % 5 == 0:
            time.sleep(0.05)
        return super().__call__(request)


def write_together():
    """Both processes do the same whatever pauses there are; the first one's clock and rewards decide when they stop."""
    world = find_world(find_device())
    told = threading.Event()
    engine = ScriptedEngine(max_num_seqs=4, seconds=0.001 * (1 + world.rank))
    judges = [(Slow(), 1.0)] if world.is_rank_zero else []  # as it is built: nobody hears the other
    role = AsyncRolloutWorker(engine, judges, Words(), told.is_set, world)
    rng, found, admitted = random.Random(3), {}, 0
    while world.broadcast_first(torch.tensor(len(found))) < 30:
        count = min(rng.randint(0, 4), 30 - admitted)
        role.admit(admission(range(admitted, admitted + count), version=engine.version), sampling=DRAWN)
        admitted += count
        done = role.collect(seconds=rng.choice([0.0, 0.02, 0.5]))
        # Whatever the other's clock says, as many tokens have been drawn here.
        assert len(set(world.gather(engine.steps))) == 1
        found |= {written.place: written for written in done.finished}
        if rng.random() < 0.6:
            role.pause()
            role.weights_changed(version=engine.version + 1)
    if world.is_rank_zero:
        assert sorted(found) == list(range(30)) and engine.version > 2
        for place, answers in found.items():
            assert answers.results[0].rewards == [length_of(place, sample, 30) for sample in range(3)]
    role.admit(admission([99]), sampling=DRAWN)
    engine.seconds = 0.2
    if not world.is_rank_zero:  # which the others do not hear before this call is over
        threading.Timer(0.1, told.set).start()
    assert (role.collect() is None) != world.is_rank_zero
    assert len(set(world.gather(engine.steps))) == 1
    role.pause()
    role.close()
    leave_world()


def test_a_tensor_group_writes_pauses_and_stops_together():
    assert warm.call_world(write_together, 2) == [0, 0]
