"""Rewards from a process reward model (`trimtab prm`): every step of a response gets the probability that it is right.

    steps   each score stands on the last token of its step; the response as a whole gets none besides
    min     the worst step's score is the reward of the response
    last    the last step's

Steps end with the placeholder where the policy writes it itself, or else at a separator, such as an empty line, before
which the placeholder is then put. What follows the last of them is a step too.
"""

import re
from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from trimtab.config.jobs import ServeRMOptions
from trimtab.config.rl_jobs import RLOptions
from trimtab.data.chat import Rendering
from trimtab.data.step_formats import one_token, reward_token_ids
from trimtab.data.tokenising import tokenise, tokenise_in_pieces
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import Device
from trimtab.distributed.mesh import Mesh
from trimtab.errors import UserError
from trimtab.models.hugging_face import check_model_folder
from trimtab.models.keeping import Keeping
from trimtab.models.load import load_frozen_policy
from trimtab.rewards.model import IDLE, MAX_TOKENS, Passes, without_end
from trimtab.rewards.types import BadSample, RewardRequest, RewardResult

PLACES = ("steps", "min", "last")
StepLoadOptions = RLOptions | ServeRMOptions


class ProcessReward:
    concurrent = False
    columns: tuple[str, ...] = ()  # what it asks for of the data

    def __init__(
        self,
        pretrain: str,
        options: StepLoadOptions,
        device: Device,
        *,
        place: str = "min",
        separator: str | None = None,
        policy_tokenizer: PreTrainedTokenizerBase | None = None,
        max_len: int | None = None,
        max_samples: int | None = None,
        max_tokens: int = MAX_TOKENS,
        mesh: Mesh | None = None,
        offload: bool = False,
    ):
        """`options`: how to load it, and its placeholder_token and reward_tokens (LoadOptions, StepRewardOptions).

        `place`: steps, min or last; steps needs the policy's tokenizer, to find the tokens. `separator`: what ends a
        step; unset: the placeholder. The rest is as in ModelReward.
        """
        if place not in PLACES:
            raise UserError(f"step rewards are placed by {', '.join(PLACES)}, not {place}")
        if not options.reward_tokens:
            raise UserError("a process reward model needs --reward_tokens, positive first, as in its training")
        assert options.placeholder_token is not None
        self.name, self.pretrain = Path(pretrain).name, pretrain
        self.device, self.place, self.placeholder = device, place, options.placeholder_token
        self.separator = separator or self.placeholder
        self.policy_tokenizer = policy_tokenizer
        check_model_folder(pretrain, "--reward_pretrain")
        self.tokenizer = load_tokenizer(pretrain, disable_fast=options.disable_fast_tokenizer, flag="--reward_pretrain")
        self._placeholder_id = one_token(self.placeholder, self.tokenizer, "--placeholder_token")
        split: dict[str, Any] = {"mesh": mesh, "offload": offload}
        self.model = load_frozen_policy(pretrain, options, device, "--reward_pretrain", **split).model
        self.keeping = Keeping(device, **split)
        self.keeping.settle(self.model)
        if self.model.path == "logits":
            raise UserError(
                f"--reward_pretrain {pretrain}: cannot read step rewards off {type(self.model.inner).__name__}"
            )
        self._choices = torch.tensor(reward_token_ids(options.reward_tokens, self.tokenizer), device=device.torch)
        self._passes = Passes(max_len, max_samples, max_tokens, packed=self.model.path == "packed")

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
                raise BadSample(
                    f"{self.name}: no step of row {row} is within the first {self._passes.max_len} tokens", row
                )
        worst, last = [min(found) for found in scores], [found[-1] for found in scores]
        logs = {"steps": [float(len(found)) for found in scores], "worst_step": worst, "last_step": last}
        if self.place != "steps":
            return RewardResult(worst if self.place == "min" else last, logs=logs)
        steps = [self._on_tokens(request.response_ids[row], spans[row], scores[row]) for row in range(len(request))]
        return RewardResult([0.0] * len(request), worst, logs, steps)

    def close(self) -> None:
        pass

    def step_scores(
        self, prompts: list[str], responses: list[str], spans: list[list[tuple[int, int]]]
    ) -> list[list[float]]:
        """The probability of the first reward token at the end of every step; steps beyond max_len have none."""
        tokenised = [self._tokens(*sample) for sample in zip(prompts, responses, spans)]
        scores: list[list[float]] = [[] for _ in responses]
        passes = list(self._passes.over(*zip(*tokenised))) if tokenised else []
        with self.keeping.at_work(self.model):
            for rows, batch in self.keeping.in_step(passes, IDLE):
                batch = batch.to(self.device.torch)
                right = self.model(batch, choices_K=self._choices).choices_NK[:, 0].exp().tolist()
                for owner, score in zip(batch.owners_N.tolist(), right) if rows else ():
                    scores[rows[owner]].append(score)
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
        ((ids, marked),) = tokenise([rendering], self.tokenizer)
        if marked.sum() != len(marks) or (ids[marked] != self._placeholder_id).any():
            ids, marked = tokenise_in_pieces(rendering, self.tokenizer)  # the tokenizer joined one with its neighbours
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
