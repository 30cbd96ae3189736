"""The tokenizer of a model, ready for training."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trimtab.data.faults import first_line
from trimtab.data.hub import hub_or_cache, looks_like_hub_name, needs_code, trust_remote_code
from trimtab.data.texts import byte_table
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
