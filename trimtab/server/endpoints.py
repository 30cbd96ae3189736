"""What each endpoint does with a request: read it, have it drawn, keep a record, answer."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from trimtab.envs.types import Message
from trimtab.errors import UserError
from trimtab.rollout.trajectory import Rollout
from trimtab.server import request_params
from trimtab.server.http import (
    HTTPError,
    RequestGate,
    ServerClosing,
    authenticate,
    bearer_token,
    json_object,
    read_body,
)
from trimtab.server.request_params import (
    Fields,
    InvalidRequest,
    RequestParams,
    ServerDefaults,
    are_ids,
    calls_are_read,
    is_text,
    read_messages,
    read_tools,
)
from trimtab.server.request_queue import CompletionBackend, CompletionRequest, EngineFailed, Overloaded, PolicyMetrics
from trimtab.server.responses import Completion, ResponseBuilder, without_stop
from trimtab.server.sessions import (
    ChatFormat,
    ChatPrompt,
    RecordedTurn,
    ServedPolicy,
    SessionRecord,
    SessionStore,
    stream_seed,
)

LARGE = 2**17  # bytes, beyond which others should not wait for their being tokenised
MOST_PROMPTS = 256

# Of chat templates, what is not a client's to say.
RESERVED = {"chat_template", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "documents"}
RESERVED |= {"messages", "conversation", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
RESERVED |= {"return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now"}

Made = TypeVar("Made")


class CompletionEndpoints:
    def __init__(self, policy: ServedPolicy, drawing: CompletionBackend, records: SessionStore):
        self.policy, self.drawing, self.records = policy, drawing, records
        self.replies = ResponseBuilder(policy)

    # ---- endpoints

    async def chat(self, fields: Fields, session: str | None, request: Request) -> Response:
        wanted, stage, record = self._of_chat(fields, session)
        messages = read_messages(fields)
        conversation = await _aside(fields, lambda: self.policy.conversation(messages, stage, record))
        return await self._chat(fields, session, wanted, conversation)

    async def chat_with_tokens(self, fields: Fields, session: str | None, request: Request) -> Response:
        """The same behind tokens that the client has put together itself."""
        wanted, stage, record = self._of_chat(fields, session)
        messages, ids = read_messages(fields), fields.ids("tokens")
        if ids:
            self.policy.check_ids(ids, "tokens")
        before = None if record is None else record.read_before(ids)
        return await self._chat(fields, session, wanted, ChatPrompt(ids, before, messages, messages, stage))

    async def complete(self, fields: Fields, session: str | None, request: Request) -> Response:
        wanted = request_params.of_completion(fields, self._house(session))
        prompts = await _aside(fields, lambda: self._prompts(fields))
        for ids in prompts:  # before any is drawn
            self.policy.room(ids, "prompt")
        if len(prompts) * wanted.answers > self.drawing.most_waiting:
            most = (
                f"{len(prompts)} prompts with n {wanted.answers}: at most {self.drawing.most_waiting} answers at once"
            )
            raise InvalidRequest(f"{most} are drawn here; send fewer", "prompt")
        drawn = [self._drawn(ids, wanted, session, "prompt", number) for number, ids in enumerate(prompts)]
        answers = [Completion(ids, rollouts, []) for ids, rollouts in zip(prompts, await _all(drawn))]
        for answered in answers:
            self._recorded_by_tokens(session, answered, wanted)
        return self.replies.completions(answers, wanted)

    async def generate(self, fields: Fields, session: str | None, request: Request) -> Response:
        wanted, ids = request_params.of_generation(fields, self._house(session)), fields.ids("token_ids")
        if wanted.stream:
            raise InvalidRequest("stream is not offered here; leave it out", "stream")
        for name in ("features", "kv_transfer_params"):
            if fields.body.get(name):
                raise InvalidRequest(f"{name} is not offered; leave it out", name)
        answered = Completion(ids, await self._drawn(ids, wanted, session, "token_ids"), [])
        self._recorded_by_tokens(session, answered, wanted)
        return self.replies.generation(answered, wanted, fields.text("request_id") or session or "")

    async def tokenize(self, fields: Fields, session: str | None, request: Request) -> Response:
        if "messages" in fields:
            messages, ahead = read_messages(fields), fields.flag("add_generation_prompt", True)
            stage = self._stage(fields)
            if ahead:
                record = None if session is None else self.records.find(session)
                ids = (await _aside(fields, lambda: self.policy.conversation(messages, stage, record))).ids
            else:
                text = stage.renderer.render_text(messages, stage.tools, "messages")
                ids = self.policy.encode(text, "messages")
        else:
            text = fields.text("prompt") or ""
            special = fields.flag("add_special_tokens", True)
            ids = await _aside(fields, lambda: self.policy.encode(text, "prompt", special=special))
        strings = self.policy.tokenizer.convert_ids_to_tokens(ids) if fields.flag("return_token_strs") else None
        about = {"count": len(ids), "max_model_len": self.policy.most_tokens, "token_strs": strings}
        return JSONResponse({"tokens": ids, **about})

    async def detokenize(self, fields: Fields, session: str | None, request: Request) -> Response:
        ids = fields.ids("tokens")
        if ids:
            self.policy.check_ids(ids, "tokens")
        return JSONResponse({"prompt": self.policy.text(ids, special=True)})

    # ---- chat

    def _of_chat(self, fields: Fields, session: str | None) -> tuple[RequestParams, ChatFormat, SessionRecord | None]:
        kind = fields.part("response_format").text("type")
        if kind not in (None, "text"):
            raise InvalidRequest("response_format: only text is offered", "response_format")
        if not fields.flag("add_generation_prompt", True) or fields.flag("continue_final_message"):
            raise InvalidRequest("the model speaks next; a turn is not continued", "add_generation_prompt")
        wanted = request_params.of_chat(fields, self._house(session))
        return wanted, self._stage(fields), self.records.of(session)

    def _stage(self, fields: Fields) -> ChatFormat:
        settings = fields.part("chat_template_kwargs").body
        if wrong := [name for name in settings if name in RESERVED or not name.isidentifier()]:
            raise InvalidRequest(
                f"chat_template_kwargs: {wrong[0][:50]!r} is the server's to say", "chat_template_kwargs"
            )
        return self.policy.stage(read_tools(fields), settings)

    async def _chat(
        self, fields: Fields, session: str | None, wanted: RequestParams, conversation: ChatPrompt
    ) -> Response:
        rollouts = await self._drawn(conversation.ids, wanted, session, "messages")
        stage, messages = conversation.stage, []
        for rollout in rollouts:
            messages.append(self._message(rollout, conversation, wanted, calls=calls_are_read(fields)))
        answered = Completion(conversation.ids, rollouts, messages)
        if session is not None:
            for rollout, message in zip(rollouts, messages):
                key = stage.keys([*conversation.messages, message])[-1]
                self._record(session, rollout, conversation.before, message, conversation.said, key)
        return self.replies.chat(answered, wanted)

    def _message(self, rollout: Rollout, conversation: ChatPrompt, wanted: RequestParams, *, calls: bool) -> Message:
        parsing, stops = conversation.stage.parsing, wanted.sampling.stop_token_ids
        message = parsing.message(rollout.ids, conversation.ids, stops)
        if "tool_calls" in message and not calls:
            message = {"role": "assistant", "content": parsing.text(rollout.ids, stops)}
        return message | {"content": without_stop(message["content"], rollout, wanted)}

    # ---- drawing and records

    def _house(self, session: str | None) -> ServerDefaults:
        """As it is for this session."""
        record = None if session is None else self.records.find(session)
        house = self.policy.house
        return house if record is None or record.pinned is None else replace(house, pinned=record.pinned)

    async def _drawn(
        self, ids: list[int], wanted: RequestParams, session: str | None, param: str, number: int = 0
    ) -> list[Rollout]:
        """`number`: of the prompt in its request."""
        record = self.records.of(session)
        try:
            sampling = wanted.within(self.policy.room(ids, param))
        except InvalidRequest:
            if record is not None:
                record.refused = "context"
            raise
        if record is not None and record.most_turns is not None and len(record.turns) >= record.most_turns:
            record.refused = "turns"
            # Clients know the beginning of this line as a conversation's end, and judge what there is of it.
            words = f"This model's maximum context length is reached: the episode has had its {record.most_turns} turns"
            raise InvalidRequest(words, code="max_turns")
        if record is not None:
            record.refused = None
        seed = self._seed(record, wanted, session, len(ids))
        return await self.drawing.draw(CompletionRequest(ids, sampling, wanted.answers, session, seed, number))

    def _seed(
        self, record: SessionRecord | None, wanted: RequestParams, session: str | None, length: int
    ) -> int | None:
        """Of the answers to one prompt; None: nobody has said one."""
        own = None if record is None else record.next_seed(length)
        if own is not None or wanted.seed is None:
            return own
        return stream_seed(wanted.seed, session, length)

    def _recorded_by_tokens(self, session: str | None, answered: Completion, wanted: RequestParams) -> None:
        record = self.records.of(session)
        if session is None or record is None:
            return
        before = record.read_before(answered.prompt_ids)
        for rollout in answered.rollouts:
            message = {"role": "assistant", "content": self.replies.text(rollout, wanted)}
            self._record(session, rollout, before, message, [], None)

    def _record(
        self,
        session: str,
        rollout: Rollout,
        before: RecordedTurn | None,
        message: Message,
        said: list[Message],
        key: bytes | None,
    ) -> None:
        ended, record = self.policy.ended(rollout), self.records.of(session)
        assert record is not None, "a session has one"
        turn = record.add(rollout, before, message, ended=ended, said=said, key=key)
        self.records.grown(session, turn)

    def _prompts(self, fields: Fields) -> list[list[int]]:
        """One text or list of ids, or a list of such."""
        found = fields.body.get("prompt")
        listed: Sequence[Any] = [found] if is_text(found) or are_ids(found) else found  # type: ignore[assignment]
        right = isinstance(listed, list) and 0 < len(listed) <= MOST_PROMPTS
        if not right or not all(is_text(prompt) or are_ids(prompt) for prompt in listed):
            raise fields.wrong("prompt", f"a text, a list of token ids, or a list of at most {MOST_PROMPTS} of either")
        return [
            self.policy.encode(prompt, "prompt", special=True) if is_text(prompt) else list(prompt) for prompt in listed
        ]


async def _all(working: Sequence[Coroutine[Any, Any, Made]]) -> list[Made]:
    """What each of them makes; if one fails, nobody wants the others'."""
    if len(working) == 1:  # which most requests are
        return [await working[0]]
    tasks = [asyncio.ensure_future(one) for one in working]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _aside(fields: Fields, make: Callable[[], Made]) -> Made:
    """In a thread, where the request is large."""
    return make() if fields.size < LARGE else await asyncio.to_thread(make)


