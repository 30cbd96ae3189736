"""Rewards from a model in this process: one that `trimtab rm` made, or any sequence classifier with one score.

A reward model with the policy's tokenizer reads the policy's own tokens. One with another tokenizer reads text: the
conversation through its own chat template where the rows are conversations, otherwise prompt and response as they are.
Either way the sequence ends with the model's end token, as in training.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trimtab.data.batches import TokenBatch
from trimtab.data.chat import ChatRenderer, with_end
from trimtab.data.packing import chunk, pack
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import Device
from trimtab.distributed.mesh import Mesh
from trimtab.errors import UserError
from trimtab.models.hugging_face import check_model_folder
from trimtab.models.keeping import Keeping
from trimtab.models.load_reward import RewardLoadOptions, load_frozen_reward_model
from trimtab.models.packed import PackedModel
from trimtab.models.reward import HEAD
from trimtab.rewards.types import RewardFailed, RewardRequest, RewardResult, checked

MAX_TOKENS = 16_384
PADDED_SAMPLES = 8  # of a pass of a model that takes padded rows, whose memory tokens do not bound
IDLE: tuple[list[int], TokenBatch] = ([], TokenBatch.of([(np.zeros(2, dtype=np.int64), np.array([False, True]))]))
"""A pass whose samples are nobody's."""


class ModelReward:
    concurrent = False

    def __init__(
        self,
        pretrain: str,
        options: RewardLoadOptions,
        device: Device,
        *,
        policy_tokenizer: PreTrainedTokenizerBase | None = None,
        messages_key: str | None = None,
        normalize: bool = False,
        max_len: int | None = None,
        max_samples: int | None = None,
        max_tokens: int = MAX_TOKENS,
        flag: str = "--reward_pretrain",
        mesh: Mesh | None = None,
        offload: bool = False,
    ):
        """`options`: how to load it (LoadOptions and RewardHeadOptions); `mesh`, `offload`: where its weights are
        (models/keeping.py).

        `messages_key`: the column that holds a sample's conversation (or its only user turn), for a model that has to
        render it anew. `normalize`: subtract the mean and divide by the deviation that config.json holds. A pass has at
        most `max_tokens` tokens and `max_samples` samples of at most `max_len` tokens. `flag` names it in complaints.
        """
        self.name, self.pretrain = Path(pretrain).name, pretrain
        self.device = device
        self.columns = [messages_key] if messages_key else []  # what it asks for of the data
        check_model_folder(pretrain, flag)
        self.tokenizer = load_tokenizer(pretrain, disable_fast=options.disable_fast_tokenizer, flag=flag)
        split: dict[str, Any] = {"mesh": mesh, "offload": offload}
        self.model = load_frozen_reward_model(pretrain, options, device, self.tokenizer, flag, **split).model
        self.keeping = Keeping(device, **split)
        self.keeping.settle(self.model)
        self.reads_ids = policy_tokenizer is not None and same_tokenizer(self.tokenizer, policy_tokenizer)
        self._reader = TextReader(self.tokenizer, policy_tokenizer, messages_key, is_decoder=hasattr(self.inner, HEAD))
        self._mean, self._deviation = _normaliser(self.model, pretrain) if normalize else (0.0, 1.0)
        self._passes = Passes(max_len, max_samples, max_tokens, packed=self.model.path == "packed")

    @property
    def inner(self) -> Any:
        return self.model.inner

    @property
    def reads_texts(self) -> bool:
        """Of answers, and not only their tokens."""
        return not self.reads_ids

    def __str__(self) -> str:
        return f"reward model {self.pretrain}"

    def __call__(self, request: RewardRequest) -> RewardResult:
        try:
            sequences = self.sequences(request) if len(request) else []
        except RewardFailed:
            self.scores([])  # other processes may wait for the passes of this one
            raise
        scores = checked(self.scores(sequences), len(request), f"reward model {self.name}: reward")
        return RewardResult([(score - self._mean) / self._deviation for score in scores])

    def close(self) -> None:
        pass

    def sequences(self, request: RewardRequest) -> list[np.ndarray]:
        """What the model reads of each sample."""
        if not (self.reads_ids and request.response_ids):
            return self._reader.sequences(request)
        pairs = zip(request.prompt_ids, request.response_ids)
        return [ended([*prompt, *response], self.tokenizer) for prompt, response in pairs]

    def scores(self, sequences: Sequence[np.ndarray]) -> list[float]:
        """The model's own scores, not normalised."""
        scores = [0.0] * len(sequences)
        found: list[tuple[list[int], Tensor]] = []
        passes = list(self._passes.over(sequences))
        with self.keeping.at_work(self.model):
            for rows, batch in self.keeping.in_step(passes, IDLE):
                found.append((rows, self.model(batch.to(self.device.torch)).scores_S))
        for rows, scores_S in found:  # after all passes: the next is prepared while a device is at work
            for row, score in zip(rows, scores_S.tolist()):
                scores[row] = score
        return scores


