"""verifiers from 0.2: a taskset, whose tasks are rows and know their rewards, and a harness, the program that plays one
at an endpoint that verifiers puts before the run's. It is the module's own, or harness.py in this process: those of
verifiers install themselves from the network."""

import copy
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from trimtab.envs.loaded import About, Loaded
from trimtab.envs.shapes.adapted import figures, number
from trimtab.envs.types import Message, Task
from trimtab.errors import UserError

WORDS = "verifiers' (a taskset)"
KEY = "TRIMTAB_ENDPOINT_KEY"  # verifiers reads keys from the process's variables
HARNESS = "trimtab_chat"


def load(module: str, options: dict[str, Any], source: str) -> Loaded:
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import default_harness_id, load_environment, resolve_env_config

    from trimtab.envs.sources.verifiers import harness

    sys.modules[HARNESS] = harness  # verifiers imports harnesses by a name without dots
    own = default_harness_id(module)
    seat = {"harness": {"id": own if own == module else HARNESS}, "runtime": {"type": "subprocess"}}
    config = {"taskset": {"id": module, **options}, "interception": {"type": "server"}, "agent": seat}
    try:
        environment = load_environment(resolve_env_config(config))
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise UserError(f"--environment {source}: {' '.join(str(error).split())}") from error
    if len(agent_config_fields(environment.config)) != 1:
        raise UserError(f"--environment {source}: it has several agents: one policy is trained in one seat")
    tasks = Tasks(environment.taskset)

    def rows(count: int, seed: int) -> list[dict[str, Any]]:
        return [{"prompt": _opening(tasks[place].data), "task": place} for place in range(tasks.count(count))]

    async def run(task: Task, *, base_url: str, api_key: str, model: str) -> tuple[float, dict[str, float]]:
        from verifiers.v1 import EvalClientConfig, ModelContext

        os.environ[KEY] = api_key
        context = ModelContext(model=model, client=EvalClientConfig(base_url=base_url, api_key_var=KEY))
        one = copy.copy(environment)  # what an episode is served with belongs to it alone, and goes with it
        async with one.serving():
            (slot,) = one.slots(tasks[int(task.columns.get("task", task.row))])
            episode = await one.run_slot(slot, context)
        if not episode.ok:
            problems = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(
                f"verifiers: {problems[0].type}: {problems[0].message}" if problems else "verifiers: failed"
            )
        reward = sum(trace.reward for trace in episode.traces)
        logs = {name: value for trace in episode.traces for name, value in trace.metrics.items()}
        return number(reward, "the reward"), figures(logs)

    return Loaded(About(module, WORDS, "agent", offers_rows=True, fixed=True), run=run, rows=rows)


class Tasks:
    """Those of a taskset, which may be without end, read as far as they are needed."""

    def __init__(self, taskset: Any):
        self._source: Iterator[Any] = iter(taskset)
        self._read: list[Any] = []
        self._lock = threading.Lock()

    def count(self, wanted: int) -> int:
        """At most so many."""
        with self._lock:
            self._read += itertools.islice(self._source, max(0, wanted - len(self._read)))
            return min(wanted, len(self._read))

    def __getitem__(self, place: int) -> Any:
        if self.count(place + 1) <= place:
            raise IndexError(f"there is no task {place}: the taskset has {len(self._read)}")
        return self._read[place]


def _opening(data: Any) -> list[Message]:
    """What an episode begins with, as far as the task says it; the harness sends it."""
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if data.prompt is None:
        return system
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(message.model_dump(exclude_none=True) for message in data.prompt)]
