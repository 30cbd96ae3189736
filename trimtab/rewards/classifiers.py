"""Rewards from classifiers that read a question and an answer as text, with a tokenizer of their own.

    pair    the classifier's two inputs: question, answer
    text    one input: the question and, right after it, the answer
    chat    the classifier's own chat template (rewards/model.py)

An input that is too long loses the beginning of its question; the answer is cut only where it alone is too long.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from trimtab.config.jobs import AttackOptions
from trimtab.config.rl_jobs import TailOptions
from trimtab.distributed.device import Device
from trimtab.distributed.mesh import Mesh
from trimtab.errors import UserError
from trimtab.models.hugging_face import check_model_folder, skeleton
from trimtab.models.load_reward import RewardLoadOptions
from trimtab.models.reward import HEAD, AutoClassifier
from trimtab.rewards.model import ModelReward, without_end
from trimtab.rewards.types import RewardRequest

QUESTION = "question"  # the column that holds what was asked, as its author wrote it
SAMPLES_A_PASS = 64
UNLIMITED = 10**6  # what tokenizers say when they know of no limit is far above

# What the documents' classifiers read, which nothing in their files says.
KNOWN = {
    "nicholasKluge/ToxicityModel": "text",
    "OpenAssistant/reward-model-deberta-v3-large-v2": "pair",
}

Encoded = dict[str, list[int]]


def load_judge(
    pretrain: str,
    options: TailOptions | AttackOptions,
    device: Device,
    *,
    messages_key: str | None = QUESTION,
    **settings: Any,
) -> ModelReward:
    """A reward model in single precision: rounded to bfloat16, rewards near a threshold fall on it or beside it.

    `options`: LoadOptions, RewardHeadOptions and RewardInputOptions; `settings` go to ModelReward.
    """
    exact = dataclasses.replace(options, bf16=False, load_in_4bit=False)
    settings["messages_key"] = messages_key
    reads = reading_of(pretrain, options.reward_input)
    if reads == "chat":
        return ModelReward(pretrain, exact, device, **settings)
    return ClassifierReward(pretrain, exact, device, reads=reads, max_len=options.rm_max_len, **settings)


def reading_of(pretrain: str, asked: str | None) -> str:
    """How a reward model reads samples: as asked, as it is known to, or by its kind."""
    if asked or pretrain in KNOWN:
        return asked or KNOWN[pretrain]
    check_model_folder(pretrain, "--reward_pretrain")
    model = skeleton(pretrain, AutoClassifier, "--reward_pretrain", num_labels=1)
    return "chat" if hasattr(model, HEAD) else "pair"


class ClassifierReward(ModelReward):
    def __init__(
        self,
        pretrain: str,
        options: RewardLoadOptions,
        device: Device,
        *,
        reads: str,
        messages_key: str | None = QUESTION,
        policy_tokenizer: PreTrainedTokenizerBase | None = None,
        max_len: int | None = None,
        max_samples: int | None = None,
        mesh: Mesh | None = None,
        **settings: Any,
    ):
        """Small as such models are, each process has it whole (`mesh` is not asked)."""
        super().__init__(pretrain, options, device, **settings)
        if not self.tokenizer.is_fast:
            raise UserError(f"--reward_pretrain {pretrain}: reading question and answer needs its fast tokenizer")
        self.reads, self.messages_key = reads, messages_key
        self.columns = [messages_key] if messages_key else []
        self.tokenizers = (self.tokenizer, policy_tokenizer or self.tokenizer)
        self.samples_a_pass = max_samples or SAMPLES_A_PASS
        own = self.tokenizer.model_max_length if self.tokenizer.model_max_length < UNLIMITED else None
        self.limit = min((n for n in (max_len, own, learned_places(self.inner)) if n), default=UNLIMITED)

    def sequences(self, request: RewardRequest) -> list[Encoded]:
        questions = [self._question(request, row) for row in range(len(request))]
        answers = [without_end(response, *self.tokenizers) for response in request.responses]
        texts = (questions, answers) if self.reads == "pair" else ([q + a for q, a in zip(questions, answers)],)
        encoded = self.tokenizer(*texts, return_offsets_mapping=True, verbose=False)
        offsets = encoded.pop("offset_mapping")
        found = []
        for row, places in enumerate(offsets):
            owners = encoded.sequence_ids(row)
            if self.reads == "text":
                end = len(questions[row])
                owners = [None if owner is None else int(stop > end) for owner, (_, stop) in zip(owners, places)]
            kept = keep(owners, self.limit)
            found.append({name: [values[row][i] for i in kept] for name, values in encoded.items()})
        return found

    def scores(self, sequences: Sequence[Any]) -> list[float]:
        scores = [0.0] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda row: len(sequences[row]["input_ids"]))
        with self.keeping.at_work(self.model):
            for begin in range(0, len(order), self.samples_a_pass):
                rows = order[begin : begin + self.samples_a_pass]
                inputs = self.tokenizer.pad([sequences[row] for row in rows], return_tensors="pt")
                logits = self.inner(**inputs.to(self.device.torch)).logits[:, 0].float()
                for row, score in zip(rows, logits.tolist()):
                    scores[row] = score
        return scores

    def _question(self, request: RewardRequest, row: int) -> str:
        asked = request.columns[self.messages_key][row] if self.messages_key in request.columns else None
        if asked is None:
            return request.prompts[row]
        return asked if isinstance(asked, str) else "\n".join(str(turn["content"]) for turn in asked)


def keep(owners: list[int | None], limit: int) -> list[int]:
    """Which tokens stay when at most `limit` may: `owners` says of each whether it is the question's (0), the answer's
    (1) or a mark (None)."""
    excess = max(0, len(owners) - limit)
    question = [i for i, owner in enumerate(owners) if owner == 0]
    answer = [i for i, owner in enumerate(owners) if owner == 1]
    dropped = {*question[:excess]}
    rest = excess - len(dropped)
    dropped |= {*answer[len(answer) - rest :]} if rest else set()
    return [i for i in range(len(owners)) if i not in dropped]


def learned_places(model: nn.Module) -> int | None:
    """How many tokens an encoder can number, if it learns a vector for each place."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith("position_embeddings"):
            # RoBERTa counts from the padding index on.
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return None
