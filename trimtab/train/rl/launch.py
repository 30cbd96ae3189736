"""From checked options to an RL run: a stage for the roles, a controller, and its loop."""

import contextlib
from collections.abc import Iterator

from trimtab.config.jobs import RLOptions
from trimtab.distributed.device import find_device
from trimtab.distributed.staging import Host, Stage, WorldStage, stage_of
from trimtab.distributed.stopping import heard_by_all, was_told
from trimtab.distributed.world import find_world, leave_world
from trimtab.errors import Interrupted, RunFailed, UserError
from trimtab.interrupts import StopRequest
from trimtab.models.sharded import mesh_of
from trimtab.rewards.requests import Questions
from trimtab.rewards.types import BadSample, RewardFailed, RewardRequest, RewardResult
from trimtab.rewards.waiting import GivenUp
from trimtab.rollout.types import Sampling
from trimtab.train.pass_limit import BeginAnew, NoRoom
from trimtab.train.rl.batches import AnswerSlice, TextSlice
from trimtab.train.rl.controller import Controller
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.loop import RLRun
from trimtab.train.rl.rollouts import Answers

# What goes to the roles and comes back; nothing else may.
RECORDS = (
    *(AnswerSlice, TextSlice, Sampling, Questions, Answers, Experience),
    *(RewardRequest, RewardResult, RewardFailed, BadSample, NoRoom),
)


def train_rl(options: RLOptions, kind: type[Controller] = Controller) -> None:
    device = find_device()
    try:
        world = find_world(device)
        with StopRequest() as stop, heard_by_all(stop, world):
            stage = stage_of(Host(options, kind.units(options, world.size), mesh_of, device, world, stop), RECORDS)
            if isinstance(stage, WorldStage) and not world.leads:
                return stage.serve()
            with closing(stage):
                try:
                    controller = kind(options, device, world)
                    run = controller.run(stage.groups(controller.options))
                except (GivenUp, RuntimeError) as error:  # the latter: another process has left a collective
                    if isinstance(error, RuntimeError) and not was_told(stop, world):
                        raise
                    raise Interrupted(stop.number, "stopped before the first step; nothing is lost") from None
                train(run, stage, stop)
    finally:
        leave_world()


def train(run: RLRun, stage: Stage, stop: StopRequest) -> None:
    """The loop; with the roles built anew where memory was short in one of several processes."""
    again = False
    while True:
        try:
            return run.train(stop, taken_over=again)
        except BeginAnew:
            again = True
        run.speak_to(stage.groups_anew())


@contextlib.contextmanager
def closing(stage: Stage) -> Iterator[None]:
    """End the roles with the run. After a failure that nobody foresaw other processes are not spoken to again."""
    try:
        yield
        stage.hang_up()
    except (Interrupted, RunFailed, UserError):
        with contextlib.suppress(RuntimeError):  # the others may be gone already
            stage.hang_up()
        raise
    finally:
        stage.close()
