"""What each endpoint does with a request: read it, have it drawn, keep a record, answer."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from trimtab.envs.types import Message
from trimtab.rollout.types import Rollout
from trimtab.serving import wanted as reading
from trimtab.serving.drawing import Drawing, Turn
from trimtab.serving.fields import Fields, are_ids, is_text
from trimtab.serving.messages import calls_are_read, read_messages, read_tools
from trimtab.serving.policy import Conversation, ServedPolicy, Stage
from trimtab.serving.records import Record, RecordedTurn, Records
from trimtab.serving.refusals import NotUnderstood
from trimtab.serving.replies import Answered, Replies, without_stop
from trimtab.serving.seeds import stream_seed
from trimtab.serving.wanted import House, Wanted

LARGE = 2**17  # bytes, beyond which others should not wait for their being tokenised
MOST_PROMPTS = 256

# Of chat templates, what is not a client's to say.
RESERVED = {"chat_template", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "documents"}
RESERVED |= {"messages", "conversation", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
RESERVED |= {"return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now"}

Made = TypeVar("Made")


class Asking:
    def __init__(self, policy: ServedPolicy, drawing: Drawing, records: Records):
        self.policy, self.drawing, self.records = policy, drawing, records
        self.replies = Replies(policy)

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
        return await self._chat(fields, session, wanted, Conversation(ids, before, messages, messages, stage))

    async def complete(self, fields: Fields, session: str | None, request: Request) -> Response:
        wanted = reading.of_completion(fields, self._house(session))
        prompts = await _aside(fields, lambda: self._prompts(fields))
        for ids in prompts:  # before any is drawn
            self.policy.room(ids, "prompt")
        if len(prompts) * wanted.answers > self.drawing.most_waiting:
            most = (
                f"{len(prompts)} prompts with n {wanted.answers}: at most {self.drawing.most_waiting} answers at once"
            )
            raise NotUnderstood(f"{most} are drawn here; send fewer", "prompt")
        drawn = [self._drawn(ids, wanted, session, "prompt", number) for number, ids in enumerate(prompts)]
        answers = [Answered(ids, rollouts, []) for ids, rollouts in zip(prompts, await _all(drawn))]
        for answered in answers:
            self._recorded_by_tokens(session, answered, wanted)
        return self.replies.completions(answers, wanted)

    async def generate(self, fields: Fields, session: str | None, request: Request) -> Response:
        wanted, ids = reading.of_generation(fields, self._house(session)), fields.ids("token_ids")
        if wanted.stream:
            raise NotUnderstood("stream is not offered here; leave it out", "stream")
        for name in ("features", "kv_transfer_params"):
            if fields.body.get(name):
                raise NotUnderstood(f"{name} is not offered; leave it out", name)
        answered = Answered(ids, await self._drawn(ids, wanted, session, "token_ids"), [])
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

    def _of_chat(self, fields: Fields, session: str | None) -> tuple[Wanted, Stage, Record | None]:
        kind = fields.part("response_format").text("type")
        if kind not in (None, "text"):
            raise NotUnderstood("response_format: only text is offered", "response_format")
        if not fields.flag("add_generation_prompt", True) or fields.flag("continue_final_message"):
            raise NotUnderstood("the model speaks next; a turn is not continued", "add_generation_prompt")
        wanted = reading.of_chat(fields, self._house(session))
        return wanted, self._stage(fields), self.records.of(session)

    def _stage(self, fields: Fields) -> Stage:
        settings = fields.part("chat_template_kwargs").body
        if wrong := [name for name in settings if name in RESERVED or not name.isidentifier()]:
            raise NotUnderstood(
                f"chat_template_kwargs: {wrong[0][:50]!r} is the server's to say", "chat_template_kwargs"
            )
        return self.policy.stage(read_tools(fields), settings)

    async def _chat(self, fields: Fields, session: str | None, wanted: Wanted, conversation: Conversation) -> Response:
        rollouts = await self._drawn(conversation.ids, wanted, session, "messages")
        stage, messages = conversation.stage, []
        for rollout in rollouts:
            messages.append(self._message(rollout, conversation, wanted, calls=calls_are_read(fields)))
        answered = Answered(conversation.ids, rollouts, messages)
        if session is not None:
            for rollout, message in zip(rollouts, messages):
                key = stage.keys([*conversation.messages, message])[-1]
                self._record(session, rollout, conversation.before, message, conversation.said, key)
        return self.replies.chat(answered, wanted)

    def _message(self, rollout: Rollout, conversation: Conversation, wanted: Wanted, *, calls: bool) -> Message:
        parsing, stops = conversation.stage.parsing, wanted.sampling.stop_token_ids
        message = parsing.message(rollout.ids, conversation.ids, stops)
        if "tool_calls" in message and not calls:
            message = {"role": "assistant", "content": parsing.text(rollout.ids, stops)}
        return message | {"content": without_stop(message["content"], rollout, wanted)}

    # ---- drawing and records

    def _house(self, session: str | None) -> House:
        """As it is for this session."""
        record = None if session is None else self.records.find(session)
        house = self.policy.house
        return house if record is None or record.pinned is None else replace(house, pinned=record.pinned)

    async def _drawn(
        self, ids: list[int], wanted: Wanted, session: str | None, param: str, number: int = 0
    ) -> list[Rollout]:
        """`number`: of the prompt in its request."""
        record = self.records.of(session)
        try:
            sampling = wanted.within(self.policy.room(ids, param))
        except NotUnderstood:
            if record is not None:
                record.refused = "context"
            raise
        if record is not None and record.most_turns is not None and len(record.turns) >= record.most_turns:
            record.refused = "turns"
            # Clients know the beginning of this line as a conversation's end, and judge what there is of it.
            words = f"This model's maximum context length is reached: the episode has had its {record.most_turns} turns"
            raise NotUnderstood(words, code="max_turns")
        if record is not None:
            record.refused = None
        seed = self._seed(record, wanted, session, len(ids))
        return await self.drawing.draw(Turn(ids, sampling, wanted.answers, session, seed, number))

    def _seed(self, record: Record | None, wanted: Wanted, session: str | None, length: int) -> int | None:
        """Of the answers to one prompt; None: nobody has said one."""
        own = None if record is None else record.next_seed(length)
        if own is not None or wanted.seed is None:
            return own
        return stream_seed(wanted.seed, session, length)

    def _recorded_by_tokens(self, session: str | None, answered: Answered, wanted: Wanted) -> None:
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
