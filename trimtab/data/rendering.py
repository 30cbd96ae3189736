"""Rows of any supervised layout become renderings, in this process or in several.

Jinja templates run at some thousand rows a second and hold the interpreter, so large conversation sets are rendered in
worker processes. They are spawned, not forked: this process already has the threads of torch and of the tokenizer.
"""

import concurrent.futures
import logging
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trimtab.data.chat import ChatRenderer, Rendering, render_pair, render_whole
from trimtab.data.formats import SupervisedColumns, SupervisedRecord, read_supervised

logger = logging.getLogger(__name__)

CHUNK_ROWS = 1000
PARALLEL_ROWS = 30_000  # starting workers costs several seconds; below this, one process is done sooner
MOST_WORKERS = 16
DEFAULT_INPUT_TEMPLATES = ("User: {}\nAssistant: ", "User: {}\\nAssistant: ")


class RenderOptions(Protocol):
    input_template: str | None
    apply_chat_template: bool
    multiturn: bool


class SupervisedRenderer:
    """Turns rows into renderings; None stands for a row with nothing to learn (an empty response or text)."""

    def __init__(
        self, columns: SupervisedColumns, tokenizer: PreTrainedTokenizerBase, options: RenderOptions, what: str
    ):
        self.columns = columns
        self.tokenizer = tokenizer
        self.what = what
        self.as_chat = options.apply_chat_template
        self.multiturn = options.multiturn
        literal = columns.literal and options.input_template in DEFAULT_INPUT_TEMPLATES
        self.input_template = None if literal else options.input_template
        self._chat: ChatRenderer | None = None

    @property
    def chat(self) -> ChatRenderer:
        if self._chat is None:
            self._chat = ChatRenderer(self.tokenizer, multiturn=self.multiturn)
        return self._chat

    def render_rows(self, rows: list[dict[str, Any]], first: int) -> list[Rendering | None]:
        """`first` is the number of the first of these rows in the whole data set."""
        return [self._render(row, f"row {first + index + 1} of the {self.what} data") for index, row in enumerate(rows)]

    def _render(self, row: dict[str, Any], where: str) -> Rendering | None:
        record = read_supervised(row, self.columns, where)
        prompt, response = record.prompt, record.response
        if self.columns.whole_text:
            return self._render_whole(record, where)
        if response == "":
            return None
        if isinstance(prompt, str) and isinstance(response, str) and not self.as_chat:
            return render_pair(prompt, response, self.tokenizer, self.input_template)
        messages = _messages(prompt, "user")
        trained_from = len(messages) if isinstance(response, list) else None
        messages = messages + _messages(response, "assistant")
        return self.chat.render(messages, tools=record.tools, trained_from=trained_from, where=where)

    def _render_whole(self, record: SupervisedRecord, where: str) -> Rendering | None:
        prompt, response = record.prompt, record.response
        if isinstance(prompt, str) and not isinstance(response, list):
            text = prompt + (response or "")
            return render_whole(text, self.tokenizer) if text else None
        messages = _messages(prompt, "user") + _messages(response, "assistant")
        return self.chat.render_whole(messages, tools=record.tools, where=where)


def _messages(value: str | list[dict[str, Any]] | None, role: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def render_all(
    rows: Dataset, renderer: SupervisedRenderer, *, workers: int | None = None, chunk_rows: int = CHUNK_ROWS
) -> Iterator[list[Rendering | None]]:
    """Chunks of renderings in the order of the rows, the same whatever the number of workers (None: chosen here)."""
    rows = rows.select_columns(renderer.columns.names)
    starts = range(0, len(rows), chunk_rows)
    if workers is None:
        workers = _worker_count(rows, renderer)
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


def _worker_count(rows: Dataset, renderer: SupervisedRenderer) -> int:
    if len(rows) < PARALLEL_ROWS:
        return 1
    plain = all(isinstance(rows[0][name], str) for name in renderer.columns.names if name != renderer.columns.tools)
    if plain and not renderer.as_chat:
        return 1  # string concatenation: not worth a process
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, MOST_WORKERS)


def _chunk(rows: Dataset, start: int, count: int) -> list[dict[str, Any]]:
    columns = rows[start : start + count]
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


_worker_renderer: SupervisedRenderer | None = None


def _start_worker(renderer: SupervisedRenderer) -> None:
    global _worker_renderer
    _worker_renderer = renderer


def _work(rows: list[dict[str, Any]], first: int) -> list[Rendering | None]:
    return _worker_renderer.render_rows(rows, first)


def _render_in_workers(
    rows: Dataset, renderer: SupervisedRenderer, starts: range, chunk_rows: int, workers: int
) -> Iterator[list[Rendering | None]]:
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
