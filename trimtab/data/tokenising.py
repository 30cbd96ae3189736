"""Renderings become token ids and a mask of the tokens that carry loss."""

import itertools
from collections.abc import Iterable

import numpy as np
from transformers import PreTrainedTokenizerBase

from trimtab.data.chat import Rendering


def tokenise(
    renderings: list[Rendering], tokenizer: PreTrainedTokenizerBase
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """(ids, trained) of each rendering; a token is trained if it reaches into a trained span."""
    if not renderings:
        return
    if not tokenizer.is_fast:
        yield from (tokenise_in_pieces(rendering, tokenizer) for rendering in renderings)
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


def tokenise_in_pieces(rendering: Rendering, tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, np.ndarray]:
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
