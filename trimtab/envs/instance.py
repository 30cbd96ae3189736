"""One instance of an environment or agent in a worker process: opened, played turn by turn, ended."""

import asyncio
import functools
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trimtab.envs.adapter import EnvironmentAdapter, LoadedEnvironment, describe
from trimtab.envs.loader import load
from trimtab.envs.tools import BadArguments, UnknownTool, call_tool, tool_schemas
from trimtab.envs.types import Message, Step, Task, Turn
from trimtab.sandbox.calls import Caller, CallStuck, CallTimeout, InstanceService
from trimtab.sandbox.worker import parse_source

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
