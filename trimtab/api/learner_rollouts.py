"""What a Learner samples from and how: prompts as token ids, sampling settings, episodes of an environment; and its
policy behind HTTP."""

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

import numpy as np

from trimtab.api.arguments import suggested
from trimtab.api.samples import Episode, Sample
from trimtab.config.data_options import EnvironmentOptions
from trimtab.config.option import options_of, plain
from trimtab.config.parser import as_in_yaml, value_of
from trimtab.config.resolved_config import check
from trimtab.data.chat_template import ChatRenderer, render_pair
from trimtab.data.rendering import tokenize_renderings
from trimtab.data.tokenizer import encode_text, texts_of
from trimtab.envs.environment_pool import EnvironmentPool, LocalEnvironmentPool, SandboxLimits
from trimtab.envs.types import Message, Task
from trimtab.errors import UserError
from trimtab.models.policy import Policy
from trimtab.rollout.engine import Engine
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.rollout.trajectory import Trajectory
from trimtab.server.environment_factory import episode_settings, make_environment_engine, open_pool

Prompt = str | list[Message] | list[int]


class Prompts:
    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._renderer: ChatRenderer | None = None

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        if isinstance(prompts, str) or _is_conversation(prompts):
            raise UserError("prompts is one prompt; give a list of them: [prompt]")
        try:
            found = list(prompts)
        except TypeError:
            raise UserError(f"prompts is of type {type(prompts).__name__}; give a list of them") from None
        if not found:
            raise UserError("prompts is empty; give at least one")
        if all(isinstance(one, int) for one in found):
            raise UserError("prompts is one list of token ids; give a list of such lists: [ids]")
        return [self.ids(prompt, f"prompts[{number}]") for number, prompt in enumerate(found)]

    def ids(self, prompt: Any, where: str) -> list[int]:
        if isinstance(prompt, str):
            return encode_text(self._needed(where), prompt)
        if _is_conversation(prompt):
            return encode_text(self._needed(where), self.renderer(where).render_prompt(list(prompt), where=where))
        try:
            found = [int(one) for one in prompt]
        except (TypeError, ValueError):
            found = []
        if not found:
            raise UserError(f"{where} must be a text, a list of messages or a list of token ids, not {prompt!r:.60}")
        return found

    def demonstration(self, conversation: Sequence[Message] | tuple[str, str], where: str) -> tuple[list[int], Any]:
        """The tokens of a conversation that ends with the assistant, or of a prompt and its answer; and which of them
        are the answer's."""
        tokenizer = self._needed(where)
        if _is_conversation(conversation):
            rendering = self.renderer(where).render(list(conversation), where=where)  # type: ignore[arg-type]
        elif isinstance(conversation, tuple) and [type(part) for part in conversation] == [str, str]:
            prompt, answer = conversation
            rendering = render_pair(prompt, answer, tokenizer, None)
        else:
            raise UserError(f"{where} must be a list of messages, or a tuple of a prompt and its answer")
        ((ids, trained),) = tokenize_renderings([rendering], tokenizer)
        return ids.tolist(), trained

    def renderer(self, where: str) -> ChatRenderer:
        if not self._needed(where).chat_template:
            raise UserError(
                f"{where} is a conversation, and the tokenizer has no chat template; give a text, or set one"
            )
        self._renderer = self._renderer or ChatRenderer(self.tokenizer)
        return self._renderer

    def _needed(self, where: str) -> Any:
        if self.tokenizer is None:
            raise UserError(f"{where} is a text, and the Learner has no tokenizer; give it one, or give token ids")
        return self.tokenizer


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(one, Mapping) for one in prompt)


# ---- sampling settings

_NOT_TAKEN = ("n", "seed", "plain_log_probs", "top_log_probs", "prompt_log_probs")  # of which nothing would come back
SAMPLING = [known.name for known in fields(SamplingParams) if known.name not in _NOT_TAKEN]


NUMBERS: dict[str, Any] = {known.name: known.type for known in fields(SamplingParams) if known.type in (int, float)}


def sampling_of(n: int, wanted: dict[str, Any], stops: tuple[int, ...], vocabulary: int) -> SamplingParams:
    """`stops`: where answers end unless somebody says otherwise."""
    for name in wanted:
        if name not in SAMPLING:
            raise UserError(f"sampling has no setting {name!r}; {suggested(name, SAMPLING)}")
    values = {name: _value(name, value, vocabulary) for name, value in {"n": n, **wanted}.items()}
    return SamplingParams(**{"stop_token_ids": stops, **values})