class Passes:
    """How sequences are cut, and gathered into passes through a model."""

    def __init__(
        self,
        max_len: int | None = None,
        max_samples: int | None = None,
        max_tokens: int = MAX_TOKENS,
        *,
        packed: bool = True,
    ):
        """`packed`: the model takes packed rows."""
        self.max_len, self.max_tokens = max_len, max_tokens
        self.max_samples = max_samples if packed else max_samples or PADDED_SAMPLES

    def over(self, sequences: Sequence[np.ndarray], marks: Sequence[np.ndarray] | None = None):
        """(rows, their batch) of every pass; `marks` are what the batch has as trained tokens."""
        lengths = [len(ids) if self.max_len is None else min(len(ids), self.max_len) for ids in sequences]
        for packed in pack(lengths, self.max_tokens):
            for part in chunk([lengths[row] for row in packed], self.max_samples or len(packed)):
                rows = [packed[index] for index in part]
                kept = [(sequences[row][: lengths[row]], _mark(marks, row, lengths[row])) for row in rows]
                yield rows, TokenBatch.of(kept)


def _mark(marks: Sequence[np.ndarray] | None, row: int, length: int) -> np.ndarray:
    return np.zeros(length, dtype=bool) if marks is None else marks[row][:length]


class TextReader:
    """Samples as a model reads them that does not share the policy's tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase | None,
        messages_key: str | None,
        *,
        is_decoder: bool = True,
    ):
        self.tokenizer, self.is_decoder = tokenizer, is_decoder
        self._messages_key = messages_key if tokenizer.chat_template else None
        self._chat = ChatRenderer(tokenizer) if self._messages_key else None
        self._known = (policy_tokenizer or tokenizer, tokenizer)

    def sequences(self, request: RewardRequest) -> list[np.ndarray]:
        conversations = request.columns.get(self._messages_key) if self._messages_key else None
        if conversations is None:
            texts = [with_end(without_end(query, *self._known), self.tokenizer) for query in request.queries]
        else:
            texts = [self._rendered(*pair) for pair in zip(conversations, request.responses)]
        encoded = self.tokenizer(texts, add_special_tokens=not self.is_decoder, verbose=False)["input_ids"]
        return [np.array(ids, dtype=np.int64) for ids in encoded]

    def _rendered(self, conversation: Any, response: str) -> str:
        turns = [{"role": "user", "content": conversation}] if isinstance(conversation, str) else list(conversation)
        answer = {"role": "assistant", "content": without_end(response, *self._known)}
        assert self._chat is not None, "conversations are asked for only where there is a template"
        rendering = self._chat.render([*turns, answer], where="the reward model's view of a sample")
        return rendering.text[: rendering.trained[-1][1]]


def without_end(text: str, *tokenizers: PreTrainedTokenizerBase) -> str:
    """The text without the end and padding tokens after it."""
    marks = tuple({mark for known in tokenizers for mark in (known.eos_token, known.pad_token) if mark})
    while mark := next((mark for mark in marks if text.endswith(mark)), None):
        text = text.removesuffix(mark)
    return text


def same_tokenizer(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """Whether the two give a text the same tokens, so that one's ids may be shown to the other's model."""
    return first.get_vocab() == second.get_vocab() and first.eos_token_id == second.eos_token_id


def ended(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The ids, ended by the end token: an answer that was cut is judged as it is."""
    end = tokenizer.eos_token_id
    return np.array(ids if end is None or ids[-1:] == [end] else [*ids, end], dtype=np.int64)


def _normaliser(model: PackedModel, pretrain: str) -> tuple[float, float]:
    mean, deviation = getattr(model.config, "mean", None), getattr(model.config, "std", None)
    if not isinstance(mean, int | float) or not isinstance(deviation, int | float) or deviation <= 0:
        raise UserError(
            f"--normalize_reward: {pretrain}/config.json has no mean and std of rewards (trimtab rm writes them); "
            "leave the option out"
        )
    return mean, deviation
