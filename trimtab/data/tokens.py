"""Token sequences, flat and cached: what training reads.

A store holds all sequences one after another (ids, a mask of the trained tokens, offsets) as plain arrays, mapped from
disk when they come from the cache. What this leaves out: labels other than a mask; preference pairs get their own.
"""

import functools
import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trimtab.data import token_cache
from trimtab.data.chat import Rendering
from trimtab.data.formats import recognise_supervised
from trimtab.data.progress import progress
from trimtab.data.rendering import CHUNK_ROWS, SupervisedRenderer, render_all
from trimtab.errors import UserError

QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


class SupervisedOptions(Protocol):
    input_key: str
    output_key: str | None
    input_template: str | None
    apply_chat_template: bool
    multiturn: bool
    pretrain_mode: bool
    max_len: int


OPTIONS_THAT_MATTER = (
    "input_key",
    "output_key",
    "input_template",
    "apply_chat_template",
    "multiturn",
    "pretrain_mode",
    "max_len",
)


@dataclass(frozen=True)
class TokenStore:
    """N sequences: sequence i is ids[offsets[i]:offsets[i + 1]]. A sequence's first token is never marked trained."""

    ids: np.ndarray
    trained: np.ndarray
    offsets: np.ndarray
    fingerprint: str = ""
    """Hash of the content; computed when not given."""

    def __post_init__(self) -> None:
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", content_hash(self.ids, self.trained, self.offsets))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def example(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, trained) of one sequence."""
        if not 0 <= index < len(self):
            raise IndexError(f"no sequence {index} in a store of {len(self)}")
        here = slice(self.offsets[index], self.offsets[index + 1])
        return self.ids[here], self.trained[here]


def content_hash(ids: np.ndarray, trained: np.ndarray, offsets: np.ndarray) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in (ids, trained, offsets):
        digest.update(str((array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


@dataclass
class DataReport:
    """What became of the rows."""

    what: str
    layout: str
    rows_read: int = 0
    rows_kept: int = 0
    rows_truncated: int = 0
    rows_over_long: int = 0
    rows_empty: int = 0
    max_len: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    lengths: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        share = self.trained_tokens / max(self.tokens, 1)
        text = [
            f"{self.what} data: {self.rows_kept:,} of {self.rows_read:,} rows ({self.layout}), "
            f"{self.tokens:,} tokens, {self.trained_tokens:,} of them trained ({share:.0%})",
            "lengths: " + ", ".join(f"{name} {value:,}" for name, value in self.lengths.items()),
        ]
        if self.rows_truncated:
            text.append(f"{self.rows_truncated:,} rows cut to {self.max_len:,} tokens (--max_len)")
        if self.rows_over_long:
            text.append(
                f"{self.rows_over_long:,} rows left out: nothing to learn within {self.max_len:,} tokens (--max_len)"
            )
        if self.rows_empty:
            text.append(f"{self.rows_empty:,} rows left out: empty response")
        return text


def build_sft_store(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: SupervisedOptions,
    *,
    what: str = "train",
    workers: int | None = None,
) -> tuple[TokenStore, DataReport]:
    """Renders, tokenises and truncates the rows, or finds the result of the same work in the cache."""
    if not len(rows):
        raise UserError(f"the {what} data hold no rows")
    columns = recognise_supervised(rows.column_names, options, rows[0])
    renderer = SupervisedRenderer(columns, tokenizer, options, what)
    settings = {name: getattr(options, name) for name in OPTIONS_THAT_MATTER}
    key = token_cache.key(rows.select_columns(columns.names), tokenizer, {"job": "sft", **settings})
    if key is not None and (found := _from_cache(key, what)):
        return found
    report = DataReport(what, columns.description, rows_read=len(rows), max_len=options.max_len)
    builder = _Builder(tokenizer, options.max_len, report)
    chunks = render_all(rows, renderer, workers=workers)
    for chunk in progress(chunks, -(-len(rows) // CHUNK_ROWS), f"tokenising the {what} data"):
        builder.add(chunk)
    store = builder.finish()
    if key is not None:
        arrays = {"ids": store.ids, "trained": store.trained, "offsets": store.offsets}
        token_cache.save(key, arrays, {"fingerprint": store.fingerprint, "report": report.as_dict()})
    return store, report


def _from_cache(key: str, what: str) -> tuple[TokenStore, DataReport] | None:
    found = token_cache.load(key)
    if found is None:
        return None
    arrays, notes = found
    try:
        store = TokenStore(**arrays)
        report = DataReport(**{**notes["report"], "what": what})
        intact = store.fingerprint == notes["fingerprint"]
    except (TypeError, KeyError):
        return None
    return (store, report) if intact else None


class _Builder:
    """Collects renderings, tokenised batch by batch, into one store."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_len: int, report: DataReport):
        self.tokenizer = tokenizer
        self.max_len = max_len
        self.report = report
        self.ids: list[np.ndarray] = []
        self.trained: list[np.ndarray] = []

    def add(self, renderings: list[Rendering | None]) -> None:
        present = [rendering for rendering in renderings if rendering is not None]
        self.report.rows_empty += len(renderings) - len(present)
        for ids, trained in tokenise(present, self.tokenizer):
            trained[:1] = False  # nothing predicts the first token
            if not trained.any():
                self.report.rows_empty += 1
            elif not trained[: self.max_len].any():
                self.report.rows_over_long += 1
            else:
                self.report.rows_truncated += len(ids) > self.max_len
                self.ids.append(ids[: self.max_len])
                self.trained.append(trained[: self.max_len])

    def finish(self) -> TokenStore:
        report = self.report
        if not self.ids:
            raise UserError(
                f"no row of the {report.what} data is left: of {report.rows_read:,}, {report.rows_over_long:,} have "
                f"nothing to learn within {self.max_len:,} tokens (raise --max_len), {report.rows_empty:,} are empty"
            )
        lengths = np.array([len(ids) for ids in self.ids], dtype=np.int64)
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        store = TokenStore(np.concatenate(self.ids), np.concatenate(self.trained), offsets)
        report.rows_kept = len(store)
        report.tokens = len(store.ids)
        report.trained_tokens = int(store.trained.sum())
        ordered = np.sort(lengths)
        report.lengths = {name: int(ordered[round(q * (len(ordered) - 1))]) for name, q in QUANTILES.items()}
        return store


def tokenise(
    renderings: list[Rendering], tokenizer: PreTrainedTokenizerBase
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """(ids, trained) of each rendering; a token is trained if it reaches into a trained span."""
    if not renderings:
        return
    if not tokenizer.is_fast:
        yield from (_tokenise_in_pieces(rendering, tokenizer) for rendering in renderings)
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


def _tokenise_in_pieces(rendering: Rendering, tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, np.ndarray]:
    """For tokenizers that cannot say which characters a token covers: the text is cut where the spans begin and end."""
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