def _value(name: str, value: Any, vocabulary: int) -> Any:
    if name in NUMBERS:
        try:
            return plain(NUMBERS[name], as_in_yaml(value))
        except ValueError as error:
            raise UserError(f"sampling: {name} {error}") from None
    if name == "stop_strings":
        texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f"sampling: stop_strings takes texts, not {value!r}")
        return texts
    if name == "logit_bias":
        if not isinstance(value, Mapping) or not all(isinstance(bias, int | float) for bias in value.values()):
            raise UserError(f"sampling: logit_bias takes a dict of numbers by token ids, not {value!r:.60}")
        return dict(zip(_tokens(name, list(value), vocabulary), value.values()))
    return _tokens(name, value, vocabulary)


def _tokens(name: str, value: Any, vocabulary: int) -> tuple[int, ...]:
    found = as_in_yaml(value)
    found = found if isinstance(found, list) else [found]
    for token in found:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary:
            raise UserError(f"sampling: {name} takes token ids below {vocabulary}, not {token!r}")
    return tuple(found)


def rooms(prompts: Sequence[list[int]], sampling: SamplingParams, context: int | None) -> list[int]:
    """New tokens that each prompt may get: what is asked for, or as many as the model has places for."""
    found = []
    for place, ids in enumerate(prompts):
        room = sampling.max_new_tokens if context is None else min(sampling.max_new_tokens, context - len(ids))
        if room < 1:
            raise UserError(
                f"prompts[{place}] has {len(ids)} tokens, and the model's context is {context}; shorten it to leave "
                "room for an answer"
            )
        found.append(room)
    return found


def seeds_of(seeds: Any, prompts: int) -> list[int]:
    """One for each prompt."""
    found = as_in_yaml(seeds)
    if not isinstance(found, list) or not all(isinstance(seed, int) for seed in found):
        raise UserError(f"seeds must be a list of whole numbers, not {seeds!r:.60}")
    if len(found) != prompts:
        raise UserError(f"{len(found)} seeds for {prompts} prompts; one for each is needed")
    return found


# ---- episodes

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


# ---- A Learner's policy behind HTTP, with its current weights: requests wait during an update and go on after it.


class Turns:
    def __init__(self) -> None:
        self._calls = threading.RLock()
        self._state = threading.Condition()
        self._wanted = 0
        self._serving = False

    @property
    def wanted(self) -> bool:
        """Whether a call waits, or is at work: the server is to set down what it does."""
        return self._wanted > 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Inside, the model is this call's alone. A call may make another."""
        with self._state:
            self._wanted += 1
        try:
            with self._calls:
                with self._state:
                    self._state.wait_for(lambda: not self._serving)
                yield
        finally:
            with self._state:
                self._wanted -= 1
                self._state.notify_all()

    @contextmanager
    def serve(self) -> Iterator[None]:
        """Inside, the model is the server's, who looks at `wanted`; calls go first."""
        with self._state:
            self._state.wait_for(lambda: not self._wanted and not self._serving)
            self._serving = True
        try:
            yield
        finally:
            with self._state:
                self._serving = False
                self._state.notify_all()


LOOK_EVERY = 0.2  # seconds

log = logging.getLogger(__name__)


@contextmanager
def serving(
    engine: Engine,
    policy: Policy,
    tokenizer: Any,
    turns: Turns,
    *,
    name: str,
    stops: tuple[int, ...],
    seed: int,
    port: int,
    token: str | None,
) -> Iterator[str]:
    """The address for clients of OpenAI's protocol, until the block ends."""
    from trimtab.server.policy_server import PolicyServer
    from trimtab.server.request_params import ServerDefaults
    from trimtab.server.request_queue import EngineFailed, RequestQueue
    from trimtab.server.sessions import ServedPolicy

    if engine.context is None:
        raise UserError(f"{name}: its config names no context, which a server must know; set max_position_embeddings")
    defaults = ServerDefaults(stops, policy.head.out_features)
    served = ServedPolicy(name, tokenizer, defaults, engine.context)
    server = PolicyServer(served, token=token, seed=seed, version=lambda: engine.version)

    def work(queue: RequestQueue) -> None:
        try:
            while not queue.closed:
                if queue.wait(LOOK_EVERY):
                    with turns.serve(), engine.session(SamplingParams(stop_token_ids=stops)) as session:
                        try:
                            while queue.waiting and not queue.closed and not turns.wanted:
                                with queue.metrics.working():
                                    queue.step(session)
                            queue.suspend(session)
                        except Exception as error:
                            log.error("the engine failed", exc_info=error)
                            queue.engine_failed(error)
        finally:
            queue.close(EngineFailed("the engine has ended"))

    address = server.start(port)
    thread = threading.Thread(target=work, args=(server.queue,), name="engine", daemon=True)
    thread.start()
    try:
        yield f"{address}/v1"
    finally:
        server.stop()
        server.join()
        thread.join()
