"""Rows become renderings, in this process or in several.

Jinja templates run at some thousand rows a second and hold the interpreter, so large conversation sets are rendered in
worker processes. They are spawned, not forked: this process already has the threads of torch and of the tokenizer.
"""

import concurrent.futures
import itertools
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, TypeVar

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trimtab.data.chat_template import ChatRenderer, render_pair, render_whole
from trimtab.data.data_files import Numbered, RowLocations, located
from trimtab.data.formats import (
    Message,
    Rendering,
    SupervisedColumns,
    SupervisedRecord,
    SupervisedSettings,
    read_supervised,
)

logger = logging.getLogger(__name__)

CHUNK_ROWS = 1000
PARALLEL_ROWS = 30_000  # starting workers costs several seconds; below this, one process is done sooner
MOST_WORKERS = 8
DEFAULT_INPUT_TEMPLATES = ("User: {}\nAssistant: ", "User: {}\\nAssistant: ")


class RowRenderer:
    """Turns rows of the columns `names` into what the collector of a job takes; `what` names the data in complaints."""

    def __init__(self, names: list[str], tokenizer: PreTrainedTokenizerBase, what: str):
        self.names = names
        self.tokenizer = tokenizer
        self.what = what
        self.places: RowLocations = Numbered(f"the {what} data")

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
        self, columns: SupervisedColumns, tokenizer: PreTrainedTokenizerBase, options: SupervisedSettings, what: str
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


# ---- Renderings become token ids and a mask of the tokens that carry loss.


def tokenize_renderings(
    renderings: list[Rendering], tokenizer: PreTrainedTokenizerBase
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """(ids, trained) of each rendering; a token is trained if it reaches into a trained span."""
    if not renderings:
        return
    if not tokenizer.is_fast:
        yield from (tokenize_in_pieces(rendering, tokenizer) for rendering in renderings)
        return
    encoded = tokenizer(
        [rendering.text for rendering in renderings],
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    for rendering, ids, offsets in zip(renderings, encoded["input_ids"], encoded["offset_mapping"]):
        bounds = np.fromiter(itertools.chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2)
        yield np.array(ids, dtype=np.int32), _reaches_into(bounds[:, 0], bounds[:, 1], rendering.trained)


def _reaches_into(starts: np.ndarray, ends: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    # A token of blanks may have been trimmed to no width at its own end; it stands for the character before.
    starts = np.where(starts == ends, starts - 1, starts)
    trained = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        trained |= (ends > start) & (starts < end)
    return trained


def tokenize_in_pieces(rendering: Rendering, tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, np.ndarray]:
    """The text is cut where the spans begin and end, so that no token crosses a span's edge."""
    ids: list[int] = []
    trained: list[bool] = []
    position = 0
    for start, end in [*rendering.trained, (len(rendering.text), len(rendering.text))]:
        for piece, flag in ((rendering.text[position:start], False), (rendering.text[start:end], True)):
            part = tokenizer.encode(piece, add_special_tokens=False, verbose=False) if piece else []
            ids.extend(part)
            trained.extend([flag] * len(part))
        position = end
    return np.array(ids, dtype=np.int32), np.array(trained, dtype=bool)


# ---- A progress bar that appears only when the work turns out to be long, and only to a person.


Item = TypeVar("Item")
PATIENCE_SECONDS = 2.0


def progress(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """Passes the items on; `total` is their number."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress

    began = time.monotonic()
    bar, task = None, None
    try:
        for number, item in enumerate(items, start=1):
            yield item
            if bar is None and time.monotonic() - began > PATIENCE_SECONDS:
                bar = Progress(console=Console(stderr=True), transient=True)
                bar.start()
                task = bar.add_task(label, total=total)
            if bar is not None:
                bar.update(task, completed=number)
    finally:
        if bar is not None:
            bar.stop()
