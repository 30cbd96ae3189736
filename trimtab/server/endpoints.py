"""The policy server's endpoints: OpenAI's chat and completions, vLLM's tokens-in-tokens-out, and their app.

Each endpoint parses its request (request_params.py), gets completions (request_queue.py), records them if a session is
named (sessions.py), and writes a response (responses.py). Every path exists a second time behind /s/{session}, whose
turns are kept together. A client's mistake is a 4xx with one sentence, in OpenAI's error format.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from trimtab.envs.types import Message
from trimtab.errors import UserError
from trimtab.rollout.trajectory import Trajectory
from trimtab.server.http import (
    RequestGate,
    ServerClosing,
    StreamedResponse,
    answer_json,
    as_http_error,
    authenticate,
    bearer_token,
    reports_of,
    until_disconnect,
)
from trimtab.server.request_params import (
    Fields,
    InvalidRequest,
    RequestParams,
    ServerDefaults,
    are_ids,
    chat_params,
    completion_params,
    generate_params,
    is_text,
    parses_tool_calls,
    read_messages,
    read_tools,
)
from trimtab.server.request_queue import CompletionBackend, CompletionRequest, EngineFailed, PolicyMetrics
from trimtab.server.responses import AnswerStream, Completion, ResponseBuilder, as_event, usage_of, without_stop
from trimtab.server.sessions import (
    ChatFormat,
    ChatPrompt,
    RecordedTurn,
    ServedPolicy,
    SessionRecord,
    SessionStore,
    stream_seed,
)

MOST_BYTES = 2**25  # of a request
LARGE = 2**17  # bytes: other requests should not wait while more is tokenized
MOST_PROMPTS = 256
LONGEST_NAME = 512  # of a session

# Arguments of chat templates that clients may not set.
RESERVED = {"chat_template", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "documents"}
RESERVED |= {"messages", "conversation", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
RESERVED |= {"return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now"}

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
ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    500: "server_error",
    503: "overloaded_error",
}

Made = TypeVar("Made")
Endpoint = Callable[[Fields, str | None], Awaitable[Response]]
Forward = Callable[[Request, bytes], Awaitable[Response]]


class CompletionEndpoints:
    """The endpoints that take prompts; each gets the request's fields and the name of its session."""

    def __init__(self, policy: ServedPolicy, backend: CompletionBackend, sessions: SessionStore):
        self.policy, self.backend, self.sessions = policy, backend, sessions
        self.responses = ResponseBuilder(policy)

    async def chat(self, fields: Fields, session: str | None) -> Response:
        params, chat_format, record = self._read_chat(fields, session)
        messages = read_messages(fields)
        prompt = await _in_thread_if_large(fields, lambda: self.policy.chat_prompt(messages, chat_format, record))
        return await self._complete_chat(fields, session, params, prompt)

    async def chat_with_tokens(self, fields: Fields, session: str | None) -> Response:
        """Chat with a prompt that the client has tokenized."""
        params, chat_format, record = self._read_chat(fields, session)
        messages, ids = read_messages(fields), fields.ids("tokens")
        if ids:
            self.policy.check_ids(ids, "tokens")
        before = None if record is None else record.turn_before_ids(ids)
        return await self._complete_chat(
            fields, session, params, ChatPrompt(ids, before, messages, messages, chat_format)
        )

    async def completions(self, fields: Fields, session: str | None) -> Response:
        params = completion_params(fields, self._defaults(session))
        prompts = await _in_thread_if_large(fields, lambda: self._prompts(fields))
        least = 0 if params.limit == 0 else 1
        for ids, _ in prompts:  # all of them, before anything is sampled
            self.policy.max_new_tokens(ids, "prompt", least)
        if len(prompts) * params.answers > self.backend.most_waiting:
            asked = f"{len(prompts)} prompts with n {params.answers}"
            raise InvalidRequest(
                f"{asked}: at most {self.backend.most_waiting} answers at once are drawn here; send fewer", "prompt"
            )
        requests = [self._request(ids, params, session, "prompt", number) for number, (ids, _) in enumerate(prompts)]
        echoed: list[tuple[list[int], str]] = [([], "")] * len(prompts)
        if params.echo:
            decode = partial(self.policy.text, special=True)
            echoed = [(ids, decode(ids) if text is None else text) for ids, text in prompts]
        if params.stream:

            def finished(index: int, rollout: Trajectory) -> Message:
                number = index // params.answers
                self._record_tokens(session, Completion(prompts[number][0], [rollout], []), params)
                return {"content": echoed[number][1] + self.responses.text(rollout, params)}

            streams = [
                AnswerStream(self.policy, special=params.special_tokens, echoed=prompt)
                for prompt in echoed
                for _ in range(params.answers)
            ]
            certain = lambda stream, text: {"content": stream.prompt_text + text}  # noqa: E731
            return await self._stream("text", requests, params, streams, certain, finished)
        drawn = await _all([self.backend.complete(request) for request in requests])
        found = [Completion(ids, own, [], prompt) for (ids, _), own, prompt in zip(prompts, drawn, echoed)]
        for completion in found:
            self._record_tokens(session, completion, params)
        return self.responses.completions(found, params)

    async def generate(self, fields: Fields, session: str | None) -> Response:
        params, ids = generate_params(fields, self._defaults(session)), fields.ids("token_ids")
        if params.stream:
            raise InvalidRequest("stream is not offered here; leave it out", "stream")
        for name in ("features", "kv_transfer_params"):
            if fields.body.get(name):
                raise InvalidRequest(f"{name} is not offered; leave it out", name)
        request = self._request(ids, params, session, "token_ids")
        completion = Completion(ids, await self.backend.complete(request), [])
        self._record_tokens(session, completion, params)
        return self.responses.generation(completion, params, fields.text("request_id") or session or "")

    async def tokenize(self, fields: Fields, session: str | None) -> Response:
        if "messages" in fields:
            messages, with_turn = read_messages(fields), fields.boolean("add_generation_prompt", True)
            chat_format = self._chat_format(fields)
            if with_turn:
                record = None if session is None else self.sessions.find(session)
                make = lambda: self.policy.chat_prompt(messages, chat_format, record)  # noqa: E731
                ids = (await _in_thread_if_large(fields, make)).ids
            else:
                text = chat_format.renderer.render_text(messages, chat_format.tools, "messages")
                ids = self.policy.encode(text, "messages")
        else:
            text = fields.text("prompt") or ""
            special = fields.boolean("add_special_tokens", True)
            ids = await _in_thread_if_large(fields, lambda: self.policy.encode(text, "prompt", special=special))
        strings = self.policy.tokenizer.convert_ids_to_tokens(ids) if fields.boolean("return_token_strs") else None
        about = {"count": len(ids), "max_model_len": self.policy.max_model_len, "token_strs": strings}
        return JSONResponse({"tokens": ids, **about})

    async def detokenize(self, fields: Fields, session: str | None) -> Response:
        ids = fields.ids("tokens")
        if ids:
            self.policy.check_ids(ids, "tokens")
        return JSONResponse({"prompt": self.policy.text(ids, special=True)})

    async def open_session(self, fields: Fields, session: str | None) -> Response:
        name = self.sessions.issue()
        return JSONResponse({"session": name, "base_url": f"/s/{name}/v1"})

    # ---- reading requests

    def _read_chat(self, fields: Fields, session: str | None) -> tuple[RequestParams, ChatFormat, SessionRecord | None]:
        kind = fields.object("response_format").text("type")
        if kind not in (None, "text"):
            raise InvalidRequest("response_format: only text is offered", "response_format")
        if not fields.boolean("add_generation_prompt", True) or fields.boolean("continue_final_message"):
            raise InvalidRequest("the model speaks next; a turn is not continued", "add_generation_prompt")
        params = chat_params(fields, self._defaults(session))
        return params, self._chat_format(fields), self.sessions.get_or_create(session)

    def _chat_format(self, fields: Fields) -> ChatFormat:
        settings = fields.object("chat_template_kwargs").body
        if wrong := [name for name in settings if name in RESERVED or not name.isidentifier()]:
            raise InvalidRequest(
                f"chat_template_kwargs: {wrong[0][:50]!r} is the server's to say", "chat_template_kwargs"
            )
        return self.policy.chat_format(read_tools(fields), settings)

    def _defaults(self, session: str | None) -> ServerDefaults:
        """The server's defaults, with the sampling that this session pins."""
        record = None if session is None else self.sessions.find(session)
        defaults = self.policy.defaults
        return defaults if record is None or record.pinned is None else replace(defaults, pinned=record.pinned)

    def _prompts(self, fields: Fields) -> list[tuple[list[int], str | None]]:
        """One text or list of ids, or a list of such: ids, with the text if that was given."""
        found = fields.body.get("prompt")
        listed: Sequence[Any] = [found] if is_text(found) or are_ids(found) else found  # type: ignore[assignment]
        right = isinstance(listed, list) and 0 < len(listed) <= MOST_PROMPTS
        if not right or not all(is_text(prompt) or are_ids(prompt) for prompt in listed):
            raise fields.wrong("prompt", f"a text, a list of token ids, or a list of at most {MOST_PROMPTS} of either")
        return [
            (self.policy.encode(prompt, "prompt", special=True), prompt) if is_text(prompt) else (prompt, None)
            for prompt in listed
        ]

    # ---- completions and their records

    def _request(
        self, ids: list[int], params: RequestParams, session: str | None, param: str, number: int = 0
    ) -> CompletionRequest:
        """`param`: the field that holds the prompt; `number`: of the prompt in its request."""
        record = self.sessions.get_or_create(session)
        try:
            most = self.policy.max_new_tokens(ids, param, 0 if params.limit == 0 else 1)
        except InvalidRequest:
            if record is not None:
                record.refused = "context"
            raise
        limit = most if params.limit is None else min(params.limit, most)
        sampling = replace(params.sampling, max_new_tokens=limit)
        seed = None
        if record is not None:
            if record.most_turns is not None and len(record.turns) >= record.most_turns:
                record.refused = "turns"
                # Clients treat the beginning of this message as the end of a conversation, and score what they have.
                words = f"This model's maximum context length is reached: the episode has had its {record.most_turns} "
                raise InvalidRequest(words + "turns", code="max_turns")
            record.refused = None
            seed = record.next_seed(len(ids))
        if seed is None and params.seed is not None:
            seed = stream_seed(params.seed, session, len(ids))
        return CompletionRequest(ids, sampling, params.answers, session, seed, number, params.stream)

    async def _stream(
        self,
        kind: Literal["chat", "text"],
        requests: Sequence[CompletionRequest],
        params: RequestParams,
        streams: Sequence[AnswerStream],
        certain: Callable[[AnswerStream, str], Message],
        finished: Callable[[int, Trajectory], Message],
    ) -> Response:
        """Chunks as tokens are drawn. `certain`: the message of a text that goes on; `finished`: of an answer, which it
        records."""

        def draw(report: Callable[[Any], None]) -> Awaitable[Any]:
            def add(first: int, answer: int, piece: Trajectory) -> None:
                report((first + answer, piece))

            firsts = [number * params.answers for number in range(len(requests))]
            return _all([self.backend.complete(one, partial(add, first)) for one, first in zip(requests, firsts)])

        arriving = reports_of(draw)
        head = self.responses.chunk(kind, params)
        choices_of = self.responses.chat_choices if kind == "chat" else self.responses.completion_choices
        last = await anext(arriving)  # what fails before is a response with its status

        async def events() -> AsyncIterator[bytes]:
            nonlocal last
            read, sampled = sum(len(request.prompt_ids) for request in requests), 0
            while isinstance(last, tuple):  # then comes the result of all
                (index, piece), last = last, None
                stream, ended = streams[index], piece.finish is not None
                # An engine without alternatives of unfinished answers has them at the end.
                if ended or piece.alternatives is not None or not params.sampling.top_log_probs:
                    new = stream.take(piece)
                    sampled += len(new.tokens)
                    hidden = params.hidden_stops
                    message = finished(index, piece) if ended else certain(stream, stream.certain_text(hidden))
                    ids = requests[index // params.answers].prompt_ids
                    first = {"prompt_token_ids": ids} if params.token_ids and not stream.begun else {}
                    for choice in choices_of(index, stream, new, message, params):
                        yield as_event(head | {"choices": [choice]} | first)
                        stream.begun, first = True, {}
                last = await anext(arriving)
            if params.stream_usage:
                yield as_event(head | {"choices": [], "usage": usage_of(read, sampled)})
            yield as_event("[DONE]")

        return StreamedResponse(events())

    async def _complete_chat(
        self, fields: Fields, session: str | None, params: RequestParams, prompt: ChatPrompt
    ) -> Response:
        request, calls = self._request(prompt.ids, params, session, "messages"), parses_tool_calls(fields)
        parsing = prompt.format.parsing

        def finished(index: int, rollout: Trajectory) -> Message:
            message = self._message(rollout, prompt, params, calls=calls)
            if session is not None:
                key = prompt.format.history_keys([*prompt.messages, message])[-1]
                self._record(session, rollout, prompt.before, message, prompt.new_messages, key)
            return message

        if params.stream:
            opened = parsing.opened(prompt.ids)

            def certain(stream: AnswerStream, text: str) -> Message:
                if parsing.by_template:  # it parses whole turns only
                    return {"content": ""}
                return parsing.hermes(text, opened=opened, calls=calls, whole=False)

            streams = [AnswerStream(self.policy, special=True) for _ in range(params.answers)]
            return await self._stream("chat", [request], params, streams, certain, finished)
        rollouts = await self.backend.complete(request)
        messages = [finished(index, rollout) for index, rollout in enumerate(rollouts)]
        return self.responses.chat(Completion(prompt.ids, rollouts, messages), params)

    def _message(self, rollout: Trajectory, prompt: ChatPrompt, params: RequestParams, *, calls: bool) -> Message:
        stops = params.sampling.stop_token_ids
        message = prompt.format.parsing.message(rollout.ids, prompt.ids, stops, calls=calls)
        last = "reasoning_content" if message.get("reasoning_content") and not message["content"] else "content"
        return message | {last: without_stop(message[last], rollout, params)}

    def _record_tokens(self, session: str | None, completion: Completion, params: RequestParams) -> None:
        """Record a completion of an endpoint that takes tokens."""
        record = self.sessions.get_or_create(session)
        if session is None or record is None:
            return
        before = record.turn_before_ids(completion.prompt_ids)
        for rollout in completion.rollouts:
            message = {"role": "assistant", "content": self.responses.text(rollout, params)}
            self._record(session, rollout, before, message, [], None)

    def _record(
        self,
        session: str,
        rollout: Trajectory,
        before: RecordedTurn | None,
        message: Message,
        new_messages: list[Message],
        key: bytes | None,
    ) -> None:
        ended, record = self.policy.ended(rollout), self.sessions.get_or_create(session)
        assert record is not None, "a session has one"
        turn = record.add(rollout, before, message, ended=ended, new_messages=new_messages, key=key)
        self.sessions.grown(session, turn)


async def _all(working: Sequence[Coroutine[Any, Any, Made]]) -> list[Made]:
    """The results of all coroutines; if one fails, the others are cancelled."""
    if len(working) == 1:  # as in most requests
        return [await working[0]]
    tasks = [asyncio.ensure_future(one) for one in working]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _in_thread_if_large(fields: Fields, make: Callable[[], Made]) -> Made:
    return make() if fields.size < LARGE else await asyncio.to_thread(make)


# ---- the app


def make_policy_app(
    policy: ServedPolicy,
    backend: CompletionBackend,
    sessions: SessionStore,
    metrics: PolicyMetrics,
    *,
    token: str | None = None,
    max_bytes: int = MOST_BYTES,
    version: Callable[[], int] = lambda: 0,
    forward: Forward | None = None,
) -> Starlette:
    """The app of the policy server; `app.state.gate` admits its requests.

    `token`: the bearer token that requests need; `version`: of the weights; `forward`: in an HTTP worker, sends a
    request
    to the engine's process, for requests of sessions and those that need the state of all workers.
    """
    gate = RequestGate(give_up=lambda: backend.close(ServerClosing()))
    endpoints = CompletionEndpoints(policy, backend, sessions)

    def session_of(request: Request, fields: Fields | None) -> str | None:
        named = request.path_params.get("session") or request.headers.get("x-session-id")
        if named is None and fields is not None:
            named = fields.text("session_id")
        if named is None and token is None and not sessions.private:
            named = bearer_token(request) or None
        if named is not None and len(named) > LONGEST_NAME:
            raise InvalidRequest(f"the session's name has more than {LONGEST_NAME} characters", "session_id")
        return named

    def post(path: str, endpoint: Endpoint, *, forwarded: bool = False) -> list[Route]:
        """`forwarded`: an HTTP worker forwards it even without a session."""

        async def handle(request: Request) -> Response:
            counted_elsewhere = False

            async def answer(body: dict[str, Any], content: bytes) -> Response:
                nonlocal counted_elsewhere
                fields = Fields(body, size=len(content))
                asked = fields.text("model")
                if asked is not None and asked != policy.name:
                    words = f"the model {asked[:200]!r} is not served here; it is {policy.name!r}"
                    raise InvalidRequest(words, "model", "model_not_found", status=404)
                session = session_of(request, fields)
                if forward is not None and (forwarded or session is not None):
                    counted_elsewhere = True
                    return await until_disconnect(request.receive, forward(request, content))
                return await until_disconnect(request.receive, endpoint(fields, session))

            how: dict[str, Any] = {"token": token, "max_bytes": max_bytes, "advice": "send less at once"}
            response = await answer_json(request, gate, answer, error_response, **how)
            if isinstance(response, StreamedResponse):
                response.gate, response.error_response = gate, error_response
            if not counted_elsewhere:
                metrics.count(path, response.status_code)
            return response

        return [Route(prefix + path, handle, methods=["POST"]) for prefix in ("", "/s/{session}")]

    def get(
        path: str, answer: Callable[[Request], Response], *, public: bool = False, local: Callable[[], bool]
    ) -> list[Route]:
        """`public`: no token needed; `local`: whether an HTTP worker answers it itself."""

        async def handle(request: Request) -> Response:
            try:
                if not public:
                    authenticate(request, token)
                return answer(request) if forward is None or local() else await forward(request, b"")
            except Exception as error:
                return error_response(error)

        return [Route(prefix + path, handle, methods=["GET"]) for prefix in ("", "/s/{session}")]

    def models(request: Request) -> Response:
        about = {"id": policy.name, "object": "model", "created": 0, "owned_by": "trimtab", "root": policy.name}
        return JSONResponse(
            {"object": "list", "data": [about | {"parent": None, "max_model_len": policy.max_model_len}]}
        )

    def health(request: Request) -> Response:
        closing = gate.closed or backend.closed
        status = {"status": "closing" if closing else "ok", "model": policy.name, "version": version()}
        return JSONResponse(status, 503 if closing else 200)

    def metrics_page(request: Request) -> Response:
        counters = {
            "prompt_tokens_total": metrics.prompt_tokens,
            "drawn_tokens_total": metrics.sampled_tokens,
            "engine_seconds_total": f"{metrics.seconds:.6f}",
        }
        gauges = {"waiting_requests": backend.waiting, "sessions": len(sessions)}
        return PlainTextResponse(metrics.page(counters, gauges))

    def trace(request: Request) -> Response:
        session = session_of(request, None)
        record = None if session is None else sessions.find(session)
        if session is None or record is None:
            raise InvalidRequest("nothing was drawn in this session, or it is long ago", "session", status=404)
        return JSONResponse({"session": session, "model": policy.name, **record.trace()})

    async def unknown_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = NOT_OFFERED.get(request.url.path)
        if words is not None:
            return error_json(501, words, code="not_offered")
        words = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return error_json(error.status_code, words, code="not_found")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        backend.close(ServerClosing())

    routes = [
        *post("/v1/chat/completions", endpoints.chat),
        *post("/v1/chat/completions/tokens", endpoints.chat_with_tokens),
        *post("/v1/completions", endpoints.completions),
        *post("/inference/v1/generate", endpoints.generate),
        *post("/tokenize", endpoints.tokenize),
        *post("/detokenize", endpoints.detokenize),
        *(post("/sessions", endpoints.open_session, forwarded=True) if sessions.private else []),
        *get("/v1/models", models, local=lambda: True),
        *get("/health", health, public=True, local=lambda: gate.closed),
        *get("/metrics", metrics_page, local=lambda: False),
        *get("/trace", trace, local=lambda: False),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: unknown_path, 405: unknown_path})
    app.state.gate = gate
    return app


def error_response(error: Exception) -> Response:
    """A failed request's response, in OpenAI's error format."""
    match error:
        case ClientDisconnect():
            return Response(status_code=499)  # nobody receives it
        case InvalidRequest():
            return error_json(error.status, str(error), param=error.param, code=error.code)
        case UserError():
            return error_json(400, str(error))
        case EngineFailed():
            return error_json(500, f"the engine cannot answer this: {error}")
    known = as_http_error(error)
    # OpenAI's clients expect 400 instead of 422.
    return error_json(400 if known.status == 422 else known.status, str(known), code=known.code, headers=known.headers)


def error_json(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    kind = ERROR_TYPES.get(status, "invalid_request_error")
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status, dict(headers or {}))
