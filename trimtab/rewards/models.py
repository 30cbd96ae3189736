"""Rewards from models in this process: reward models, process reward models and text classifiers.

A reward model (`trimtab rm`, or any sequence classifier with one score) that has the policy's tokenizer reads the
policy's tokens. One with another tokenizer reads text: the conversation through its own chat template where the rows
are conversations, otherwise prompt and response as they are. Either way the sequence ends with the model's end token,
as in training.
"""

import dataclasses
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from trimtab.config.jobs import AttackOptions, ServeRMOptions
from trimtab.config.rl_jobs import RLOptions, TailOptions
from trimtab.data.batches import TokenBatch, chunk, pack
from trimtab.data.chat_template import ChatRenderer, with_end
from trimtab.data.formats import Rendering, one_token, reward_token_ids
from trimtab.data.rendering import tokenize_in_pieces, tokenize_renderings
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import Device
from trimtab.distributed.mesh import Mesh
from trimtab.errors import UserError
from trimtab.models.load import RewardLoadOptions, load_frozen_policy, load_frozen_reward_model
from trimtab.models.packed import PackedModel
from trimtab.models.parallel.sharded_model import FrozenPlacement
from trimtab.models.pretrained import check_model_folder, fake_model
from trimtab.models.reward import HEAD, AutoClassifier
from trimtab.rewards.types import BadSample, RewardFailed, RewardRequest, RewardResult, checked

MAX_TOKENS = 16_384
PADDED_SAMPLES = 8  # of a pass of a model that takes padded rows, whose memory tokens do not bound
IDLE: tuple[list[int], TokenBatch] = ([], TokenBatch.of([(np.zeros(2, dtype=np.int64), np.array([False, True]))]))
"""A pass without samples."""

Scores = TypeVar("Scores")


class FrozenModelReward:
    """A frozen model that scores samples in micro-batches."""

    concurrent = False
    columns: Sequence[str] = ()  # that it reads of the data

    def __init__(
        self,
        pretrain: str,
        options: Any,
        device: Device,
        *,
        max_len: int | None = None,
        max_samples: int | None = None,
        max_tokens: int = MAX_TOKENS,
        flag: str = "--reward_pretrain",
        mesh: Mesh | None = None,
        offload: bool = False,
    ):
        """`options`: how to load it; `mesh`, `offload`: where its weights are (models/parallel/sharded_model.py). A
        pass has at most `max_tokens` tokens and `max_samples` samples of at most `max_len` tokens. `flag` names it in
        errors."""
        self.name, self.pretrain, self.device = Path(pretrain).name, pretrain, device
        check_model_folder(pretrain, flag)
        self.tokenizer = load_tokenizer(pretrain, disable_fast=options.disable_fast_tokenizer, flag=flag)
        split: dict[str, Any] = {"mesh": mesh, "offload": offload}
        self.model = self.load(options, flag, split)
        self.keeping = FrozenPlacement(device, **split)
        self.keeping.settle(self.model)
        self.max_len, self.max_tokens = max_len, max_tokens
        self.max_samples = max_samples if self.model.path == "packed" else max_samples or PADDED_SAMPLES

    def load(self, options: Any, flag: str, split: dict[str, Any]) -> PackedModel:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def run(
        self,
        score: Callable[[TokenBatch], Scores],
        sequences: Sequence[np.ndarray],
        marks: Sequence[np.ndarray] | None = None,
    ) -> list[tuple[list[int], Scores]]:
        """Rows and scores of every micro-batch; `marks`: the trained tokens of sequences."""
        lengths = [len(ids) if self.max_len is None else min(len(ids), self.max_len) for ids in sequences]
        passes = []
        for packed in pack(lengths, self.max_tokens):
            for part in chunk([lengths[row] for row in packed], self.max_samples or len(packed)):
                rows = [packed[index] for index in part]
                marked = [np.zeros(lengths[row], dtype=bool) if marks is None else marks[row] for row in rows]
                kept = [(sequences[row][: lengths[row]], mark[: lengths[row]]) for row, mark in zip(rows, marked)]
                passes.append((rows, TokenBatch.of(kept)))
        found = []
        with self.keeping.at_work(self.model):
            for rows, batch in self.keeping.in_step(passes, IDLE):
                found.append((rows, score(batch.to(self.device.torch))))
        return found


