"""A harness for verifiers that runs in the worker process: it asks the policy, calls the tools that the task serves,
and ends with the first answer that calls none."""

import json
from contextlib import AsyncExitStack
from typing import Any

from openai import AsyncOpenAI, BadRequestError
from verifiers.v1 import Harness, HarnessConfig, ProgramResult
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness", "ChatHarnessConfig"]

CONTEXT_FULL = "maximum context length"
MAX_RETRIES = 5  # of requests that a busy server refuses


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
        messages = first_messages(*self.resolve_prompt(data))
        async with AsyncExitStack() as stack:
            client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=MAX_RETRIES, timeout=None)
            await stack.enter_async_context(client)
            served = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
            schemas, known, servers = await connect_mcp(served, stack)
            offered = {"tools": schemas} if schemas else {}
            try:
                while True:
                    reply = await client.chat.completions.create(model=ctx.model, messages=messages, **offered)
                    answer = reply.choices[0].message
                    messages.append(answer.model_dump(exclude_none=True))
                    if not answer.tool_calls:
                        break
                    for call in answer.tool_calls:
                        content = await _tool_result(call, known, servers)
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            except BadRequestError as error:
                # verifiers refuses requests of an episode that it has ended; the server those with a full context.
                if trace.stop_condition is None and CONTEXT_FULL not in str(error):
                    raise
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _tool_result(call: Any, known: dict[str, Any], servers: dict[str, Any]) -> Any:
    """What the tool returns; an error is returned to the model as JSON."""
    name = call.function.name
    if name not in known:
        return json.dumps({"error": f"there is no tool {name}, but {', '.join(known) or 'none at all'}"})
    try:
        return await call_mcp(servers, known, name, json.loads(call.function.arguments or "{}"))
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


def first_messages(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    """The messages that an episode begins with, as far as its task has them."""
    before: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    if prompt is None:
        return before
    if isinstance(prompt, str):
        return [*before, {"role": "user", "content": prompt}]
    return [*before, *(message.model_dump(exclude_none=True) for message in prompt)]
