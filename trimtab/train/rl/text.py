"""--pretrain_data: text that an update learns beside its answers (PTX), so that the policy keeps what it knows."""

import dataclasses
from typing import Any

from trimtab.config.jobs import RLOptions
from trimtab.data.order import SampleOrder
from trimtab.data.packing import chunk, pack
from trimtab.data.sources import load_rows
from trimtab.data.token_store import TokenStore
from trimtab.data.tokens import build_sft_store
from trimtab.distributed.process_group import deal
from trimtab.train.rl.batches import TextSlice
from trimtab.train.rl.cut import halves
from trimtab.train.rl.passes import Passes


@dataclasses.dataclass(frozen=True)
class _TextOptions:
    """How the rows are read: every token is learnt and there is no template."""

    input_key: str
    max_len: int
    output_key: str | None = None
    input_template: str | None = None
    apply_chat_template: bool = False
    multiturn: bool = False
    pretrain_mode: bool = True


def load_text(options: RLOptions, tokenizer: Any) -> tuple[TokenStore, Any]:
    """The rows as tokens, and the report of what became of them."""
    assert options.pretrain_data is not None
    rows = load_rows(
        options.pretrain_data,
        probabilities=options.pretrain_data_probs if "," in options.pretrain_data else None,
        split=options.pretrain_split,
        max_samples=options.max_samples,
        seed=options.seed,
        flag="--pretrain_data",
    )
    longest = options.prompt_max_len + options.generate_max_len
    return build_sft_store(rows, tokenizer, _TextOptions(options.input_key, longest), what="pre-training")


class TextMixture:
    def __init__(self, store: TokenStore, options: RLOptions):
        self.store, self.options = store, options
        self._order = SampleOrder(len(store), options.train_batch_size, 1, options.seed)

    def parts(self, step: int, processes: int, passes: Passes) -> list[TextSlice]:
        """The text of an update for every process, with as many passes for each."""
        epoch, index = divmod(step, self._order.steps_per_epoch)
        order = dataclasses.replace(self._order, seed=self._order.seed + epoch)
        samples = order.step_samples(index)
        lengths = [int(length) for length in self.store.lengths[samples]]
        budget = passes.token_budget()
        count = passes.limit.of_samples(self.options.micro_train_batch_size)
        cut = chunk(lengths, count) if budget is None else pack(lengths, budget)
        cut_samples = [[samples[i] for i in members] for members in cut]
        shares = deal(cut_samples, processes, lambda part: int(self.store.lengths[part].sum()), halves)
        return [self._slice(share) for share in shares]

    def _slice(self, share: list[list[int] | None]) -> TextSlice:
        examples = [[self.store.example(i) for i in part or [0]] for part in share]
        return TextSlice.of(examples, [1.0 if part else 0.0 for part in share])
