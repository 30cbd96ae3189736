"""An RL run on Ray: the same controller and loop, with its roles on the nodes of a cluster.

If one process is lost, the others cannot continue, because they share collectives and sharded weights. With
--max_restarts all roles are rebuilt on the same amount of resources and resume from the run's last checkpoint.
"""

import dataclasses
import os
import time

from trimtab.config.resolved_config import device_problems
from trimtab.config.rl_jobs import RLOptions
from trimtab.data.hub import trust
from trimtab.distributed.device import DeviceKind, kind_of_resource
from trimtab.distributed.launcher import WorkerLost
from trimtab.distributed.ray.launcher import RayLauncher, connected, stop_line
from trimtab.distributed.ray.placement import Layout, Placement, table
from trimtab.distributed.ray.preflight import preflight
from trimtab.distributed.ray.workers import RayJob
from trimtab.errors import Interrupted, RunFailed, UserError
from trimtab.interrupts import StopRequest
from trimtab.models.parallel.sharded_model import mesh_of
from trimtab.models.pretrained import quiet_transformers
from trimtab.train.alarms import last_checkpoint_line, newest_checkpoint_mark
from trimtab.train.checkpoint import newest_of_run
from trimtab.train.rl.checks import check_shares, locations_of
from trimtab.train.rl.launch import RECORDS, Controller, set_up, train
from trimtab.train.rl.roles import layout_of_units

LOOK_EVERY = 2.0  # seconds between two checks whether lost resources are back


def train_on_cluster(options: RLOptions, kind: type[Controller]) -> None:
    before = newest_checkpoint_mark(options)
    with connected(), StopRequest() as stop:
        if line := stop_line():
            print(line, flush=True)
        units = kind.units(options, 1)
        check_shares(options, units)
        layout = layout_of_units(options, units)
        placement = preflight(layout, locations_of(options), stop)
        refuse_on(kind_of_resource(placement.resource), options)
        print(*table(layout.rows(placement.resource)), sep="\n", flush=True)
        for restart in range(options.max_restarts + 1):
            try:
                return train_once(options, kind, layout, placement, stop, again=restart > 0)
            except WorkerLost as loss:
                last = newest_of_run(options, before)
                where = last_checkpoint_line(last)
                if restart == options.max_restarts or (options.record and last is None):
                    raise RunFailed(f"{loss}; {where}") from loss
                print(f"{loss}; restart {restart + 1} of {options.max_restarts}", flush=True)
                placement = placed_again(layout, options, stop, where)
                options = dataclasses.replace(options, load_checkpoint=last is not None)


def train_once(
    options: RLOptions,
    kind: type[Controller],
    layout: Layout,
    placement: Placement,
    stop: StopRequest,
    *,
    again: bool,
) -> None:
    job = RayJob(options, kind.units, mesh_of, RECORDS, prepare, os.getcwd())
    launcher = RayLauncher(job, layout, placement, options.hang_timeout, stop, again=again)
    kindly = False
    try:
        launcher.open()
        for found in launcher.found:  # one Ray resource name may cover several kinds of device
            refuse_on(found["kind"], options)
        options = in_working_precision(options, launcher)
        launcher.meet(options)
        kindly = True
        if stop.signal is not None:
            raise Interrupted(stop.number, "stopped before the first step; nothing is lost")
        train(set_up(options, kind, launcher), launcher, stop)
    except WorkerLost:
        kindly = False
        raise
    finally:
        launcher.close(kindly=kindly)


def refuse_on(kind: DeviceKind, options: RLOptions) -> None:
    """Refuse options that devices of this kind do not support, before anything is loaded there."""
    if problems := device_problems(options, kind.lacking):
        raise UserError("; ".join(problems))


def in_working_precision(options: RLOptions, launcher: RayLauncher) -> RLOptions:
    """The options with fp32 instead of bf16 if bfloat16 is faulty on a device; prints a warning."""
    fault = next((found["bf16_fault"] for found in launcher.found if found["bf16_fault"]), None)
    if not options.bf16 or fault is None:
        return options
    print(f"warning: --bf16 does not work on the CPUs there ({fault}): fp32 is used instead", flush=True)
    return dataclasses.replace(options, bf16=False)


def prepare(options: RLOptions) -> None:
    """Set up a process of the run before its roles are built."""
    quiet_transformers()
    trust(options.trust_remote_code)


def placed_again(layout: Layout, options: RLOptions, stop: StopRequest, where: str) -> Placement:
    """Wait until the same resources are available again, on any nodes, and place the run on them."""
    deadline = time.monotonic() + options.restart_wait
    while True:
        try:
            return preflight(layout, locations_of(options), stop)
        except (UserError, RunFailed) as error:  # too few resources, or a node is shutting down
            if time.monotonic() > deadline:
                waited = f"so it was for {options.restart_wait:g} s (--restart_wait)"
                raise RunFailed(f"{error}; {waited}; {where}") from error
        except Interrupted:
            raise Interrupted(stop.number, f"stopped; {where}") from None
        if stop.signal is not None:
            raise Interrupted(stop.number, f"stopped; {where}")
        time.sleep(LOOK_EVERY)
