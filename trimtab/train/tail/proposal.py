"""The proposal of RePULSe as a role that learns: a model of its own, adapters on the policy's weights, or a head."""

from typing import Any

from trimtab.data.batches import TokenBatch
from trimtab.train.rl.learner import Actor
from trimtab.train.tail.objective import policy_share, twist_share
from trimtab.train.task import Share, Totals


class TailActor(Actor):
    """The policy."""

    def share(self, batch: TokenBatch, totals: Totals, **settings: Any) -> Share:
        return policy_share(self.model, batch, totals)


class ProposalModel(Actor):
    """A language model q of its own: log psi = log q - log p, with p as it was."""

    def share(self, batch: TokenBatch, totals: Totals, **settings: Any) -> Share:
        return twist_share(self.model(batch).log_probs_N - batch.extra["policy_N"], batch, totals)