class ModelReward(FrozenModelReward):
    """The score of a reward model, or of any sequence classifier with one score."""

    def __init__(
        self,
        pretrain: str,
        options: RewardLoadOptions,
        device: Device,
        *,
        policy_tokenizer: PreTrainedTokenizerBase | None = None,
        messages_key: str | None = None,
        normalize: bool = False,
        **settings: Any,
    ):
        """`options`: LoadOptions and RewardHeadOptions; `settings`: of FrozenModelReward.

        `messages_key`: the column that holds a sample's conversation (or its only user turn), for a model that has to
        render it anew. `normalize`: subtract the mean and divide by the deviation that config.json holds.
        """
        super().__init__(pretrain, options, device, **settings)
        self.columns = [messages_key] if messages_key else []
        self.reads_ids = policy_tokenizer is not None and same_tokenizer(self.tokenizer, policy_tokenizer)
        self._reader = TextEncoder(self.tokenizer, policy_tokenizer, messages_key, is_decoder=hasattr(self.inner, HEAD))
        self._mean, self._deviation = _normaliser(self.model, pretrain) if normalize else (0.0, 1.0)

    def load(self, options: RewardLoadOptions, flag: str, split: dict[str, Any]) -> PackedModel:
        return load_frozen_reward_model(self.pretrain, options, self.device, self.tokenizer, flag, **split).model

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
            self.scores([])  # other processes may wait for this one's passes
            raise
        scores = checked(self.scores(sequences), len(request), f"reward model {self.name}: reward")
        return RewardResult([(score - self._mean) / self._deviation for score in scores])

    def sequences(self, request: RewardRequest) -> list[np.ndarray]:
        """The model's input for each sample."""
        if not (self.reads_ids and request.response_ids):
            return self._reader.sequences(request)
        pairs = zip(request.prompt_ids, request.response_ids)
        return [ended([*prompt, *response], self.tokenizer) for prompt, response in pairs]

    def scores(self, sequences: Sequence[np.ndarray]) -> list[float]:
        """The model's scores, not normalised."""
        scores = [0.0] * len(sequences)
        # Read after all passes: the next is prepared while a device is at work.
        for rows, scores_S in self.run(lambda batch: self.model(batch).scores_S, sequences):
            for row, score in zip(rows, scores_S.tolist()):
                scores[row] = score
        return scores


class TextEncoder:
    """Samples as token ids for a model that does not share the policy's tokenizer."""

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
    """Whether both give a text the same tokens, so that the other's model can read the ids."""
    return first.get_vocab() == second.get_vocab() and first.eos_token_id == second.eos_token_id


