"""What a supervised job is to the loop: examples, how a step is cut, and one loss."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from trimtab.models.policy import Policy

Totals = dict[str, float]


@dataclass
class Share:
    """One micro-batch's part of the step. Parts add up: the loss and every figure are already divided by totals."""

    loss: Tensor
    figures: dict[str, Tensor]


class Task(Protocol):
    """A job of the supervised loop."""

    verb: str
    samples: int
    evaluation_samples: int
    data_fingerprint: str

    def describe_data(self) -> dict:
        """Statistics of the data, for the manifest and the report."""

    def data_lines(self) -> list[str]:
        """The same in words, for a person at the start of a run: how many rows are used, and why the others are not."""

    def micro_batches(self, samples: list[int], *, evaluation: bool = False) -> list[Any]:
        """Cut these samples into micro-batches."""

    def totals(self, batches: list[Any]) -> Totals:
        """Counts over the whole step, which its means are taken over. Has `tokens` and `trained_tokens`."""

    def loss(self, policy: Policy, batch: Any, totals: Totals) -> Share:
        """This micro-batch's share of the step's loss."""

    def check_model(self, policy: Policy) -> None:
        """Refuse a model this job cannot train, in one line."""
