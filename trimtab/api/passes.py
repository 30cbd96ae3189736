"""Samples through the model: cut into passes as in training (train/rl/micro_batches.py), with gradients and without."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimtab.api.losses import Chosen, LossInputs, is_number
from trimtab.api.samples import Rows, Sample
from trimtab.data.batches import TokenBatch
from trimtab.distributed.device import Device
from trimtab.distributed.mesh import Mesh
from trimtab.errors import RunFailed, UserError
from trimtab.models.packed import scoring
from trimtab.models.policy import Policy
from trimtab.plan.workload import TOKENS_ON_CPU, scoring_tokens
from trimtab.train.micro_batch_limit import MicroBatchLimit, Result, memory_guard, retry_smaller, undo_step
from trimtab.train.optimizer import Optimizer
from trimtab.train.rl.micro_batches import cost, make_slice, micro_batches, packed
from trimtab.train.update import LossTerm, accumulate

COLUMNS = ("log_probs_N", "advantages_N", "weights_N", "reference_N")
ADVICE = "gradient_checkpointing=True, lora_rank or bf16=True needs less memory"


@dataclass
class Gathered:
    """What gradients were added up of since the last step."""

    begun: bool = False
    tokens: int = 0
    answers: int = 0
    finite: bool = True  # all losses

    def divisor(self, per: str | float) -> float:
        found = {"tokens": self.tokens, "answers": self.answers}.get(per, per) if isinstance(per, str) else per
        if isinstance(found, str) or not is_number(found) or found <= 0:
            raise UserError(f"per is {per!r}; give 'tokens', 'answers' or a number above 0")
        return float(found)


class Passes:
    def __init__(self, policy: Policy, optimizer: Optimizer, device: Device, tokens: int | None):
        self.policy, self.optimizer, self.device = policy, optimizer, device
        self.tokens = tokens or (8192 if device.is_accelerator else TOKENS_ON_CPU)
        self.limit = MicroBatchLimit()

    def score(self, rows: Rows, temperature: float, model: Policy) -> list[np.ndarray]:
        """Log-probs of the trained tokens of every sample, without gradients."""
        budget = scoring_tokens(self.tokens) if self.device.is_accelerator else self.tokens
        found: dict[int, np.ndarray] = {}

        def attempt() -> None:
            with memory_guard(), scoring(model):
                for samples, batch in self._batches(rows, self._cut(rows, budget, 1)):
                    log_probs = model(batch.to(self.device.torch), temperature=temperature).log_probs_N
                    lengths = rows.lengths_S[torch.tensor(samples)].tolist()
                    parts = log_probs.float().cpu().split(lengths)
                    found.update((i, part.numpy()) for i, part in zip(samples, parts))

        self._until_it_fits(attempt, rows, budget, 1)
        return [found.get(i, np.zeros(0, dtype=np.float32)) for i in range(len(rows))]

    def learn(
        self, rows: Rows, data: Sequence[Sample], loss: Chosen, temperature: float, *, together: int, gathered: bool
    ) -> dict[str, float]:
        """Gradients of the loss are added to what was gathered before, if anything was; the sums of its figures."""

        def attempt() -> dict[str, float]:
            with memory_guard(undo_step(self.optimizer)):
                cut = self._cut(rows, self.tokens, together)
                samples = ([data[i] for i in part] for part in cut)
                batches = (batch for _, batch in self._batches(rows, cut))
                sums = accumulate(
                    self.policy,
                    Mesh(),
                    batches,
                    len(cut),
                    lambda batch: self._share(batch.to(self.device.torch), next(samples), loss, temperature),
                )
            return {name: float(value) for name, value in sums.items()}

        return self._until_it_fits(attempt, rows, self.tokens, together, begun=gathered)

    def _share(self, batch: TokenBatch, samples: list[Sample], loss: Chosen, temperature: float) -> LossTerm:
        out = self.policy(batch, temperature=temperature, entropy=loss.entropy)
        assert out.log_probs_N is not None
        extra = batch.extra
        inputs = LossInputs(
            out.log_probs_N,
            batch.owners_N,
            samples,
            extra["weights_N"],
            extra.get("log_probs_N"),
            extra.get("advantages_N"),
            extra.get("reference_N"),
            out.entropy_N,
        )
        found, figures = loss.function(inputs)
        plain = {name: value.detach() if isinstance(value, Tensor) else value for name, value in figures.items()}
        return LossTerm(found, {**plain, "loss": found.detach()})

    # ---- how they are cut

    def _cut(self, rows: Rows, budget: int, together: int) -> list[list[int]]:
        """The samples of every pass. Those without a trained token are in none."""
        budget = self.limit.of_tokens(budget)
        if together == 1:
            drawn = rows.lengths_S.nonzero()[:, 0].tolist()
            return micro_batches(rows, drawn, count=1, budget=budget) if drawn else []
        pieces = [range(first, first + together) for first in range(0, len(rows), together)]
        return packed(rows, pieces, budget)

    def _batches(self, rows: Rows, passes: list[list[int]]) -> Iterator[tuple[list[int], TokenBatch]]:
        columns = [name for name in COLUMNS if getattr(rows, name) is not None]
        if passes:
            yield from zip(passes, make_slice(rows, passes, *columns).batches())

    def _until_it_fits(
        self, attempt: Callable[[], Result], rows: Rows, budget: int, together: int, *, begun: bool = False
    ) -> Result:
        def shrink(why: str) -> None:
            self.device.release_memory()
            cut = self._cut(rows, budget, together)
            sizes = [(cost(rows, samples), len(samples) // together) for samples in cut]
            if not self.limit.halve(sizes, by_tokens=True):
                longest = max(tokens for tokens, _ in sizes)
                raise RunFailed(f"a pass of {longest:,} tokens does not fit into memory ({why}); {ADVICE}")
            if begun:
                raise RunFailed(
                    f"a pass did not fit into memory ({why}), and what was gathered since the last optim_step is lost; "
                    f"passes have at most {self.limit} from now on: begin the step anew"
                )

        return retry_smaller(attempt, shrink)
