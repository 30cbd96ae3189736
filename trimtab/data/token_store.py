"""Sequences of tokens, all in flat arrays."""

import functools
import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenStore:
    """N sequences: sequence i is ids[offsets[i]:offsets[i + 1]]. A sequence's first token is never marked trained."""

    ids: np.ndarray
    trained: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray | None = None
    """Which row of the data each sequence, or pair of sequences, comes from; no part of the content."""
    fingerprint: str = ""
    """Hash of the content; computed when not given."""

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray]) -> "TokenStore":
        """The sequences among the arrays of a store."""
        return cls(arrays["ids"], arrays["trained"], arrays["offsets"], arrays.get("rows"))

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


def content_hash(*arrays: np.ndarray, of: str = "") -> str:
    """Hash of the arrays, continuing from the hash `of` something that goes with them."""
    digest = hashlib.blake2b(of.encode(), digest_size=16)
    for array in arrays:
        digest.update(str((array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
