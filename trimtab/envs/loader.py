"""Load an environment by its source: `FILE.py[:NAME]`, `gem:NAME`, `rg:NAME`, `verifiers:MODULE`, or `trimtab:NAME` for
an embedded one. A class or function in a file is recognised by its methods and parameters. Runs in worker processes."""

import asyncio
import contextlib
import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from urllib.parse import parse_qsl

from trimtab.envs import adapter, gymnasium, openrlhf, trl
from trimtab.envs.adapter import EnvironmentAdapter, EnvironmentFactory, EnvironmentInfo, LoadedEnvironment, describe
from trimtab.envs.tools import BadArguments, UnknownTool, call_tool, tool_schemas
from trimtab.envs.types import Message, Step, Task, Turn
from trimtab.envs.verifiers_adapter import load_verifiers
from trimtab.errors import UserError
from trimtab.sandbox.calls import Caller, CallStuck, CallTimeout, InstanceService
from trimtab.sandbox.worker import load_module, parse_source

EMBEDDED = {"guess": ("guess_game.py", "Guess")}  # file of trimtab/embedded, and the class in it


@dataclass(frozen=True)
class Library:
    module: str  # as it is imported
    package: str  # as it is installed
    load: Callable[[str, dict[str, Any], str], LoadedEnvironment]


LIBRARIES = {
    "gem": Library("gem", "gem-llm", gymnasium.load_gem),
    "rg": Library("reasoning_gym", "reasoning-gym", gymnasium.load_reasoning_gym),
    "verifiers": Library("verifiers", "verifiers", load_verifiers),
}


def load(source: str) -> LoadedEnvironment:
    """Raise UserError if there is nothing to load; exceptions of the author's code pass through."""
    prefix, colon, name = source.partition(":")
    if colon and prefix in LIBRARIES:
        return with_tools(_load_library(LIBRARIES[prefix], source, name))
    if colon and prefix == "trimtab":
        if name not in EMBEDDED:
            raise adapter.unknown_name(source, name, sorted(EMBEDDED))
        embedded, class_name = EMBEDDED[name]
        return with_tools(load_file(Path(__file__).parents[1] / "embedded" / embedded, class_name))
    file, attribute = parse_source(source)
    if not file.is_file():
        raise UserError(f"environment {file}: no such file")
    return with_tools(load_file(file, attribute))


def with_tools(loaded: LoadedEnvironment) -> LoadedEnvironment:
    """Add the schemas of its tools. Constructs one instance, so that a constructor that fails does so before the first
    episode."""
    if loaded.make is None:
        return loaded
    first = loaded.make()
    tools = tool_schemas(first.tools)
    with contextlib.suppress(Exception):  # as at the end of an episode
        closed = first.close()
        if inspect.iscoroutine(closed):
            asyncio.run(closed)
    return replace(loaded, info=replace(loaded.info, tools=tools))


# ---- libraries: NAME or NAME?option=value&...


def _load_library(library: Library, source: str, place: str) -> LoadedEnvironment:
    name, _, query = place.partition("?")
    options = {key: _option_value(value) for key, value in parse_qsl(query, keep_blank_values=True)}
    try:
        importlib.import_module(library.module)
    except ModuleNotFoundError as error:
        if error.name != library.module:
            raise
        package = library.package
        raise UserError(f"--environment {source}: {package} is not installed: pip install {package}") from error
    return library.load(name, options, source)