# ---- The HTTP side of a policy server: what other projects' clients ask for, at the places where t


log = logging.getLogger(__name__)

MOST_BYTES = 2**25
LONGEST_NAME = 512  # of a session

NOT_OFFERED = {
    "/v1/embeddings": "this server answers prompts, and has no embeddings",
    "/v1/responses": "this server has /v1/chat/completions in its place",
    "/v1/load_lora_adapter": "adapters are not loaded by name; serve the model with its adapter merged",
    "/v1/unload_lora_adapter": "adapters are not loaded by name",
    "/update_weights": "weights are not taken over HTTP; in training the server has the trained ones",
    "/init_weight_transfer_engine": "weights are not taken over HTTP; in training the server has the trained ones",
    "/pause": "the server is not paused from outside; during an update of the weights requests wait",
    "/resume": "the server is not paused from outside",
}

TYPES: Mapping[int, str] = {401: "authentication_error", 404: "not_found_error", 500: "server_error"}
LATER = {"Retry-After": "1"}

Answer = Callable[[Fields, str | None, Request], Awaitable[Response]]
Elsewhere = Callable[[Request, bytes], Awaitable[Response]]


def make_policy_app(
    policy: ServedPolicy,
    drawing: CompletionBackend,
    records: SessionStore,
    metrics: PolicyMetrics,
    *,
    token: str | None = None,
    max_bytes: int = MOST_BYTES,
    version: Callable[[], int] = lambda: 0,
    elsewhere: Elsewhere | None = None,
) -> Starlette:
    """`token`: what requests must bring; `version`: of the weights; `elsewhere`: who answers in another process what
    belongs to a session, or asks for what all processes know together. `state.gate` of what is returned lets requests
    in."""
    gate = RequestGate(give_up=lambda: drawing.close(ServerClosing()))
    asking = CompletionEndpoints(policy, drawing, records)

    def session_of(request: Request, fields: Fields | None) -> str | None:
        named = request.path_params.get("session") or request.headers.get("x-session-id")
        if named is None and fields is not None:
            named = fields.text("session_id")
        if named is None and token is None and not records.private:
            named = bearer_token(request) or None
        if named is not None and len(named) > LONGEST_NAME:
            raise InvalidRequest(f"the session's name has more than {LONGEST_NAME} characters", "session_id")
        return named

    def posted(path: str, answer: Answer, *, in_one_place: bool = False) -> list[Route]:
        """`in_one_place`: where the sessions are, whether one is named or not."""

        async def handle(request: Request) -> Response:
            response: Response
            counted = False
            try:
                with gate.entered():
                    authenticate(request, token)
                    content = await read_body(request, max_bytes, "send less at once")
                    fields = Fields(json_object(content), size=len(content))
                    _check_model(fields, policy.name)
                    session = session_of(request, fields)
                    if elsewhere is not None and (in_one_place or session is not None):
                        counted, answering = True, elsewhere(request, content)
                    else:
                        answering = answer(fields, session, request)
                    response = await _unless_gone(request, answering)
            except ClientDisconnect:
                response = Response(status_code=499)  # which nobody reads
            except Exception as error:
                response = error_response(error)
            if not counted:
                metrics.count(path, response.status_code)
            return response

        return [Route(prefix + path, handle, methods=["POST"]) for prefix in ("", "/s/{session}")]

    def got(
        path: str,
        answer: Callable[[Request], Response],
        *,
        for_all: bool = False,
        by_all: Callable[[], bool] = lambda: False,
    ) -> list[Route]:
        """`for_all`: without a token; `by_all`: whether every process can say it."""

        async def handle(request: Request) -> Response:
            try:
                if not for_all:
                    authenticate(request, token)
                if elsewhere is None or by_all():
                    return answer(request)
                return await elsewhere(request, b"")
            except Exception as error:
                return error_response(error)

        return [Route(prefix + path, handle, methods=["GET"]) for prefix in ("", "/s/{session}")]

    def models(request: Request) -> Response:
        about = {"id": policy.name, "object": "model", "created": 0, "owned_by": "trimtab", "root": policy.name}
        return JSONResponse({"object": "list", "data": [about | {"parent": None, "max_model_len": policy.most_tokens}]})

    def health(request: Request) -> Response:
        closing = gate.closed or drawing.closed
        status = {"status": "closing" if closing else "ok", "model": policy.name, "version": version()}
        return JSONResponse(status, 503 if closing else 200)

    def page(request: Request) -> Response:
        return PlainTextResponse(metrics.page(waiting=drawing.waiting, sessions=len(records)))

    def trace(request: Request) -> Response:
        session = session_of(request, None)
        record = None if session is None else records.find(session)
        if session is None or record is None:
            raise InvalidRequest("nothing was drawn in this session, or it is long ago", "session", status=404)
        return JSONResponse({"session": session, "model": policy.name, **record.trace()})

    async def open_session(fields: Fields, session: str | None, request: Request) -> Response:
        name = records.issue()
        return JSONResponse({"session": name, "base_url": f"/s/{name}/v1"})

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = NOT_OFFERED.get(request.url.path)
        if words is not None:
            return error_body(501, words, code="not_offered")
        return error_body(
            error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}", code="not_found"
        )

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        drawing.close(ServerClosing())

    routes = [
        *posted("/v1/chat/completions", asking.chat),
        *posted("/v1/chat/completions/tokens", asking.chat_with_tokens),
        *posted("/v1/completions", asking.complete),
        *posted("/inference/v1/generate", asking.generate),
        *posted("/tokenize", asking.tokenize),
        *posted("/detokenize", asking.detokenize),
        *(posted("/sessions", open_session, in_one_place=True) if records.private else []),
        *got("/v1/models", models, by_all=lambda: True),
        *got("/health", health, for_all=True, by_all=lambda: gate.closed),
        *got("/metrics", page),
        *got("/trace", trace),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: refused, 405: refused})
    app.state.gate = gate
    return app


