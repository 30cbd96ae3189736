"""Stop strings are found at the token that completes them, by decoding the end of an answer only. Every request has its
own random stream; runs are resumed by it, so its numbers stay what they are."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trimtab.errors import UserError
from trimtab.rollout.engine import TokenSession
from trimtab.rollout.sampling import SamplingParams, request_seed, stop_string_end


def by_bytes() -> Tokenizer:
    """As GPT-2's: tokens are bytes or a few of them, and split characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encode = lambda text: "".join(p[0] for p in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text))  # noqa: E731
    words = [encode(word) for word in (" the", "END", "EN", "né", " ё", "語", "\n\n", "ab")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*words, *alphabet])}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def by_pieces() -> Tokenizer:
    """As SentencePiece's: a word has its space before it, and rare characters are runs of bytes."""
    words = ["▁", "▁the", "▁EN", "D", "END", "né", "▁ё", "語", "\n", "a", "b", "E", "N", "."]
    tokens = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TOKENIZERS = {"bytes": by_bytes, "pieces": by_pieces}
STOPS = [("END",), ("\n\n", "ENDab"), (" the the",), ("語ё",), ("é", "語語"), (" ",), ("€",), ("€ab", "b€")]


def by_definition(ids, before, minimum, stops, decode):
    """The whole answer, decoded after every token."""
    if not any(stop in decode(ids) for stop in stops):
        return None
    for end in range(max(before + 1, minimum), len(ids) + 1):
        if any(stop in decode(ids[:end]) for stop in stops):
            return end
    return None


def likely(tokenizer: Tokenizer, rng: np.random.Generator) -> list[int]:
    """Words and bytes of characters in stop strings, whole and broken, so that stops come often and in many ways."""
    vocabulary = tokenizer.get_vocab()
    texts = ["END", "E", "N", "D", "\n", "é", "語", "ё", "€", " ", " the", "a", "b"]
    pieces = [[vocabulary[f"<0x{byte:02X}>"] for byte in text.encode()] for text in texts if "<0x0A>" in vocabulary]
    if not pieces:
        plain = sorted(pre_tokenizers.ByteLevel.alphabet())
        table = pre_tokenizers.ByteLevel(False, use_regex=False)
        pieces = [[vocabulary[c] for c in table.pre_tokenize_str(text)[0][0]] for text in texts]
        assert all(c in vocabulary for c in plain)
    words = [[i] for token, i in vocabulary.items() if len(token) > 1 and not token.startswith("<0x")]
    ids: list[int] = []
    while len(ids) < 120:
        piece = (pieces, words)[rng.integers(2)]
        chosen = piece[rng.integers(len(piece))]
        ids += chosen[: rng.integers(1, len(chosen) + 1)] if rng.random() < 0.1 else chosen
    return ids


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("minimum", [0, 40])
def test_the_end_is_that_of_decoding_the_whole_answer_at_every_look(kind, stops, minimum):
    tokenizer, rng = TOKENIZERS[kind](), np.random.default_rng(len(stops[0]) + minimum)
    found = 0
    for _ in range(60):
        ids, looked = likely(tokenizer, rng), 0
        while looked < len(ids):
            upto = min(len(ids), looked + int(rng.integers(1, 25)))
            end = stop_string_end(ids[:upto], looked, minimum, stops, tokenizer.decode)
            assert end == by_definition(ids[:upto], looked, minimum, stops, tokenizer.decode), (looked, upto)
            if end is not None:
                found += 1
                break
            looked = upto
    assert found > 2, "the property was hardly tried"


def test_a_look_decodes_the_tail_and_not_the_answer():
    tokenizer, lengths = by_bytes(), []

    def decode(ids):
        lengths.append(len(ids))
        return tokenizer.decode(ids)

    ids = tokenizer.get_vocab()["a"], tokenizer.get_vocab()["b"]
    answer = [ids[i % 2] for i in range(2000)]
    for looked in range(0, 2000, 8):
        assert stop_string_end(answer[: looked + 8], looked, 0, ("END",), decode) is None
    assert max(lengths) < 40


@pytest.mark.parametrize(
    "seed, request_number, expected",
    [(0, 0, 8841707400507832957), (42, 7, 3422949151222215498), (-5, 123456789, 2211324015650395779)],
)
def test_seeds_are_what_they_were(seed, request_number, expected):
    assert request_seed(seed, request_number) == expected


def test_seeds_differ_and_fit_a_tensor_of_integers():
    seeds = {request_seed(seed, request) for seed in range(20) for request in range(50)}
    assert len(seeds) == 1000 and -(2**63) <= min(seeds) < 0 < max(seeds) < 2**63


def test_an_engine_without_log_probs_of_prompts_says_so():
    session = TokenSession(SamplingParams(), vocabulary=9, context=9, owner="engine", tokenizer=None)
    with pytest.raises(UserError, match="only the built-in engine"):
        session.add([1], sampling=SamplingParams(prompt_log_probs=0))
    with pytest.raises(UserError, match="prompt_log_probs is 21"):
        SamplingParams(prompt_log_probs=21)
    with pytest.raises(UserError, match="max_new_tokens is 0"):
        SamplingParams(max_new_tokens=0)
