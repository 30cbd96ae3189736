"""Environments written for verifiers: `verifiers:MODULE`, an installed module or a file, as in
`verifiers:games/wordle.py?rounds=3`. They play their episodes themselves, as agents do, and have their own rows."""

import copy
import importlib.util
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimtab.envs.adapter import EnvironmentInfo, LoadedEnvironment, to_float, to_metrics
from trimtab.envs.types import Task
from trimtab.errors import UserError

MAX_RETRIES = 5  # of requests that a busy server refuses
EMPTY_RESPONSE = "EmptyModelResponseError"  # the policy's fault: the episode ends, and the rubric has scored it
KEY_VARIABLE = "TRIMTAB_ENDPOINT_KEY"  # verifiers reads API keys from environment variables
HARNESS = "trimtab_chat"


def load_verifiers(name: str, options: dict[str, Any], source: str) -> LoadedEnvironment:
    module = name
    if name.endswith(".py"):
        file = Path(name).expanduser().resolve()
        if not file.is_file():
            raise UserError(f"--environment {source}: {file}: no such file")
        sys.path.insert(0, str(file.parent))
        module = file.stem
    has_load_environment = importlib.util.find_spec("verifiers.envs") is not None
    return (_load_environment if has_load_environment else _load_taskset)(module, options, source)


# ---- verifiers up to 0.1: the module's load_environment(**options) returns an environment with a dataset, its own loop
# over turns and a rubric


def _load_environment(module: str, options: dict[str, Any], source: str) -> LoadedEnvironment:
    import verifiers

    try:
        environment = verifiers.load_environment(module, **options)
    except (AttributeError, ImportError, ValueError) as error:
        raise UserError(f"--environment {source}: {' '.join(str(error).split())}") from error

    def rows(count: int, seed: int) -> list[dict[str, Any]]:
        found = environment.get_dataset(n=count, seed=seed).to_list()
        return [{**row, "label": row.get("answer")} for row in found]

    async def run(task: Task, *, base_url: str, api_key: str, model: str) -> tuple[float, dict[str, float]]:
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=MAX_RETRIES, timeout=None) as client:
            row = {"example_id": task.row, "answer": task.label, **task.columns, "prompt": task.prompt}
            found = await environment.run_rollout(row, OpenAIChatCompletionsClient(client), model, {})
        error = found.get("error")
        if error is not None and EMPTY_RESPONSE not in str(error):
            raise RuntimeError(f"verifiers: {error}")
        return to_float(found["reward"], "the reward"), to_metrics(found.get("metrics"))

    info = EnvironmentInfo(module, "verifiers' (load_environment)", "agent", offers_rows=True, fixed=True)
    return LoadedEnvironment(info, run=run, rows=rows)


# ---- verifiers from 0.2: a taskset, whose tasks are rows with rewards, and a harness, the program that plays a task at
# an endpoint that verifiers puts in front of the run's. The harness is the module's own, or verifiers_harness.py: those
# of verifiers install packages from the network.


def _load_taskset(module: str, options: dict[str, Any], source: str) -> LoadedEnvironment:
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import default_harness_id, load_environment, resolve_env_config

    from trimtab.envs import verifiers_harness

    sys.modules[HARNESS] = verifiers_harness  # verifiers imports harnesses by a name without dots
    own = default_harness_id(module)
    agent = {"harness": {"id": own if own == module else HARNESS}, "runtime": {"type": "subprocess"}}
    config = {"taskset": {"id": module, **options}, "interception": {"type": "server"}, "agent": agent}
    try:
        environment = load_environment(resolve_env_config(config))
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise UserError(f"--environment {source}: {' '.join(str(error).split())}") from error
    if len(agent_config_fields(environment.config)) != 1:
        raise UserError(f"--environment {source}: it has several agents: one policy is trained in one seat")
    tasks = LazyTasks(environment.taskset)

    def rows(count: int, seed: int) -> list[dict[str, Any]]:
        found = [tasks[index].data for index in range(tasks.count(count))]
        prompts = [verifiers_harness.first_messages(data.system_prompt, data.prompt) for data in found]
        return [{"prompt": prompt, "task": index} for index, prompt in enumerate(prompts)]

    async def run(task: Task, *, base_url: str, api_key: str, model: str) -> tuple[float, dict[str, float]]:
        from verifiers.v1 import EvalClientConfig, ModelContext

        os.environ[KEY_VARIABLE] = api_key
        context = ModelContext(model=model, client=EvalClientConfig(base_url=base_url, api_key_var=KEY_VARIABLE))
        own = copy.copy(environment)  # the servers of an episode belong to it alone and end with it
        async with own.serving():
            (slot,) = own.slots(tasks[int(task.columns.get("task", task.row))])
            episode = await own.run_slot(slot, context)
        if not episode.ok:
            problems = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(
                f"verifiers: {problems[0].type}: {problems[0].message}" if problems else "verifiers: failed"
            )
        reward = sum(trace.reward for trace in episode.traces)
        logs = {name: value for trace in episode.traces for name, value in trace.metrics.items()}
        return to_float(reward, "the reward"), to_metrics(logs)

    info = EnvironmentInfo(module, "verifiers' (a taskset)", "agent", offers_rows=True, fixed=True)
    return LoadedEnvironment(info, run=run, rows=rows)


class LazyTasks:
    """The tasks of a taskset, which may be endless, read as far as they are needed."""

    def __init__(self, taskset: Any):
        self._source: Iterator[Any] = iter(taskset)
        self._read: list[Any] = []
        self._lock = threading.Lock()

    def count(self, wanted: int) -> int:
        """How many there are, up to `wanted`."""
        with self._lock:
            self._read += itertools.islice(self._source, max(0, wanted - len(self._read)))
            return min(wanted, len(self._read))

    def __getitem__(self, index: int) -> Any:
        if self.count(index + 1) <= index:
            raise IndexError(f"there is no task {index}: the taskset has {len(self._read)}")
        return self._read[index]
