"""Episodes of a Learner's policy in an environment: named, it has processes of its own; a class that is given is played
in this process."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

import numpy as np

from trimtab.api.prompts import Prompts
from trimtab.api.samples import Episode, Sample
from trimtab.config.data_options import EnvironmentOptions
from trimtab.config.option import options_of
from trimtab.config.parser import value_of
from trimtab.config.resolved_config import check
from trimtab.data.tokenizer import texts_of
from trimtab.envs.environment_pool import EnvironmentPool, LocalEnvironmentPool, SandboxLimits
from trimtab.envs.types import Message, Task
from trimtab.errors import UserError
from trimtab.rollout.engine import Engine
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.rollout.trajectory import Trajectory
from trimtab.server.environment_factory import episode_settings, make_environment_engine, open_pool

SEEDS = 2**31  # a task's, as in training: below this
LIMITS = [
    known.name
    for known in fields(EnvironmentOptions)
    if known.name not in ("given", "agent_func_path", "environment", "env_rows")
]

Environment = str | type | Any
Asked = Task | Mapping[str, Any] | str | list[Message]


def play(
    engine: Engine,
    prompts: Prompts,
    environment: Environment,
    tasks: int | Sequence[Asked],
    sampling: SamplingParams,
    limits: Mapping[str, Any],
    stream: int,
) -> list[Episode]:
    """`stream`: from which seeds come."""
    tokenizer = prompts.tokenizer
    if tokenizer is None:
        raise UserError("play needs a tokenizer: give the Learner one")
    if isinstance(environment, os.PathLike):
        environment = os.fspath(environment)
    options = _options(environment, limits)
    plain = tokenizer.chat_template is None
    with _world(environment, options) as world:
        found = _tasks(world, tasks, stream)
        asked = [_prompt(prompts, task, plain) for task in found]
        seeds = [request_seed(stream, place) for place in range(len(found))]
        player = make_environment_engine(engine, world, tokenizer, episode_settings(options, plain=plain))
        with closing(player):
            rollouts = player.generate(asked, sampling, seeds=seeds, tasks=found)
    told = sorted(rollouts, key=lambda r: (r.prompt, r.sample, r.branch))
    temperature = sampling.temperature or 1.0
    return [
        _episode(replace(found[prompt], sample=sample), list(branches), tokenizer, temperature)
        for (prompt, sample), branches in groupby(told, key=lambda r: (r.prompt, r.sample))
    ]


def _options(environment: Environment, limits: Mapping[str, Any]) -> EnvironmentOptions:
    values = {name: value_of(options_of(EnvironmentOptions)[name], value, name) for name, value in limits.items()}
    if isinstance(environment, str):
        values["agent_func_path" if ".py" in environment else "environment"] = environment
    options = EnvironmentOptions(**values)
    check(replace(options, given=frozenset()))
    return options


@contextmanager
def _world(environment: Environment, options: EnvironmentOptions) -> Iterator[EnvironmentPool | LocalEnvironmentPool]:
    """The environments, which end with the call: a file may be edited before the next."""
    world: EnvironmentPool | LocalEnvironmentPool
    if isinstance(environment, str):
        world = open_pool(options)
    else:
        world = LocalEnvironmentPool(environment, SandboxLimits(options.env_timeout, 1, options.env_threads))
    try:
        yield world
    finally:
        world.close()


def _tasks(world: EnvironmentPool | LocalEnvironmentPool, tasks: int | Sequence[Asked], stream: int) -> list[Task]:
    tasks = int(tasks) if isinstance(tasks, np.integer) else tasks
    if isinstance(tasks, bool) or (isinstance(tasks, int) and tasks < 1):
        raise UserError(f"tasks is {tasks}; give a number above 0, or a list")
    given: Sequence[Asked]
    if isinstance(tasks, int):
        offered = world.info.offers_rows
        given = world.rows(tasks, request_seed(stream, -1) % SEEDS) if offered else [{} for _ in range(tasks)]
    elif not isinstance(tasks, Iterable):
        raise UserError(f"tasks is of type {type(tasks).__name__}; give a list of tasks, or how many")
    elif isinstance(tasks, str | Mapping | Task):
        raise UserError("tasks is one task; give a list of them: [task]")
    else:
        given = list(tasks)
    if not given:
        raise UserError("tasks is empty; give at least one, or how many the environment is to bring")
    return [_task(one, place, request_seed(stream, place) % SEEDS) for place, one in enumerate(given)]


def _task(found: Asked, place: int, seed: int) -> Task:
    if isinstance(found, Task):
        return found
    if isinstance(found, str | list):
        return Task(place, 0, seed, found)
    if not isinstance(found, Mapping):
        raise UserError(f"tasks[{place}] is of type {type(found).__name__}; give a Task, a row (dict) or a prompt")
    rest = {name: value for name, value in found.items() if name not in ("prompt", "label")}
    return Task(place, 0, seed, found.get("prompt", ""), found.get("label"), rest)


def _prompt(prompts: Prompts, task: Task, plain: bool) -> list[int]:
    """The row's own, for environments that open with it."""
    asked: list[Message] = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else task.prompt
    if plain:
        return prompts.ids("".join(str(message.get("content") or "") for message in asked), "a task's prompt")
    return prompts.ids(asked, "a task's prompt")


def _episode(task: Task, branches: list[Trajectory], tokenizer: Any, temperature: float) -> Episode:
    last = branches[-1]
    assert last.episode is not None, "an environment was played"
    failed = last.finish_reason == "failed"
    reward = None if failed else last.episode.reward
    samples = []
    for rollout in branches:
        drawn = rollout.tokens if rollout.drawn is None else rollout.tokens[rollout.drawn]
        sample = Sample.of(rollout, texts_of(tokenizer, [drawn.tolist()])[0], temperature)
        sample.reward = reward
        samples.append(sample)
    record = last.episode
    return Episode(task, samples, reward, last.finish_reason, record.said, record.logs, record.problem)
