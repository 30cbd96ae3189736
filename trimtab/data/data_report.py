"""What became of the rows, for people and for the manifest."""

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np

QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass
class DataReport:
    """Counts of rows and tokens. Jobs whose rows have more to tell extend it."""

    what: str
    layout: str
    rows_read: int = 0
    rows_available: int = 0
    """Rows that the files hold; more than were read where an option limits them."""
    rows_kept: int = 0
    rows_truncated: int = 0
    rows_over_long: int = 0
    rows_empty: int = 0
    rows_also_trained: int = 0
    """Of the rows to evaluate on: those whose prompt is trained on too."""
    max_len: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    lengths: dict[str, int] = field(default_factory=dict)

    noun: ClassVar[str] = "rows"
    """What a row is called in this job."""
    marked: ClassVar[str] = "trained"
    """What is done with the marked tokens."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def count(self, trained: np.ndarray, lengths: np.ndarray) -> None:
        """Takes down the figures of the sequences that were kept."""
        self.tokens = len(trained)
        self.trained_tokens = int(trained.sum())
        ordered = np.sort(lengths)
        self.lengths = {name: int(ordered[round(q * (len(ordered) - 1))]) for name, q in QUANTILES.items()}

    @property
    def in_files(self) -> int:
        return max(self.rows_available, self.rows_read)

    def beyond_limit(self) -> list[str]:
        """A line about the rows that were not read, if there are any."""
        beyond = self.in_files - self.rows_read
        flag = "--eval_max_samples" if self.what == "evaluation" else "--max_samples"
        return [f"{beyond:,} {self.noun} left out: beyond {flag} {self.rows_read:,}"] if beyond else []

    def seen_in_training(self) -> list[str]:
        """A line about the rows that are not held out, if there are any."""
        seen, of = self.rows_also_trained, self.rows_kept
        which = "all of them have" if seen == of else f"{seen:,} of {of:,} {self.noun} have"
        return [f"{self.what} data: {which} a prompt that is trained on too: not held out"] if seen else []

    def lines(self) -> list[str]:
        """For people."""
        share = self.trained_tokens / max(self.tokens, 1)
        text = [
            f"{self.what} data: {self.rows_kept:,} of {self.in_files:,} {self.noun} ({self.layout}), "
            f"{self.tokens:,} tokens, {self.trained_tokens:,} of them {self.marked} ({share:.0%})",
            "lengths: " + ", ".join(f"{name} {value:,}" for name, value in self.lengths.items()),
        ]
        text += [*self.beyond_limit(), *self.seen_in_training()]
        if self.rows_truncated:
            text.append(f"{self.rows_truncated:,} {self.noun} cut to {self.max_len:,} tokens (--max_len)")
        if self.rows_over_long:
            text.append(
                f"{self.rows_over_long:,} {self.noun} left out: nothing to learn within {self.max_len:,} tokens "
                "(--max_len)"
            )
        if self.rows_empty:
            text.append(f"{self.rows_empty:,} {self.noun} left out: empty response")
        return text


@dataclass
class PairReport(DataReport):
    rows_equal: int = 0
    """Pairs whose two sides are the same tokens."""
    prompts_shared: int = 0
    """Pairs whose two sides have the same prompt, token by token."""
    tokens_shared: int = 0
    """Tokens that both sides begin with, counted once a pair."""

    noun: ClassVar[str] = "pairs"

    def lines(self) -> list[str]:
        share = self.tokens_shared / max(self.tokens, 1)
        text = super().lines()
        text.append(
            f"{self.prompts_shared:,} pairs share their prompt; {self.tokens_shared:,} tokens ({share:.0%}) need "
            "not be read twice"
        )
        if self.rows_equal:
            text.append(f"{self.rows_equal:,} pairs prefer nothing: chosen and rejected are the same")
        return text


@dataclass
class LabelledReport(DataReport):
    rows_desirable: int = 0

    def lines(self) -> list[str]:
        undesirable = self.rows_kept - self.rows_desirable
        return [*super().lines(), f"{self.rows_desirable:,} answers are desirable, {undesirable:,} are not"]


@dataclass
class StepReport(DataReport):
    labels: dict[str, int] = field(default_factory=dict)
    """How often each label stands at a step; empty when they are probabilities."""

    marked: ClassVar[str] = "steps"

    def lines(self) -> list[str]:
        counts = ", ".join(f"{count:,} x '{label}'" for label, count in self.labels.items())
        return [*super().lines(), f"labels: {counts or 'probabilities'}"]
