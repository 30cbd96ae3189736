"""A harness for verifiers that runs in this process: it asks the policy, calls the tools that the task serves, and is
done with the first answer that calls none."""

import json
from contextlib import AsyncExitStack
from typing import Any

from openai import AsyncOpenAI, BadRequestError
from verifiers.v1 import Harness, HarnessConfig, ProgramResult
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness", "ChatHarnessConfig"]

FULL = "maximum context length"
RETRIES = 5  # of requests that a busy server sends away


class ChatHarnessConfig(HarnessConfig):
    pass


class ChatHarness(Harness[ChatHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> ProgramResult:
        talk = _messages(*self.resolve_prompt(data))
        async with AsyncExitStack() as open_things:
            client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=RETRIES, timeout=None)
            await open_things.enter_async_context(client)
            served = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
            schemas, known, servers = await connect_mcp(served, open_things)
            try:
                while True:
                    offered = {"tools": schemas} if schemas else {}
                    reply = await client.chat.completions.create(model=ctx.model, messages=talk, **offered)
                    said = reply.choices[0].message
                    talk.append(said.model_dump(exclude_none=True))
                    if not said.tool_calls:
                        break
                    for call in said.tool_calls:
                        talk.append(
                            {"role": "tool", "tool_call_id": call.id, "content": await _called(call, known, servers)}
                        )
            except BadRequestError as error:
                # So verifiers says that it has ended the episode, and the server that the conversation is full.
                if trace.stop_condition is None and FULL not in str(error):
                    raise
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _called(call: Any, known: dict[str, Any], servers: dict[str, Any]) -> Any:
    """What goes wrong is the model's business."""
    name = call.function.name
    if name not in known:
        return json.dumps({"error": f"there is no tool {name}, but {', '.join(known) or 'none at all'}"})
    try:
        return await call_mcp(servers, known, name, json.loads(call.function.arguments or "{}"))
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


def _messages(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    before: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    if prompt is None:
        return before
    if isinstance(prompt, str):
        return [*before, {"role": "user", "content": prompt}]
    return [*before, *(message.model_dump(exclude_none=True) for message in prompt)]
