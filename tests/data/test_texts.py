import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from trimtab.data.tokenizer import TOKENS_AT_ONCE, byte_table, texts_of


@pytest.fixture
def tokenizer():
    """Every byte, some words of several, one of them ending inside a character, and tokens that were added."""
    names = [*sorted(ByteLevel.alphabet()), "Ġthe", "Ã¤", "âĤ", "æĹ¥æľ¬", "Ċ"]
    core = Tokenizer(models.BPE({name: token for token, name in enumerate(dict.fromkeys(names))}, []))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>"])
    core.add_tokens(["a b", "ünï", AddedToken("<|tool|>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_texts_by_the_table_are_those_of_the_decoder(tokenizer):
    rng, known = np.random.default_rng(0), len(tokenizer)
    lengths = [0, 1, 2, 7, *rng.integers(1, 300, 200).tolist(), TOKENS_AT_ONCE + 1, 5]
    ids = [rng.integers(0, known + 3, length, dtype=np.int32) for length in lengths]  # three that nobody knows
    lists = [own.tolist() for own in ids]
    wanted = tokenizer.backend_tokenizer.decode_batch(lists, skip_special_tokens=True)
    assert byte_table(tokenizer).texts(ids) == texts_of(tokenizer, lists) == wanted
    assert any("\ufffd" in text for text in wanted) and any("日本" in text for text in wanted)


def test_every_token_alone_says_what_the_decoder_says(tokenizer):
    every = [[token] for token in range(len(tokenizer))]
    assert byte_table(tokenizer).texts(every) == tokenizer.batch_decode(every, skip_special_tokens=True)


def test_tokens_that_are_added_later_are_known(tokenizer):
    assert texts_of(tokenizer, [[1]])
    tokenizer.add_tokens(["later"])
    assert texts_of(tokenizer, [[len(tokenizer) - 1]]) == ["later"]


def test_texts_that_are_not_made_of_bytes_are_left_to_the_tokenizer(tokenizer):
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    assert byte_table(tokenizer) is None
    assert texts_of(tokenizer, [np.array([5, 6])]) == [tokenizer.decode([5, 6])]
