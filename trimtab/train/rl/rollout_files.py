"""Saved samples of a run: rollouts.jsonl and tokens.jsonl for reading, figures for metrics rows, time_line.jsonl.

For every iteration, rollouts.jsonl has the best and worst answers, each once, and whole groups of a few prompts: the
first prompts of the evaluation, and the training prompts whose scrambled row number is lowest, so that the same prompts
are followed over time. Rows of metrics have histograms of rewards and lengths, and the mean scores of up to
MOST_PROMPTS prompts. A row of tokens.jsonl shows where the model was unsure and which tokens are reinforced:

step, answer     the row of rollouts.jsonl it belongs to
texts            of the tokens after the prompt; a character of several tokens is at its first token
drawn            run lengths: tokens of the model, then of the environment, and so on; the model's carry the loss
log_probs        of the model's tokens, at sampling time
advantages       of the model's tokens, as [value, count] runs; not in evaluation
left_out         [position, count]: the middle of a long answer is not saved

time_line.jsonl has the time spans of trainer and engines, which overlap in asynchronous runs. A row is {"lane":
"trainer", "what": "update", "begin": 12.5, "end": 13.1, "iteration": 4}; seconds count from the start of the run,
without the time between a stop and a resume. The lane "trainer" has the phases of an iteration; "engine 0" generates
("writing") and "rewards 0" scores ("judging") in the first process with an engine.
"""

import itertools
import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimtab.algos.group_rewards import for_groups
from trimtab.files import writing
from trimtab.rewards.types import EPISODE_LOGS
from trimtab.rollout.episode import EpisodeRecord, Segment
from trimtab.train.metrics import CLOCK_FIELDS, MetricsFile, read_rows
from trimtab.train.rl.experience import FINISHES, Experience

GROUPS = 2  # of an iteration
EVALUATION_GROUPS = 4
MOST_ANSWERS = 16  # of a group
MOST_ITERATIONS = 50  # about this many iterations keep groups, and the first ten
BINS = 12
MOST_PROMPTS = 256
SCRAMBLE = 2654435761  # Knuth's multiplicative hash: chosen rows are spread over the file


