"""What tokens say, by a table of every token's bytes: a tokenizer looks each token up by its name, one at a time.

Only for vocabularies of bytes (GPT-2's, and most since): their tokens are strings in an alphabet of 256 letters, one a
byte, and a text is all bytes one after another, read as UTF-8. The rule is that of the `ByteLevel` decoder.
"""

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

TOKENS_AT_ONCE = 2**15


class ByteTable:
    """The bytes of all tokens; special ones, and those that the tokenizer does not know, have none."""

    def __init__(self, names: dict[str, int], special: set[str]):
        """`names`: of all tokens."""
        found = [b""] * (2 + max(names.values(), default=-1))  # the last one is what nobody knows
        letters = _letters()
        for name, token in names.items():
            if name not in special:
                found[token] = _bytes(name, letters)
        self.lengths = np.array([len(own) for own in found], dtype=np.int32)
        self.starts = (self.lengths.cumsum() - self.lengths).astype(np.int32)
        self.bytes = np.frombuffer(b"".join(found), dtype=np.uint8)

    def texts(self, ids: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
        """Of every sequence; bytes that are no UTF-8 become U+FFFD."""
        found: list[str] = []
        part: list[np.ndarray] = []
        for own in ids:
            part.append(np.asarray(own, dtype=np.int32))
            if sum(map(len, part)) >= TOKENS_AT_ONCE:
                found += self._texts(part)
                part = []
        return found + self._texts(part) if part else found

    def _texts(self, ids: list[np.ndarray]) -> list[str]:
        tokens = np.minimum(np.concatenate(ids), len(self.lengths) - 1)
        lengths = self.lengths.take(tokens)
        ends = lengths.cumsum(dtype=np.int32)
        # Where each byte of the texts lies in the table.
        places = np.repeat(self.starts.take(tokens) - ends + lengths, lengths)
        places += np.arange(len(places), dtype=np.int32)
        text = self.bytes.take(places).tobytes()
        after = np.append(np.int32(0), ends)[np.cumsum([0, *map(len, ids)])].tolist()
        return [text[begin:end].decode("utf-8", "replace") for begin, end in pairwise(after)]


_known: weakref.WeakKeyDictionary[Any, tuple[int, ByteTable]] = weakref.WeakKeyDictionary()


def byte_table(tokenizer: Any) -> ByteTable | None:
    """Of a fast tokenizer whose text is its tokens' bytes; None: its text is made otherwise."""
    from tokenizers import decoders

    backend = tokenizer.backend_tokenizer
    if type(backend.decoder) is not decoders.ByteLevel:
        return None
    size = backend.get_vocab_size()
    known = _known.get(tokenizer)
    if known is None or known[0] != size:
        special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        known = _known[tokenizer] = size, ByteTable(backend.get_vocab(), special)
    return known[1]


def _letters() -> dict[int, int]:
    """From letters of the alphabet to bytes. Printable ones of Latin-1 are their own; the others follow from U+0100 on.
    What is no letter is no byte either."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in own]
    return {0x100 + number: byte for number, byte in enumerate(others)} | dict.fromkeys(others, 0xFFFF)


def _bytes(name: str, letters: dict[int, int]) -> bytes:
    try:
        return name.translate(letters).encode("latin-1")
    except UnicodeEncodeError:  # an added token, in letters of its own
        return name.encode("utf-8")
