"""Rows become renderings, in this process or in several.

Jinja templates run at some thousand rows a second and hold the interpreter, so large conversation sets are rendered in
worker processes. They are spawned, not forked: this process already has the threads of torch and of the tokenizer.
"""

import concurrent.futures
import logging
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, Protocol

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trimtab.data.chat import ChatRenderer, Rendering, render_pair, render_whole
from trimtab.data.formats import Message, SupervisedColumns, SupervisedRecord, read_supervised
from trimtab.data.places import Numbered, Places, located

logger = logging.getLogger(__name__)

CHUNK_ROWS = 1000
PARALLEL_ROWS = 30_000  # starting workers costs several seconds; below this, one process is done sooner
MOST_WORKERS = 8
DEFAULT_INPUT_TEMPLATES = ("User: {}\nAssistant: ", "User: {}\\nAssistant: ")


class RenderOptions(Protocol):
    @property
    def input_template(self) -> str | None: ...

    @property
    def apply_chat_template(self) -> bool: ...

    @property
    def multiturn(self) -> bool: ...


class RowRenderer:
    """Turns rows of the columns `names` into what the collector of a job takes; `what` names the data in complaints."""

    def __init__(self, names: list[str], tokenizer: PreTrainedTokenizerBase, what: str):
        self.names = names
        self.tokenizer = tokenizer
        self.what = what
        self.places: Places = Numbered(f"the {what} data")

    def render_rows(self, rows: list[dict[str, Any]], first: int) -> list[Any]:
        """`first` is the number of the first of these rows in the whole data set."""
        return [located(partial(self.render, row), first + index, self.places) for index, row in enumerate(rows)]

    def render(self, row: dict[str, Any], where: str) -> Any:
        """One row; None stands for a row with nothing to learn."""
        raise NotImplementedError

    def needs_template(self, row: dict[str, Any]) -> bool:
        """Whether rows like this one go through a chat template, which is slow."""
        return False


class AnswerRenderer(RowRenderer):
    """Renders a prompt and the answer to it: by the chat template, or as text in `--input_template`."""

    def __init__(
        self,
        names: list[str],
        tokenizer: PreTrainedTokenizerBase,
        what: str,
        *,
        as_chat: bool,
        input_template: str | None,
        multiturn: bool = False,
    ):
        super().__init__(names, tokenizer, what)
        self.as_chat = as_chat
        self.input_template = input_template
        self.multiturn = multiturn
        self._chat: ChatRenderer | None = None

    @property
    def chat(self) -> ChatRenderer:
        if self._chat is None:
            self._chat = ChatRenderer(self.tokenizer, multiturn=self.multiturn)
        return self._chat

    def needs_template(self, row: dict[str, Any]) -> bool:
        return self.as_chat or any(isinstance(row[name], (list, dict)) for name in self.names if name != "tools")

    def render_answer(
        self,
        prompt: str | list[Message],
        response: str | list[Message] | None,
        tools: list[Any] | None,
        where: str,
    ) -> Rendering:
        """Without a response the prompt is a conversation that ends with it."""
        if isinstance(prompt, str) and isinstance(response, str) and not self.as_chat:
            return render_pair(prompt, response, self.tokenizer, self.input_template)
        messages = as_messages(prompt, "user")
        trained_from = len(messages) if isinstance(response, list) else None
        messages = messages + as_messages(response, "assistant")
        return self.chat.render(messages, tools=tools, trained_from=trained_from, where=where)


class SupervisedRenderer(AnswerRenderer):
    """Rows of any supervised layout."""

    def __init__(
        self, columns: SupervisedColumns, tokenizer: PreTrainedTokenizerBase, options: RenderOptions, what: str
    ):
        literal = columns.literal and options.input_template in DEFAULT_INPUT_TEMPLATES
        super().__init__(
            columns.names,
            tokenizer,
            what,
            as_chat=options.apply_chat_template,
            input_template=None if literal else options.input_template,
            multiturn=options.multiturn,
        )
        self.columns = columns

    def render(self, row: dict[str, Any], where: str) -> Any:
        """A Rendering, or None."""
        record = read_supervised(row, self.columns, where)
        if self.columns.whole_text:
            return self._render_whole(record, where)
        if record.response == "":
            return None
        return self.render_answer(record.prompt, record.response, record.tools, where)

    def _render_whole(self, record: SupervisedRecord, where: str) -> Rendering | None:
        prompt, response = record.prompt, record.response
        if isinstance(prompt, str) and not isinstance(response, list):
            text = prompt + (response or "")
            return render_whole(text, self.tokenizer) if text else None
        messages = as_messages(prompt, "user") + as_messages(response, "assistant")
        return self.chat.render_whole(messages, tools=record.tools, where=where)


def as_messages(value: str | list[Message] | None, role: str) -> list[Message]:
    if value is None:
        return []
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def render_all(
    rows: Dataset,
    renderer: RowRenderer,
    *,
    workers: int | None = None,
    most_workers: int | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> Iterator[list[Any]]:
    """Chunks of renderings in the order of the rows, the same whatever the number of workers.

    Without `workers` their number is chosen here, `most_workers` at most.
    """
    rows = rows.select_columns(renderer.names)
    starts = range(0, len(rows), chunk_rows)
    if workers is None:
        workers = _worker_count(rows, renderer, most_workers)
    done = 0
    if workers > 1:
        try:
            for rendered in _render_in_workers(rows, renderer, starts, chunk_rows, workers):
                done += 1
                yield rendered
            return
        except BrokenProcessPool:
            logger.warning("rendering goes on in one process: the worker processes could not be started or died")
    for start in starts[done:]:
        yield renderer.render_rows(_chunk(rows, start, chunk_rows), start)


def _worker_count(rows: Dataset, renderer: RowRenderer, most: int | None) -> int:
    if len(rows) < PARALLEL_ROWS or not renderer.needs_template(rows[0]):
        return 1  # too few rows, or string concatenation: not worth a process
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return most or min(available, MOST_WORKERS)


def _chunk(rows: Dataset, start: int, count: int) -> list[dict[str, Any]]:
    columns = rows[start : start + count]
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


_worker_renderer: RowRenderer | None = None


def _start_worker(renderer: RowRenderer) -> None:
    global _worker_renderer
    _worker_renderer = renderer


def _work(rows: list[dict[str, Any]], first: int) -> list[Any]:
    assert _worker_renderer is not None
    return _worker_renderer.render_rows(rows, first)


def _render_in_workers(
    rows: Dataset, renderer: RowRenderer, starts: range, chunk_rows: int, workers: int
) -> Iterator[list[Any]]:
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start_worker, (renderer,)
    )
    try:
        pending: list[concurrent.futures.Future] = []
        for start in starts:  # a few chunks ahead, so that memory stays bounded
            pending.append(pool.submit(_work, _chunk(rows, start, chunk_rows), start))
            if len(pending) >= 2 * workers:
                yield pending.pop(0).result()
        while pending:
            yield pending.pop(0).result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
