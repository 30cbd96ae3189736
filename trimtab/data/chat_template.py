"""Rows as text, with the character spans that carry loss.

For conversations the spans come from the chat template itself. A template that marks them ({% generation %}) is asked.
For any other, the conversation is rendered twice: as it is, and with every assistant turn replaced by a marker. What
lies between the markers is the template's scaffolding; found again in the real rendering, it delimits what the
template made of each turn, also where it strips, rewrites or adds text (thinking blocks).
"""

import contextlib
import datetime
import re
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from transformers import PreTrainedTokenizerBase

from trimtab.data.formats import Message, Rendering
from trimtab.errors import UserError

# The day on which every template believes to be rendered, so that tomorrow's tokens equal today's. It is the one that
# Llama's templates fall back to themselves.
TEMPLATE_DAY = datetime.date(2024, 7, 26)
GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def with_end(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text, ended by the tokenizer's EOS (unless it is already, or there is none)."""
    end = tokenizer.eos_token
    return text if end is None or text.endswith(end) else text + end


def render_whole(text: str, tokenizer: PreTrainedTokenizerBase) -> Rendering:
    """Language modelling: all of it is trained."""
    text = with_end(text, tokenizer)
    return Rendering(text, [(0, len(text))])


def in_template(prompt: str, input_template: str | None) -> str:
    # Not str.format: braces elsewhere in the template or in the data are just text.
    before, hole, after = (input_template or "").partition("{}")
    return before + prompt + after if hole else prompt


def render_pair(
    prompt: str, response: str, tokenizer: PreTrainedTokenizerBase, input_template: str | None
) -> Rendering:
    """A prompt in its template, followed by the trained response and EOS."""
    prompt = in_template(prompt, input_template)
    text = prompt + with_end(response, tokenizer)
    return Rendering(text, [(len(prompt), len(text))])


def fix_date(template: str) -> None:
    """Let a template believe that it is TEMPLATE_DAY.

    A variable does not do: since transformers 5.22 they are plain data, not functions. Compiled templates are cached,
    so the next rendering is by the one that is changed here.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    _compile_jinja_template(template).environment.globals["strftime_now"] = TEMPLATE_DAY.strftime


def _refusal(where: str, error: Exception) -> UserError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return UserError(f"{where}: the chat template cannot render this conversation ({reason[:200]})")


class ChatRenderer:
    """Renders conversations through the tokenizer's chat template."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, multiturn: bool = False, settings: dict[str, Any] | None = None
    ):
        """`settings`: what else the template is told."""
        if not tokenizer.chat_template:
            raise UserError(
                "the tokenizer has no chat template, and the data are conversations (or --apply_chat_template is "
                "set): give one with --tokenizer_chat_template"
            )
        self.tokenizer = tokenizer
        self.multiturn, self.settings = multiturn, settings or {}
        names = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        names.update(token for token in [*tokenizer.all_special_tokens, tokenizer.eos_token] if token)
        alternatives = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        self._end_of_turn = re.compile(rf"\s*(?:{alternatives})" if names else r"(?!)")
        self._last_end = re.compile(rf"\s*(?:{alternatives})+" if names else r"(?!)")
        self._generation_prompts: dict[bool, str] = {}

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[Any] | None = None,
        trained_from: int | None = None,
        where: str = "the conversation",
    ) -> Rendering:
        """Loss on the last assistant turn; with `multiturn` on every one; else on those from message `trained_from`."""
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns or turns[-1] != len(messages) - 1:
            last = messages[-1]["role"] if messages else "none"
            raise UserError(f"{where}: the last turn is '{last}', but there must be an assistant turn to learn from")
        first = 0 if self.multiturn else turns[-1] if trained_from is None else trained_from
        wanted = [number for number, index in enumerate(turns) if index >= first]
        if GENERATION_BLOCK.search(self.tokenizer.get_chat_template(tools=tools)):
            return self._from_generation_blocks(messages, tools, wanted, len(turns), where)
        text = self.render_text(messages, tools, where)
        # Tool calls and reasoning are the turn's own words, so the marker stands for them too; a template that needs
        # to see them (to render the tool's answer) gets a second chance with only the content replaced.
        for keep_extras in (False, True):
            marked = self._marked(messages, turns, tools, text, keep_extras)
            for whole_opening in (True, False):
                spans = marked and self._align(text, messages, turns, *marked, tools, whole_opening)
                if marked and spans and self._is_plausible(text, messages, turns, spans, wanted):
                    return self._close(text, spans, marked, wanted)
        raise UserError(
            f"{where}: cannot tell where the chat template puts the assistant's words; use a template that marks them "
            "with {% generation %} ... {% endgeneration %} (--tokenizer_chat_template)"
        )

    def render_whole(self, messages: list[Message], *, tools: list[Any] | None = None, where: str = "") -> Rendering:
        """The rendered conversation with loss on all of it."""
        return render_whole(self.render_text(messages, tools, where), self.tokenizer)

    def render_prompt(self, messages: list[Message], *, tools: list[Any] | None = None, where: str = "") -> str:
        """The conversation up to where the assistant is to speak."""
        return self.render_text(messages, tools, where, prompt=True)

    def render_text(
        self, messages: list[Message], tools: list[Any] | None = None, where: str = "", prompt: bool = False
    ) -> str:
        """As the template writes it; with `prompt`, up to where the assistant is to speak next."""
        try:
            with template_time():
                fix_date(self.tokenizer.get_chat_template(tools=tools))
                return self.tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    **self.settings,
                )
        except Exception as error:  # templates raise what they like: jinja2's errors, TypeError, KeyError, ...
            raise _refusal(where, error) from error

    def _from_generation_blocks(
        self, messages: list[Message], tools: list[Any] | None, wanted: list[int], turns: int, where: str
    ) -> Rendering:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            # What apply_chat_template itself calls for its assistant mask, but as characters, for any tokenizer.
            with template_time():
                fix_date(template := self.tokenizer.get_chat_template(tools=tools))
                texts, spans = render_jinja_template(
                    conversations=[messages],
                    tools=tools,
                    chat_template=template,
                    return_assistant_tokens_mask=True,
                    **self.tokenizer.special_tokens_map,
                )
        except Exception as error:
            raise _refusal(where, error) from error
        merged: list[tuple[int, int]] = []
        for start, end in spans[0]:
            if merged and merged[-1][1] == start:
                start = merged.pop()[0]
            if end > start:
                merged.append((start, end))
        if not merged:
            raise UserError(f"{where}: the chat template's generation block is empty for this conversation")
        if len(merged) == turns:
            merged = [merged[number] for number in wanted]
        elif not self.multiturn:
            merged = merged[-1:]
        return Rendering(texts[0], merged)

    def _marked(
        self, messages: list[Message], turns: list[int], tools: list[Any] | None, text: str, keep_extras: bool
    ) -> tuple[list[str], list[int]] | None:
        """The scaffolding around the assistant turns, and the numbers of the turns that the template shows."""
        stem = "Marker"
        while stem in text:
            stem += "X"
        marked = list(messages)
        markers = [f"{stem}{number}Z" for number in range(len(turns))]
        for marker, index in zip(markers, turns):
            extras = messages[index] if keep_extras else {}
            as_parts = isinstance(messages[index].get("content"), list)
            content = [{"type": "text", "text": marker}] if as_parts else marker
            marked[index] = {**extras, "role": "assistant", "content": content}
        try:
            rest = self.render_text(marked, tools, "")
        except UserError:
            return None
        pieces, shown = [], []
        for number, marker in enumerate(markers):
            if rest.count(marker) > 1:
                return None
            piece, found, after = rest.partition(marker)
            if found:
                pieces.append(piece)
                shown.append(number)
                rest = after
        return ([*pieces, rest], shown) if shown and shown[-1] == len(turns) - 1 else None

    def _align(
        self,
        text: str,
        messages: list[Message],
        turns: list[int],
        pieces: list[str],
        shown: list[int],
        tools: list[Any] | None,
        whole_opening: bool,
    ) -> dict[int, tuple[int, int]] | None:
        """Where each shown turn lies in the real text: after its generation prompt, before the next scaffolding."""
        # Text that the template writes after the generation prompt is the model's to write: it is trained.
        cuts = [self._end_of_opening(piece, tools, whole_opening) for piece in pieces[:-1]]
        headers = [piece[:cut] for piece, cut in zip(pieces, cuts)]
        following = [*headers[1:], pieces[-1]]
        if not text.startswith(headers[0]):
            return None
        position = len(headers[0])
        spans = {}
        for number, turn in enumerate(shown):
            content, inserted = messages[turns[turn]].get("content"), pieces[number][cuts[number] :]
            is_last = number == len(shown) - 1
            end = self._find_end(text, position, inserted, content, following[number], is_last)
            if end is None:
                return None
            spans[turn] = (position, end)
            position = end + len(following[number])
        return spans

    def _end_of_opening(self, piece: str, tools: list[Any] | None, whole: bool) -> int:
        """Where, in the scaffolding before a turn, the generation prompt ends."""
        opening = self._generation_prompt(tools)
        # Some prompts open a thinking block, which the template then closes, fills or leaves out in turns of the past.
        stem = opening.partition("<think")[0] or opening
        at = piece.rfind(stem) if stem else -1
        if at < 0:
            return len(piece)
        length = len(stem)
        while whole and length < len(opening) and piece.startswith(opening[: length + 1], at):
            length += 1
        return at + length

    @staticmethod
    def _is_plausible(
        text: str, messages: list[Message], turns: list[int], spans: dict[int, tuple[int, int]], wanted: list[int]
    ) -> bool:
        """With tool calls the marked rendering may differ in more than the marks: no one else's words in a span."""
        if not any("tool_calls" in messages[index] for index in turns):
            return True
        if any(number not in spans for number in wanted if "tool_calls" in messages[turns[number]]):
            return False
        before = 0
        for number in sorted(spans):
            gap = text[before : spans[number][0]]
            since = turns[number - 1] + 1 if number else 0
            for message in messages[since : turns[number]]:
                words = message.get("content")
                if isinstance(words, str) and words.strip() in text and words.strip() not in gap:
                    return False
            before = spans[number][1]
        return True

    @staticmethod
    def _find_end(text: str, start: int, inserted: str, content: Any, after: str, is_last: bool) -> int | None:
        """The end of a turn that begins at `start` and is followed by the scaffolding `after`."""
        if is_last:
            end = len(text) - len(after)
            return end if end >= start and text.endswith(after) else None
        if not after:
            return None
        if isinstance(content, str):
            # The content as it is, so that an answer which quotes the template's own marks does not mislead us.
            for begin in (start, start + len(inserted)):
                for words in (content, content.strip()):
                    if text[start:begin] == inserted[: begin - start] and text.startswith(words + after, begin):
                        return begin + len(words)
        end = text.find(after, start)
        return end if end >= 0 else None

    def _close(
        self,
        text: str,
        spans: dict[int, tuple[int, int]],
        marked: tuple[list[str], list[int]],
        wanted: list[int],
    ) -> Rendering:
        """Extends each wanted span over the mark that ends the turn."""
        pieces, shown = marked
        last = pieces[-1]
        if match := self._last_end.match(last):
            closing = match.group()
        else:
            # No special token ends the last turn: whatever text the template puts there does, and then EOS.
            closing = last.rstrip()
            text = with_end(text[: len(text) - len(last)] + closing, self.tokenizer)
        trained = []
        for turn, after in zip(shown, pieces[1:]):
            start, end = spans[turn]
            if turn == shown[-1]:
                end = end + len(closing) if match else len(text)
            elif closing and after.startswith(closing):
                end += len(closing)
            elif match and (other := self._end_of_turn.match(after)):
                end += other.end()
            if turn in wanted and end > start:
                trained.append((start, end))
        return Rendering(text, trained)

    def _generation_prompt(self, tools: list[Any] | None) -> str:
        """What the template writes to make the model speak."""
        key = tools is not None
        if key not in self._generation_prompts:
            probe = [{"role": "user", "content": "x"}]
            try:
                without, with_prompt = (self.render_text(probe, tools, "", prompt) for prompt in (False, True))
            except UserError:
                without = with_prompt = ""
            extends = with_prompt.startswith(without)
            self._generation_prompts[key] = with_prompt[len(without) :] if extends else ""
        return self._generation_prompts[key]


# ---- A limit on the computing time of a chat template: it is a program that came with a model, and may never end.

TEMPLATE_SECONDS = 10.0  # a rendering takes milliseconds


@contextlib.contextmanager
def template_time() -> Iterator[None]:
    """Ends what is inside with a UserError once this process has computed for so long. Signals reach main threads only,
    in which all renderings of data are made; elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _end)
    signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _end(_number: int, _frame: FrameType | None) -> None:
    raise UserError(f"the chat template was not done after {TEMPLATE_SECONDS:g} s of computing; use another one")
