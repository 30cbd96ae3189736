"""Tokenised data on disk, in `$TRIMTAB_CACHE/tokens` or `~/.cache/trimtab/tokens`, one folder a key.

The key hashes the content of the columns in use (their Arrow bytes, about a gigabyte a second), the tokenizer, its
chat template and the options that matter, so an edited file or option can never meet an old entry. An entry is a
convenience: one that is broken is made again, and a cache that cannot be written is a line of warning. Nothing is ever
evicted; deleting the folder is safe at any time.
"""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tokenizers
import transformers
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trimtab.files import reason, replacing

logger = logging.getLogger(__name__)

FORMAT_VERSION = 4
NOTES = "notes.json"
HASH_ROWS = 10_000


def folder() -> Path:
    return Path(os.environ.get("TRIMTAB_CACHE") or Path.home() / ".cache" / "trimtab") / "tokens"


def key(rows: Dataset, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> str | None:
    """The name of the entry for this work, or None for a tokenizer that cannot be written down (a slow one)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not tokenizer.is_fast or backend is None:
        return None
    serialised = json.loads(backend.to_str())
    serialised.pop("padding", None)  # left behind by earlier calls, set anew by each
    serialised.pop("truncation", None)
    parts = [
        FORMAT_VERSION,
        transformers.__version__,
        tokenizers.__version__,
        rows_hash(rows),
        type(tokenizer).__name__,
        serialised,
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        tokenizer.chat_template,
        settings,
    ]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def rows_hash(rows: Dataset) -> str:
    sink = _HashSink()
    writer = None
    for part in rows.with_format("arrow").iter(batch_size=HASH_ROWS):
        if writer is None:
            # The names of features that Arrow does not know (JSON values) are in the schema's metadata.
            writer = pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), part.schema)
        writer.write_table(part)
    if writer is not None:
        writer.close()
    return sink.digest.hexdigest()


class _HashSink:
    """A file that only remembers the hash of what was written."""

    closed = False

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return len(data)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def load(name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """(arrays mapped from disk, notes), or None if there is no entry or it cannot be read."""
    entry = folder() / name
    try:
        notes = json.loads((entry / NOTES).read_text())
        return {array: np.load(entry / f"{array}.npy", mmap_mode="r") for array in notes["arrays"]}, notes
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def save(name: str, arrays: dict[str, np.ndarray], notes: dict[str, Any]) -> None:
    """A reader sees a whole entry or none."""
    entry = folder() / name
    try:
        # An entry that is there could not be used: else this one would not have been made.
        with replacing(entry) as beside:
            beside.mkdir()
            for array, values in arrays.items():
                np.save(beside / f"{array}.npy", values)
            (beside / NOTES).write_text(json.dumps({**notes, "arrays": list(arrays)}))
    except OSError as error:
        if not entry.exists():  # else another process was first with the same content
            logger.warning("tokenised data are not cached: cannot write %s (%s)", entry.parent, reason(error))
