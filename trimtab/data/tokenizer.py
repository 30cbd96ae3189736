"""The tokenizer of a model, ready for training."""

import ast
import os
import re
import weakref
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trimtab.data.data_files import first_line
from trimtab.data.hub import hub_or_cache, looks_like_hub_name, needs_code, trust_remote_code
from trimtab.errors import UserError


def load_tokenizer(
    pretrain: str, *, disable_fast: bool = False, chat_template: str | None = None, flag: str = "--pretrain"
) -> PreTrainedTokenizerBase:
    """Loads from a folder or the hub. A missing pad token becomes EOS: no new id, so the model needs no resizing."""
    is_folder = Path(pretrain).expanduser().is_dir()
    if not is_folder and not looks_like_hub_name(pretrain):
        raise UserError(f"cannot find the model folder '{pretrain}' ({flag})")
    arguments = {"use_fast": not disable_fast, "trust_remote_code": trust_remote_code()}
    try:
        if is_folder:
            tokenizer = AutoTokenizer.from_pretrained(os.path.expanduser(pretrain), **arguments)
        else:
            with hub_or_cache() as reachable:
                tokenizer = AutoTokenizer.from_pretrained(pretrain, local_files_only=not reachable, **arguments)
    except Exception as error:
        if (why := needs_code(error)) is not None:
            raise UserError(f"{flag} {pretrain}: its tokenizer {why}") from error
        if isinstance(error, StrictDataclassError):
            raise UserError(f"{flag} {pretrain}: transformers refuses its config.json: {_fault(error)}") from error
        if is_folder:
            if not any(Path(pretrain).expanduser().glob("*token*")):
                raise UserError(f"{flag} {pretrain}: no tokenizer.json in this folder; copy it there") from error
            reason = "the folder holds no tokenizer that can be loaded (is tokenizer.json there?)"
            raise UserError(f"cannot load the tokenizer of '{pretrain}': {reason}: {first_line(error)}") from error
        if reachable:
            raise UserError(f"cannot load the tokenizer of '{pretrain}' from the hub: {first_line(error)}") from error
        raise UserError(
            f"cannot load the tokenizer of '{pretrain}': no such local folder, and the hub cannot be reached "
            f"(check {flag}, or the network and HF_HUB_OFFLINE)"
        ) from error
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(f"the tokenizer of '{pretrain}' has neither a pad nor an EOS token: set eos_token in it")
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
    return tokenizer


def _fault(error: StrictDataclassError) -> str:
    """What is wrong in a config.json, without the long lists in transformers' message."""
    listed = re.search(r"`(\w+)` entries must be in (\(.*\)) but got (\[.*\])", str(error))
    if listed is None:
        return str(error).splitlines()[-1].strip()
    known, found = (ast.literal_eval(values) for values in listed.groups()[1:])
    unknown = ", ".join(sorted({str(kind) for kind in found if kind not in known}))
    return f"{listed[1]} has {unknown}, which version {transformers.__version__} does not know; correct it or upgrade"


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text that has its special tokens written out, such as a rendered conversation."""
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


def decode_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of all tokens, special ones included."""
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)


DECODING = ("decode", "batch_decode", "_decode")  # a tokenizer may have its own ways


def texts_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[list[int] | np.ndarray]) -> list[str]:
    """What the tokens of each sequence say, without special ones."""
    if not decodes_fast(tokenizer) or tokenizer.clean_up_tokenization_spaces:
        return tokenizer.batch_decode(_lists(ids), skip_special_tokens=True)
    if (table := byte_table(tokenizer)) is not None:
        return table.texts(ids)
    # The same on all processors, and without a look at every number in Python.
    return tokenizer.backend_tokenizer.decode_batch(_lists(ids), skip_special_tokens=True)


def decodes_fast(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether its backend alone makes texts of tokens."""
    own, known = type(tokenizer), PreTrainedTokenizerFast
    return issubclass(own, known) and all(getattr(own, name) is getattr(known, name) for name in DECODING)


def _lists(ids: Sequence[list[int] | np.ndarray]) -> list[list[int]]:
    return [own.tolist() if isinstance(own, np.ndarray) else own for own in ids]


def read_chat_template(value: str) -> str:
    """`--tokenizer_chat_template` is a template or the path of a file that holds one."""
    if "{" in value or "\n" in value:
        return value
    path = Path(value).expanduser()
    if not path.is_file():
        raise UserError(f"--tokenizer_chat_template '{value}' is neither a template nor a file that exists")
    return path.read_text(encoding="utf-8")


# ---- What tokens say, by a table of every token's bytes: a tokenizer looks each token up by its name, one at a time
#
# Only for vocabularies of bytes (GPT-2's, and most since): their tokens are strings in an alphabet of 256 letters,
# one a byte, and a text is all bytes one after another, read as UTF-8. The rule is that of the `ByteLevel` decoder.


TOKENS_AT_ONCE = 2**15


class ByteTable:
    """The bytes of all tokens; special and unknown ones have none."""

    def __init__(self, names: dict[str, int], special: set[str]):
        """`names`: of all tokens."""
        found = [b""] * (2 + max(names.values(), default=-1))  # the last one stands for unknown ids
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


# ---- A tokenizer of 256 bytes and a token that ends a turn: whatever is written in it comes back as it was.


END = "<|end|>"


def byte_tokenizer(chat_template: str) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=END,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
