"""A sequence classifier with one output seen as a value function: what it says before each trained token."""

import torch
from torch import Tensor

from trimtab.data.batches import TokenBatch
from trimtab.models.packed import PackedModel
from trimtab.models.reward import HEAD


class Critic(PackedModel):
    """A classifier read at every position. `mean` and `deviation` are those its rewards are normalised with."""

    mean = 0.0
    deviation = 1.0

    def forward(self, batch: TokenBatch, *, after: bool = False) -> Tensor:
        """Values [N], fp32, of the states in which the trained tokens were chosen; or of those right `after` them."""
        batch = self.rotary.separate(batch)
        read = self.read(batch, batch.trained_N if after else batch.predictors_N)
        values_N = read.whole(getattr(self.inner, HEAD)(read.states_ND)[:, 0].float())
        return (values_N - self.mean) / self.deviation

    def check_values(self, batch: TokenBatch) -> Tensor:
        return self(batch)

    def reference_values(self, batch: TokenBatch) -> Tensor:
        sequences = [batch.sequence(i) for i in range(len(batch.spans))]
        hidden = [
            self.inner.base_model(input_ids=s[None], use_cache=False).last_hidden_state[0, :-1] for s in sequences
        ]
        return getattr(self.inner, HEAD)(torch.cat(hidden))[:, 0].float()