def best_and_worst(experience: Experience, count: int) -> dict[int, str]:
    """Up to `count` different answers, half of them the best and half the worst; episodes by their last branch."""
    ends, rows = experience.lasts_E, experience.rows_S.tolist()
    order = ends[experience.answer_rewards_S[ends].argsort(descending=True, stable=True)].tolist()
    seen: dict[tuple[int, bytes], int] = {}
    for i in order:
        seen.setdefault((rows[i], experience.response_bytes(i)), i)
    different = list(seen.values())
    count = min(count, len(different))
    worst = different[len(different) - count // 2 :]
    return dict.fromkeys(different[: count - count // 2], "best") | dict.fromkeys(worst, "worst")


def whole_groups(experience: Experience, iteration: int, total: int) -> list[int]:
    """The answers to a few prompts, if this iteration saves whole groups."""
    if iteration > 10 and iteration % max(1, total // MOST_ITERATIONS):
        return []
    first = experience.rows_S[experience.firsts_G].tolist()
    chosen = sorted(range(len(first)), key=lambda group: _key(first[group]))[:GROUPS]
    ends = set(experience.lasts_E.tolist())
    return [i for i in _shown(experience, sorted(chosen)) if i in ends]


def of_evaluation(experience: Experience) -> Experience:
    """The evaluation answers to save: those to the first prompts."""
    return experience.take(_shown(experience, range(min(EVALUATION_GROUPS, experience.groups))))


def _shown(experience: Experience, groups: Iterable[int]) -> list[int]:
    """The first answers of each group, with all their branches."""
    found = []
    for group in groups:
        samples = experience.samples_of([group])
        first = int(experience.episodes_S[samples[0]])
        found += [i for i in samples if experience.episodes_S[i] - first < MOST_ANSWERS]
    return found


def sample_fields(experience: Experience, i: int) -> dict[str, Any]:
    """Reward, its parts and the mean advantage of an answer, for rollouts.jsonl."""
    logs = {name: values for name, values in experience.logs.items() if f"reward/{name}" not in CLOCK_FIELDS}
    parts = {name: float(values[i]) for name, values in logs.items() if not values[i].isnan()}
    found: dict[str, Any] = {"reward": float(experience.answer_rewards_S[i])}
    if len(parts) > 1:
        found["parts"] = parts
    if experience.advantages_N is not None and experience.lengths_S[i]:
        found["advantage"] = float(experience.advantages_N[experience.tokens_of([i])].mean())
    return found


def distributions(experience: Experience) -> dict[str, list]:
    """Columns for a row of metrics: [lowest, highest, count, ...] of rewards and lengths, and [row, score] of
    prompts."""
    firsts_E = experience.firsts_E
    means_G = for_groups(lambda scores_GA: scores_GA.mean(1), experience.groups_E, experience.scores_S[firsts_E])
    scores = {}
    for row, score in zip(experience.rows_S[experience.firsts_G].tolist(), means_G.tolist()):
        scores[row] = round(score, 4)
    followed = sorted(scores, key=_key)[:MOST_PROMPTS]
    return {
        "reward_histogram": _histogram(experience.answer_rewards_S[firsts_E]),
        "length_histogram": _histogram(experience.lengths_E.float()),
        "prompt_scores": [[row, scores[row]] for row in sorted(followed)],
    }


def _histogram(values: torch.Tensor) -> list[float]:
    low, high = float(values.min()), float(values.max())
    return [low, high, *torch.histc(values.float(), BINS, low, high).int().tolist()]


def _key(row: int) -> int:
    return row * SCRAMBLE % 2**32


# ---- tokens.jsonl


FIRST, LAST = 384, 128  # most tokens saved from the start and from the end of an answer
UNREADABLE = "\ufffd"
MOST_OF_A_CHARACTER = 8  # tokens


def token_fields(experience: Experience, i: int, texts: "TokenTexts") -> dict[str, Any]:
    ids, drawn = np.array(experience.response(i)), experience.drawn(i).numpy()
    start, length = int(experience.starts_S[i]), int(experience.lengths_S[i])
    kept = np.ones(len(ids), dtype=bool)
    kept[FIRST : max(FIRST, len(ids) - LAST)] = False
    of_drawn = kept[drawn]
    log_probs = experience.sampled_N[start : start + length].numpy()[of_drawn]
    parts = [ids] if kept.all() else np.split(ids[kept], [FIRST])
    found: dict[str, Any] = {
        "texts": [text for part in parts for text in texts.of(part.tolist())],
        "drawn": _run_lengths(drawn[kept].tolist()),
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
    """Decodes single tokens as they appear inside a text."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, ids: list[int]) -> list[str]:
        """One string for each token; joined they are the decoded text."""
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
            # Some tokenizers drop a space at the start of a text, so the token is decoded twice and the second is used.
            once, twice = self._decode([token]), self._decode([token, token])
            self._known[token] = twice[len(once) :] if twice.startswith(once) else once
        return self._known[token]

    def _character(self, ids: list[int], texts: list[str], place: int) -> int:
        """Assign a character made of several tokens to the first of them; returns their number."""
        for count in range(2, min(MOST_OF_A_CHARACTER, len(ids) - place) + 1):
            together = self._decode(ids[place : place + count])
            if UNREADABLE not in together:
                texts[place : place + count] = [together, *[""] * (count - 1)]
                return count
        return 1

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def _run_lengths(drawn: list[bool]) -> list[int]:
    runs = [(mask, len(list(run))) for mask, run in itertools.groupby(drawn)]
    lengths = [length for _, length in runs]
    return [0, *lengths] if runs and not runs[0][0] else lengths


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


# ---- time_line.jsonl


FILE = "time_line.jsonl"
TRAINER = "trainer"
GENERATING, SCORING = "writing", "judging"
LANES = {GENERATING: "engine", SCORING: "rewards"}
NEIGHBOURS = 0.005  # spans of the same kind closer than this many seconds are merged

ReportedSpan = tuple[str, float, float]
"""(what, begin, end) in seconds before the report: relative, because the clocks of two machines may differ."""


class Spans:
    """Thread-safe recorder of one process's time spans between two reports."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: list[tuple[str, float, float]] = []
        self._running: dict[str, tuple[int, float]] = {}  # number of threads, and start time

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Record a span. Concurrent ones (rewards of several groups) count as one, from the first begin to the last
        end."""
        with self._lock:
            count, begin = self._running.get(what, (0, time.monotonic()))
            self._running[what] = count + 1, begin
        try:
            yield
        finally:
            with self._lock:
                count, begin = self._running.pop(what)
                if count > 1:
                    self._running[what] = count - 1, begin
                else:
                    self._add(what, begin, time.monotonic())

    def taken(self) -> list[ReportedSpan]:
        """Spans since the last report; running ones are reported up to now."""
        with self._lock:
            now = time.monotonic()
            for what, (count, begin) in self._running.items():
                self._add(what, begin, now)
                self._running[what] = count, now
            done, self._done = self._done, []
        return [(what, now - begin, now - end) for what, begin, end in done]

    def _add(self, what: str, begin: float, end: float) -> None:
        last = next((place for place in reversed(range(len(self._done))) if self._done[place][0] == what), None)
        if last is not None and begin - self._done[last][2] <= NEIGHBOURS:
            begin = self._done.pop(last)[1]
        self._done.append((what, begin, end))


class TimeLine:
    """Writer of time_line.jsonl. Without a folder nothing is written."""

    def __init__(self, folder: Path | None = None, *, resume_from: int | None = None):
        """`resume_from`: the iteration of the checkpoint to resume from; rows after it are removed."""
        self._file: MetricsFile | None = None
        self._began = time.monotonic()
        if folder is not None:
            self._cannot_write = f"--save_path {folder}: cannot write there"
            with writing(self._cannot_write):
                self._file = MetricsFile(folder / FILE, resume_from=resume_from, key="iteration")
            self._began -= max((row["end"] for row in read_rows(folder / FILE, key="iteration")), default=0.0)

    @contextmanager
    def during(self, what: str, iteration: int) -> Iterator[None]:
        """Record a phase of the trainer; `iteration` counts from 1, like the steps of the metrics."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._write(TRAINER, what, begin, time.monotonic(), iteration)

    def add_engines(self, spans: dict[int, list[ReportedSpan]], iteration: int) -> None:
        """Write the spans that each engine's process has just reported (`Spans.taken`)."""
        now = time.monotonic()
        for process, own in spans.items():
            for what, began, ended in own:
                self._write(f"{LANES[what]} {process}", what, now - began, now - ended, iteration)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, lane: str, what: str, begin: float, end: float, iteration: int) -> None:
        if self._file is not None:
            times = {"begin": round(begin - self._began, 3), "end": round(end - self._began, 3)}
            with writing(self._cannot_write):
                self._file.write({"lane": lane, "what": what, **times, "iteration": iteration})


# ---- figures of episodes


ENDS = tuple(name for name in FINISHES if name not in ("abort", "failed"))  # of episodes that can be trained on
SLOWEST = 95  # percentile


def episode_figures(experience: Experience) -> dict[str, float]:
    """Means over episodes, each counted once with all its branches; {} without an environment."""
    if experience.episodes is None:
        return {}
    episodes = [experience.episodes[i] for i in experience.firsts_E]
    figures = {name: _mean([episode.logs.get(name, 0.0) for episode in episodes]) for name in EPISODE_LOGS}
    figures["turns"] = _mean([len(episode.turns) for episode in episodes])
    figures["episode_length"] = float(experience.sequence_lengths_S[experience.lasts_E].float().mean())
    figures["branches"] = len(experience) / len(episodes)
    figures["begun_anew"] = float(sum(episode.begun - 1 for episode in episodes))
    finishes = [FINISHES[finish] for finish in experience.finishes_S[experience.lasts_E]]
    figures |= {f"finish/{name}": finishes.count(name) / len(finishes) for name in ENDS}
    seconds = [episode.logs.get("seconds_environment", 0.0) for episode in episodes]
    figures[f"seconds_environment_{SLOWEST}"] = float(np.percentile(seconds, SLOWEST))
    return figures


def turns(episode: EpisodeRecord, characters: int) -> list[dict[str, Any]]:
    """The segments of an episode as rows for rollouts.jsonl."""
    return [
        {
            "role": _role(segment),
            "text": _text(segment)[:characters],
            "tokens": segment.end - segment.start,
            "drawn": segment.drawn,
            "reward": segment.reward,
            "seconds": round(segment.seconds, 4),
            **({"branch": segment.branch} if segment.branch else {}),
        }
        for segment in episode.said
    ]


def _role(segment: Segment) -> str:
    if segment.drawn:
        return "assistant"
    return str(segment.messages[0]["role"]) if segment.messages else "environment"  # exact tokens have no messages


def _text(segment: Segment) -> str:
    if segment.drawn:
        return segment.text
    return "\n".join(str(message.get("content") or "") for message in segment.messages)


def _mean(values: list[float] | list[int]) -> float:
    return float(np.mean(values))
