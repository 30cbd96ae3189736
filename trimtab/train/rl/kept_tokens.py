"""tokens.jsonl: the answers of rollouts.jsonl token by token, for a person to see where a model was unsure and what is
reinforced.

step, answer     which row of rollouts.jsonl it belongs to
texts            of the tokens after the prompt; a character of several tokens is at the first of them
drawn            how many tokens are the model's, then the world's, and so on; the model's carry the loss
log_probs        of the drawn tokens, as they were drawn
advantages       of the drawn tokens, as [value, how many] one after another; not in evaluation
left_out         [place, how many]: of a longer answer the middle is not kept

Written beside the run's figures and read by none of them.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.train.metrics import MetricsFile
from trimtab.train.rl.experience import Experience

FIRST, LAST = 384, 128  # tokens of an answer that are kept at most, from its beginning and from its end
UNREADABLE = "\ufffd"
MOST_OF_A_CHARACTER = 8  # tokens


class KeptTokens:
    def __init__(self, folder: Path, tokenizer: Any, *, resume_from: int | None):
        self._file = MetricsFile(folder / "tokens.jsonl", resume_from=resume_from)
        self._texts = TokenTexts(tokenizer)

    def write(self, step: int, answer: int, experience: Experience, i: int) -> None:
        self._file.write({"step": step, "answer": answer, **described(experience, i, self._texts)})

    def close(self) -> None:
        self._file.close()


def described(experience: Experience, i: int, texts: "TokenTexts") -> dict[str, Any]:
    ids, drawn = np.array(experience.response(i)), experience.drawn(i).numpy()
    start, length = int(experience.starts_S[i]), int(experience.lengths_S[i])
    kept = np.ones(len(ids), dtype=bool)
    kept[FIRST : max(FIRST, len(ids) - LAST)] = False
    of_drawn = kept[drawn]
    log_probs = experience.sampled_N[start : start + length].numpy()[of_drawn]
    parts = [ids] if kept.all() else np.split(ids[kept], [FIRST])
    found: dict[str, Any] = {
        "texts": [text for part in parts for text in texts.of(part.tolist())],
        "drawn": _stretches(drawn[kept].tolist()),
        "log_probs": [_rounded(value) for value in log_probs.tolist()],
    }
    if experience.advantages_N is not None:
        advantages = experience.advantages_N[start : start + length].numpy()[of_drawn].tolist()
        runs = itertools.groupby(map(_rounded, advantages))
        found["advantages"] = [[value, len(list(run))] for value, run in runs]
    if not kept.all():
        found["left_out"] = [FIRST, int((~kept).sum())]
    return found


class TokenTexts:
    """What single tokens look like within a text."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, ids: list[int]) -> list[str]:
        """One text for each token, which joined are the text of all of them."""
        texts = [self._alone(token) for token in ids]
        place = 0
        while place < len(ids):
            if UNREADABLE in texts[place]:
                place += self._character(ids, texts, place)
            else:
                place += 1
        return texts

    def _alone(self, token: int) -> str:
        if token not in self._known:
            # At the beginning of a text some tokenizers drop a space, so the second of two is looked at.
            once, twice = self._decode([token]), self._decode([token, token])
            self._known[token] = twice[len(once) :] if twice.startswith(once) else once
        return self._known[token]

    def _character(self, ids: list[int], texts: list[str], place: int) -> int:
        """Give the first of several tokens the character that they are together; how many they are."""
        for count in range(2, min(MOST_OF_A_CHARACTER, len(ids) - place) + 1):
            together = self._decode(ids[place : place + count])
            if UNREADABLE not in together:
                texts[place : place + count] = [together, *[""] * (count - 1)]
                return count
        return 1

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def _stretches(drawn: list[bool]) -> list[int]:
    runs = [(mask, len(list(run))) for mask, run in itertools.groupby(drawn)]
    lengths = [length for _, length in runs]
    return [0, *lengths] if runs and not runs[0][0] else lengths


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