def _option_value(text: str) -> Any:
    """JSON if it is valid JSON, else the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


# ---- files and objects


@dataclass(frozen=True)
class Shape:
    """How an environment looks to its author, and what adapts it."""

    description: str
    matches: Callable[[Any], bool]
    adapter: Callable[[EnvironmentFactory], EnvironmentAdapter] | None  # None: an agent
    constructor_arguments: tuple[str, ...] = ()  # that the adapter can give


CLASS_SHAPES = (  # the first that matches
    Shape(openrlhf.AGENT_INSTANCE_SHAPE, openrlhf.is_agent_instance, openrlhf.AgentInstanceAdapter),
    Shape(trl.SKYRL_SHAPE, trl.is_skyrl, trl.SkyRLAdapter, ("env_config", "extras")),
    Shape(gymnasium.TEXTARENA_SHAPE, gymnasium.is_textarena, gymnasium.TextArenaAdapter),
    Shape(gymnasium.GYMNASIUM_SHAPE, gymnasium.is_gymnasium, gymnasium.GymnasiumAdapter),
    Shape(adapter.NATIVE_SHAPE, adapter.is_native, adapter.NativeAdapter),
    Shape(trl.TRL_SHAPE, trl.is_trl, trl.TRLAdapter),
)
FUNCTION_SHAPES = (
    Shape(adapter.AGENT_SHAPE, adapter.is_agent, None),
    Shape(openrlhf.STEP_FUNCTION_SHAPE, openrlhf.is_step_function, openrlhf.StepFunctionAdapter),
)
PREFERRED_NAMES = ("AgentInstance", "Environment", "Env", "run", "step")


def load_file(file: Path, name: str | None) -> LoadedEnvironment:
    """The class or function `name` of a Python file, or the only candidate in it. A function `rows(count, seed)` in the
    same file offers prompts."""
    openrlhf.install_stub()
    module = load_module(file, "environment_file")
    openrlhf.refuse_executors(module, str(file))
    rows = getattr(module, "rows", None)
    if name is None:
        return _loaded(*_only_candidate(module, str(file)), rows)
    found = getattr(module, name, None)
    if not callable(found):
        raise UserError(f"{file}: there is no class or function {name} in it")
    return _loaded(*_with_shape(found, name, str(file)), rows)


def load_object(found: Any) -> LoadedEnvironment:
    """A class or function of this process: an environment class, a function that makes environments, or an agent."""
    if not callable(found):
        raise UserError(f"environment: give a class or a function, not an object of type {type(found).__name__}")
    module = sys.modules.get(getattr(found, "__module__", ""))
    return _loaded(*_with_shape(found, _name(found), "environment"), getattr(module, "rows", None))


def _loaded(found: EnvironmentFactory, shape: Shape, rows: Any) -> LoadedEnvironment:
    offered = rows if inspect.isfunction(rows) and list(adapter.parameters(rows)) == ["count", "seed"] else None
    kind: Literal["environment", "agent"] = "agent" if shape.adapter is None else "environment"
    info = EnvironmentInfo(_name(found), shape.description, kind, offers_rows=offered is not None)
    if shape.adapter is None:
        return LoadedEnvironment(info, run=functools.partial(adapter.run_agent, found), rows=offered)
    return LoadedEnvironment(info, functools.partial(shape.adapter, found), rows=offered)


def _only_candidate(module: ModuleType, file: str) -> tuple[EnvironmentFactory, Shape]:
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    known = {value: shape for value in own if (shape := _shape_of(value)) is not None}
    bases = {base for value in known if inspect.isclass(value) for base in value.__mro__[1:]}
    candidates = [value for value in known if value not in bases]
    preferred = [value for name in PREFERRED_NAMES for value in candidates if _name(value) == name]
    if not candidates:
        raise UserError(f"{file}: there is no environment in it, which is {_expected()}")
    if len(candidates) > 1 and not preferred:
        names = ", ".join(map(_name, candidates))
        first = _name(candidates[0])
        raise UserError(f"{file}: {names} could all be meant: name one after a colon, as in {file}:{first}")
    found = (preferred or candidates)[0]
    return _constructible(found, known[found], file)


def _with_shape(found: EnvironmentFactory, name: str, file: str) -> tuple[EnvironmentFactory, Shape]:
    shape = _shape_of(found)
    if shape is not None:
        return _constructible(found, shape, file)
    if inspect.isclass(found):
        raise UserError(f"{file}: {name} is no environment, which is {_expected()}")
    if missing := adapter.required_parameters(found):
        raise UserError(f"{file}: {name} needs {', '.join(missing)}: a function that makes environments takes nothing")
    shape = _shape_of(type(found()))
    if shape is None:
        raise UserError(f"{file}: what {name} makes is no environment, which is {_expected()}")
    return found, shape


def _shape_of(found: Any) -> Shape | None:
    shapes = CLASS_SHAPES if inspect.isclass(found) else FUNCTION_SHAPES if inspect.isfunction(found) else ()
    return next((shape for shape in shapes if shape.matches(found)), None)


def _constructible(found: EnvironmentFactory, shape: Shape, file: str) -> tuple[EnvironmentFactory, Shape]:
    required = adapter.required_parameters(found) if inspect.isclass(found) else []
    missing = [name for name in required if name not in shape.constructor_arguments]
    if missing:
        raise UserError(
            f"{file}: {_name(found)} needs {', '.join(missing)} to be made: write a function without parameters that "
            f"makes one, and name that, as in {file}:make"
        )
    return found, shape


def _name(found: EnvironmentFactory) -> str:
    return getattr(found, "__name__", type(found).__name__)


def _expected() -> str:
    classes = "; ".join(shape.description for shape in CLASS_SHAPES)
    return f"a class with {classes}; or a function: {'; '.join(shape.description for shape in FUNCTION_SHAPES)}"


# ---- one instance of an environment or agent in a worker process: opened, played turn by turn, ended


AGENT_PATIENCE = 64
"""Factor from the time limit of a call to that of an agent: it plays all turns of an episode, and waits for the policy
in each of them."""
LONGEST_TEXT = 1_000_000
"""Characters of a message. More would take long to become tokens, and no context holds it: the middle is cut out."""


def load_service(source: str) -> InstanceService:
    """For worker processes: instances of the environment that `source` names."""
    loaded = load(source)
    return InstanceService(
        asdict(loaded.info), str(parse_source(source)[0]), functools.partial(EnvironmentInstance, loaded)
    )


class EnvironmentInstance:
    def __init__(self, loaded: LoadedEnvironment, caller: Caller, seconds: float):
        """`seconds`: that a call may take."""
        self.loaded, self.caller, self.seconds = loaded, caller, seconds
        self._environment: EnvironmentAdapter | None = None
        self._reported = 0.0  # of the caller's seconds

    @property
    def environment(self) -> EnvironmentAdapter:
        assert self._environment is not None, "it has been opened"
        return self._environment

    async def answer(self, method: str, arguments: Sequence[Any]) -> Any:
        if method not in ("reset", "step", "end", "run", "rows"):
            raise ValueError(f"no method {method}")
        return await getattr(self, method)(*arguments)

    async def reset(self, task: Task) -> dict[str, Any]:
        assert self.loaded.make is not None, "an agent is not opened"
        self._environment = await self._call(self.loaded.make)
        messages = await self._call(self.environment.reset, task)
        tools = await self._call(lambda: tool_schemas(self.environment.tools))
        return {"messages": None if messages is None else _cut(messages), "tools": tools, "seconds": self._spent()}

    async def step(self, turn: Turn) -> dict[str, Any]:
        calls = turn.message.get("tool_calls") or []
        if calls and self.environment.tools:
            counts = {"tool_calls": len(calls), "tool_failures": 0, "unknown_tools": 0}
            step = Step([await self._tool(one, counts) for one in calls])
        else:
            counts = {}
            step = await self._call(self.environment.step, turn)
        answer = vars(step) | {"messages": _cut(step.messages)}
        return {"step": answer, **counts, "seconds": self._spent()}

    async def end(self) -> dict[str, Any]:
        reward = await self._call(self.environment.get_reward)
        logs = await self.close()
        return {"reward": reward, "logs": logs, "seconds": self._spent()}

    async def run(self, task: Task, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        assert self.loaded.run is not None, "an environment is played turn by turn"
        play = functools.partial(self.loaded.run, task, base_url=base_url, api_key=api_key, model=model)
        reward, logs = await self.caller.call(AGENT_PATIENCE * self.seconds, play)
        return {"reward": reward, "logs": logs, "seconds": self._spent()}

    async def rows(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Prompts that the environment offers; may take as long as loading it."""
        assert self.loaded.rows is not None, "asked where they are offered"
        found = await asyncio.to_thread(self.loaded.rows, count, seed)
        wrong = [found] if not isinstance(found, list) else [row for row in found if not isinstance(row, dict)]
        if wrong:
            raise TypeError(f"rows({count}, {seed}) gave {describe(wrong[0])}: a list of dicts is needed")
        return found

    async def close(self) -> dict[str, float]:
        """Logs of closing it. An error spoils nothing that the episode has; the log says that there was one."""
        environment, self._environment = self._environment, None
        if environment is None:
            return {}
        try:
            await self._call(environment.close)
        except CallStuck:
            raise
        except BaseException:
            return {"close_failures": 1.0}
        return {}

    async def _tool(self, found: Message, counts: dict[str, int]) -> Message:
        function = found.get("function") or {}
        name = str(function.get("name"))
        try:
            text = await self._call(call_tool, self.environment.tools, name, function.get("arguments"))
        except CallTimeout:
            raise
        except UnknownTool as error:
            counts["unknown_tools"] += 1
            text = _error(str(error))
        except BadArguments as error:
            counts["tool_failures"] += 1
            text = _error(str(error))
        except BaseException as error:
            counts["tool_failures"] += 1
            text = _error(f"{type(error).__name__}: {error}".removesuffix(": "))
        identity = {"tool_call_id": found["id"]} if "id" in found else {}
        return {"role": "tool", "name": name, "content": text, **identity}

    async def _call(self, function: Any, *arguments: Any) -> Any:
        return await self.caller.call(self.seconds, function, *arguments)

    def _spent(self) -> float:
        """Seconds of user code since the last answer."""
        spent, self._reported = self.caller.seconds - self._reported, self.caller.seconds
        return spent


def _error(words: str) -> str:
    return json.dumps({"error": words[:2000]}, ensure_ascii=False)


def _cut(messages: str | list[Message]) -> list[Message]:
    assert not isinstance(messages, str), "adapters make messages of it"
    return [message | {"content": _readable(message.get("content"))} for message in messages]


def _readable(content: object) -> object:
    """Content that tokenizers can read: a text, or parts some of which are texts."""
    if isinstance(content, str):
        return shortened(content)
    if isinstance(content, list | tuple):
        return [
            part | {"text": shortened(part["text"])}
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
    if content is not None:
        raise TypeError(f"the content of a message is {describe(content)}: a text is needed")
    return None


def shortened(text: str) -> str:
    """The text without its middle, where it is too long, and without halves of surrogate pairs, which come from file
    names and the like and are no characters."""
    if len(text) > LONGEST_TEXT:
        half = LONGEST_TEXT // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
    return text.encode(errors="replace").decode()
