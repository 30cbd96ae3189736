"""From checked options to an RL run: a stage for the roles, a controller, and its loop."""

import contextlib
from collections.abc import Iterator

from trimtab.config.jobs import RLOptions
from trimtab.distributed.device import find_device
from trimtab.distributed.launcher import Launcher, RoleHost
from trimtab.distributed.local_launcher import LocalProcessLauncher, launcher_of
from trimtab.distributed.process_group import World, find_world, leave_world, share_signals, stop_was_requested
from trimtab.errors import Interrupted, RunFailed, UserError
from trimtab.interrupts import StopRequest
from trimtab.models.parallel.sharded_model import mesh_of
from trimtab.plan.micro_batches import with_default_tokens
from trimtab.rewards.requests import PromptBatch
from trimtab.rewards.types import BadSample, RewardFailed, RewardRequest, RewardResult
from trimtab.rollout.episode import Episode, Segment
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory
from trimtab.sandbox.process import RunStopped
from trimtab.train.launch import saved_passes
from trimtab.train.pass_limit import BeginAnew, NoRoom
from trimtab.train.rl.answers import Admission, Answers, Collected, Failed, LeftOut, Replied, UnderWay, Wait, Written
from trimtab.train.rl.batches import AnswerSlice, TextSlice
from trimtab.train.rl.controller import Controller
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.loop import RLRun
from trimtab.train.rl.playing import as_played
from trimtab.train.rl.recording import as_recorded

# What goes to the roles and comes back; nothing else may.
RECORDS = (
    *(AnswerSlice, TextSlice, SamplingParams, PromptBatch, Replied, Answers, Failed, Experience),
    *(Trajectory, Episode, Segment, UnderWay, Admission, Written, LeftOut, Collected, Wait),
    *(RewardRequest, RewardResult, RewardFailed, BadSample, NoRoom),
)


def train_rl(options: RLOptions, kind: type[Controller] = Controller) -> None:
    options = as_played(as_recorded(options))
    if options.ray:
        from trimtab.train.rl.on_cluster import train_on_cluster  # Ray is imported only where it is asked for

        return train_on_cluster(options, kind)
    device = find_device()
    try:
        world = find_world(device)
        # In every process: each builds its roles by the same options.
        options = with_default_tokens(options, device, saved_passes(options, world))
        with StopRequest() as stop, share_signals(stop, world):
            launcher = launcher_of(
                RoleHost(options, kind.units(options, world.size), mesh_of, device, world, stop), RECORDS
            )
            try:
                if isinstance(launcher, LocalProcessLauncher) and not world.leads:
                    with interruptible(stop, world, "stopped with the first process"):
                        return launcher.serve()
                train(set_up(options, kind, launcher), launcher, stop)
            finally:
                launcher.close()
    finally:
        leave_world()


def set_up(options: RLOptions, kind: type[Controller], launcher: Launcher) -> RLRun:
    """Everything up to the first step."""
    with interruptible(launcher.stop, launcher.world, "stopped before the first step; nothing is lost"):
        with told(launcher):
            controller = kind(options, launcher.device, launcher.world)
        # From here on another process may be in the middle of something, and is not spoken to when this one gives up.
        return controller.run(launcher.groups(controller.options), launcher.described())


def train(run: RLRun, launcher: Launcher, stop: StopRequest) -> None:
    """The loop; with the roles built anew where memory was short in one of several processes."""
    again = False
    while True:
        try:
            with told(launcher):
                run.train(stop, taken_over=again)
            return launcher.hang_up()
        except BeginAnew:
            again = True
        with interruptible(stop, launcher.world, "stopped; --load_checkpoint goes on from the last checkpoint"):
            run.speak_to(launcher.rebuild_groups())


@contextlib.contextmanager
def told(launcher: Launcher) -> Iterator[None]:
    """When a run ends early on purpose, the other processes are told."""
    try:
        yield
    except (Interrupted, RunFailed, UserError):
        launcher.hang_up()
        raise


@contextlib.contextmanager
def interruptible(stop: StopRequest, world: World, message: str) -> Iterator[None]:
    """Where a run that is told to stop gives up what it waits for: here, or in a process that has gone for it."""
    try:
        yield
    except (RunStopped, RunFailed, RuntimeError) as error:
        if not isinstance(error, RunStopped) and not stop_was_requested(stop, world):
            raise
        raise Interrupted(stop.number, message) from None