def _check_model(fields: Fields, name: str) -> None:
    asked = fields.text("model")
    if asked is not None and asked != name:
        words = f"the model {asked[:200]!r} is not served here; it is {name!r}"
        raise InvalidRequest(words, "model", "model_not_found", status=404)


async def _unless_gone(request: Request, answer: Awaitable[Response]) -> Response:
    """The answer; what is being drawn for a client that has gone is given up."""
    answering = asyncio.ensure_future(answer)
    leaving: asyncio.Task[Any] = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return await answering
    finally:
        answering.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def error_response(error: Exception) -> JSONResponse:
    match error:
        case InvalidRequest():
            return error_body(error.status, str(error), param=error.param, code=error.code)
        case HTTPError():
            # What is still being sent would be read as the next request.
            headers = {"Connection": "close"} if error.status in (408, 413) else {}
            # Clients of this protocol know 400 where others say 422.
            return error_body(400 if error.status == 422 else error.status, str(error), headers=headers)
        case UserError():
            return error_body(400, str(error))
        case Overloaded():
            return error_body(503, "too many requests wait; try again", code="overloaded", headers=LATER)
        case ServerClosing():
            words = "the server is about to end; ask another one, or try again"
            return error_body(503, words, code="closing", headers={**LATER, "Connection": "close"})
        case EngineFailed():
            return error_body(500, f"the engine cannot answer this: {error}")
        case _:
            log.error("a request failed", exc_info=error)
            return error_body(500, "the server failed; its log says why")


def error_body(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    kind = TYPES.get(status, "overloaded_error" if status == 503 else "invalid_request_error")
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status, dict(headers or {}))