def ended(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The ids, ended by the end token; an answer that was truncated is scored as it is."""
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


# ---- process reward models


PLACES = ("steps", "min", "last")
StepLoadOptions = RLOptions | ServeRMOptions


class ProcessReward(FrozenModelReward):
    """A process reward model (`trimtab prm`): every step of a response gets the probability that it is right.

        steps   each score is a reward of its step's last token; the response as a whole gets none
        min     the worst step's score is the reward of the response
        last    the last step's

    Steps end with the placeholder where the policy writes it itself, or else at a separator, such as an empty line,
    before which the placeholder is then inserted. The text after the last of them is a step too.
    """

    def __init__(
        self,
        pretrain: str,
        options: StepLoadOptions,
        device: Device,
        *,
        place: str = "min",
        separator: str | None = None,
        policy_tokenizer: PreTrainedTokenizerBase | None = None,
        **settings: Any,
    ):
        """`options`: LoadOptions and StepRewardOptions (placeholder_token, reward_tokens); `settings`: of
        FrozenModelReward.

        `place`: steps, min or last; steps needs the policy's tokenizer, to find the tokens. `separator`: what ends a
        step; unset: the placeholder.
        """
        if place not in PLACES:
            raise UserError(f"step rewards are placed by {', '.join(PLACES)}, not {place}")
        if not options.reward_tokens:
            raise UserError("a process reward model needs --reward_tokens, positive first, as in its training")
        assert options.placeholder_token is not None
        self.place, self.placeholder, self.policy_tokenizer = place, options.placeholder_token, policy_tokenizer
        self.separator = separator or self.placeholder
        super().__init__(pretrain, options, device, **settings)
        if self.model.path == "logits":
            raise UserError(
                f"--reward_pretrain {pretrain}: cannot read step rewards off {type(self.model.inner).__name__}"
            )
        self._choices = torch.tensor(reward_token_ids(options.reward_tokens, self.tokenizer), device=device.torch)

    def load(self, options: StepLoadOptions, flag: str, split: dict[str, Any]) -> PackedModel:
        self._placeholder_id = one_token(self.placeholder, self.tokenizer, "--placeholder_token")
        return load_frozen_policy(self.pretrain, options, self.device, flag, **split).model

    @property
    def reads_texts(self) -> bool:
        """Of answers, and not only their tokens."""
        return self.place != "steps"

    def __str__(self) -> str:
        return f"process reward model {self.pretrain} ({self.place})"

    def __call__(self, request: RewardRequest) -> RewardResult:
        texts = [self._response(request, row) for row in range(len(request))]
        spans = [split_steps(text, self.separator) for text in texts]
        scores = self.step_scores(request.prompts, texts, spans)
        for row, found in enumerate(scores):
            if not found:
                raise BadSample(f"{self.name}: no step of row {row} is within the first {self.max_len} tokens", row)
        worst, last = [min(found) for found in scores], [found[-1] for found in scores]
        logs = {"steps": [float(len(found)) for found in scores], "worst_step": worst, "last_step": last}
        if self.place != "steps":
            return RewardResult(worst if self.place == "min" else last, logs=logs)
        steps = [self._on_tokens(request.response_ids[row], spans[row], scores[row]) for row in range(len(request))]
        return RewardResult([0.0] * len(request), worst, logs, steps)

    def step_scores(
        self, prompts: list[str], responses: list[str], spans: list[list[tuple[int, int]]]
    ) -> list[list[float]]:
        """The probability of the first reward token at the end of every step; steps beyond max_len have none."""
        tokenised = [self._tokens(*sample) for sample in zip(prompts, responses, spans)]
        scores: list[list[float]] = [[] for _ in responses]

        def score(batch: TokenBatch) -> tuple[list[int], list[float]]:
            right = self.model(batch, choices_K=self._choices).choices_NK[:, 0].exp().tolist()
            return batch.owners_N.tolist(), right

        for rows, found in self.run(score, *(zip(*tokenised) if tokenised else ([],))):
            for owner, right in zip(*found) if rows else ():
                scores[rows[owner]].append(right)
        return scores

    def _response(self, request: RewardRequest, row: int) -> str:
        if self.place == "steps":
            assert self.policy_tokenizer is not None
            # The text whose characters are counted must be that of the tokens.
            text = self.policy_tokenizer.decode(request.response_ids[row], skip_special_tokens=False)
        else:
            text = request.responses[row]
        return without_end(text, self.policy_tokenizer or self.tokenizer, self.tokenizer)

    def _tokens(self, prompt: str, response: str, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """What the model reads, and where the placeholders are."""
        text, marks, position = prompt, [], 0
        for _, end in spans:
            text += response[position:end]
            marks.append((len(text), len(text) + len(self.placeholder)))
            text += self.placeholder
            position = end + len(self.placeholder) if response.startswith(self.placeholder, end) else end
        rendering = Rendering(text, marks)
        ((ids, marked),) = tokenize_renderings([rendering], self.tokenizer)
        if marked.sum() != len(marks) or (ids[marked] != self._placeholder_id).any():
            ids, marked = tokenize_in_pieces(rendering, self.tokenizer)  # the tokenizer joined one with its neighbours
        return ids.astype(np.int64), marked

    def _on_tokens(self, ids: list[int], spans: list[tuple[int, int]], scores: list[float]) -> list[tuple[int, float]]:
        """(index of the response token that ends the step, score); steps that end in one token share it."""
        tokenizer = self.policy_tokenizer
        assert tokenizer is not None

        def characters(index: int) -> int:
            return len(tokenizer.decode(ids[: index + 1], skip_special_tokens=False))

        text = tokenizer.decode(ids, skip_special_tokens=False)
        placed = []
        for (_, end), score in zip(spans, scores):
            if text.startswith(self.placeholder, end):
                end += len(self.placeholder)
            index = bisect_left(range(len(ids)), end, key=characters)
            placed.append((min(index, len(ids) - 1), score))
        return placed


def split_steps(text: str, separator: str) -> list[tuple[int, int]]:
    """Where the steps of a text lie: between the separators, blank ones left out. There is always one."""
    spans, start = [], 0
    for end in [*(found.start() for found in re.finditer(re.escape(separator), text)), len(text)]:
        if text[start:end].strip():
            spans.append((start, end))
        start = end + len(separator)
    return spans or [(0, len(text))]


# ---- classifiers


QUESTION = "question"  # the column with the question as its author wrote it
SAMPLES_A_PASS = 64
UNLIMITED = 10**6  # tokenizers without a limit have a far larger number

# What the documents' classifiers read, which nothing in their files says.
KNOWN = {
    "nicholasKluge/ToxicityModel": "text",
    "OpenAssistant/reward-model-deberta-v3-large-v2": "pair",
}

Encoded = dict[str, list[int]]


def load_classifier_reward(
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
    reads = input_format(pretrain, options.reward_input)
    if reads == "chat":
        return ModelReward(pretrain, exact, device, **settings)
    return ClassifierReward(pretrain, exact, device, reads=reads, max_len=options.rm_max_len, **settings)


def input_format(pretrain: str, asked: str | None) -> str:
    """How a reward model reads samples: as asked, as is known of it, or by its architecture."""
    if asked or pretrain in KNOWN:
        return asked or KNOWN[pretrain]
    check_model_folder(pretrain, "--reward_pretrain")
    model = fake_model(pretrain, AutoClassifier, "--reward_pretrain", num_labels=1)
    return "chat" if hasattr(model, HEAD) else "pair"


class ClassifierReward(ModelReward):
    """A classifier that reads a question and an answer as text, with its own tokenizer.

        pair    the classifier's two inputs: question, answer
        text    one input: the question and, right after it, the answer
        chat    the classifier's chat template (ModelReward)

    An input that is too long loses the beginning of its question; the answer is cut only where it alone is too long.
    """

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
        """Such models are small: every process has the whole of it (`mesh` is ignored)."""
        super().__init__(pretrain, options, device, **settings)
        if not self.tokenizer.is_fast:
            raise UserError(f"--reward_pretrain {pretrain}: reading question and answer needs its fast tokenizer")
        self.reads, self.messages_key = reads, messages_key
        self.columns = [messages_key] if messages_key else []
        self.tokenizers = (self.tokenizer, policy_tokenizer or self.tokenizer)
        self.samples_a_pass = max_samples or SAMPLES_A_PASS
        own = self.tokenizer.model_max_length if self.tokenizer.model_max_length < UNLIMITED else None
        self.limit = min((n for n in (max_len, own, max_positions(self.inner)) if n), default=UNLIMITED)

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
            kept = kept_tokens(owners, self.limit)
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


def kept_tokens(owners: list[int | None], limit: int) -> list[int]:
    """Which tokens stay when at most `limit` may: `owners` says of each whether it is the question's (0), the answer's
    (1) or a mark (None)."""
    excess = max(0, len(owners) - limit)
    question = [i for i, owner in enumerate(owners) if owner == 0]
    answer = [i for i, owner in enumerate(owners) if owner == 1]
    dropped = {*question[:excess]}
    rest = excess - len(dropped)
    dropped |= {*answer[len(answer) - rest :]} if rest else set()
    return [i for i in range(len(owners)) if i not in dropped]


def max_positions(model: nn.Module) -> int | None:
    """How many tokens an encoder can number, if it learns a vector for each place."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith("position_embeddings"):
            # RoBERTa counts from the padding index on.
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return None
