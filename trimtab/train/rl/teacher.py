"""A teacher on the policy's own answers: the prompts that it reads, and its hidden states for an update.

    sampled                        each token's reward gains log teacher - log policy (token_advantages.py)
    reverse_kl, forward_kl, jsd    the loss gains the divergence of both distributions over the whole vocabulary
                                   (objective.py)

The teacher is the role of --teacher_model, or the policy itself, without gradient or with its averaged weights. It may
read other prompts than the policy, which hold what only it may know: self-distillation as in SDFT (Shenfeld et al.
2026) and SDPO (Huebotter et al. 2026). The answers, and so the columns over sampled tokens, are the same.

Between processes go 2 D bytes a token (in bf16): the teacher's hidden states of one optimizer step, and once the
weights of its head. Distributions are made of them chunk by chunk, in the process that learns.
"""

import dataclasses
from typing import Any

from torch import Tensor

from trimtab.config.rl_jobs import RLOptions
from trimtab.data.dataset import settings_of
from trimtab.data.formats import require_columns
from trimtab.data.prompts import PromptDataset, PromptRenderer, PromptSettings, build_prompt_dataset
from trimtab.data.rendering import tokenize_renderings
from trimtab.data.tokenizer import texts_of
from trimtab.distributed.launcher import Group
from trimtab.errors import UserError
from trimtab.rewards.functions import PromptFunction
from trimtab.rewards.requests import make_reward_request
from trimtab.rewards.types import RewardFailed
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.micro_batches import MicroBatcher

UNLIMITED = 2**31 - 1


class TeacherPrompts:
    """The prompts that the teacher reads: a column of the data, or what a function makes of the answers."""

    def __init__(self, options: RLOptions, store: PromptDataset, tokenizer: Any, room: int | None):
        """`room`: the tokens that the teacher's prompt and an answer may have; None: unknown."""
        self.options, self.store, self.tokenizer, self.room = options, store, tokenizer, room
        self.settings = dataclasses.replace(settings_of(PromptSettings, options), input_key="prompt")
        self.function: PromptFunction | None = None
        if options.teacher_prompt_func is not None:
            limits: dict[str, Any] = {} if options.reward_timeout is None else {"seconds": options.reward_timeout}
            self.function = PromptFunction(options.teacher_prompt_func, **limits)
            return
        key = options.teacher_prompt_key
        assert key is not None
        require_columns(store.column_names, {"--teacher_prompt_key": key})
        read = dataclasses.replace(options, input_key=key, label_key=None, prompt_max_len=UNLIMITED)
        self.column, _ = build_prompt_dataset(store.rows, tokenizer, read, what="teacher")
        self.places = {int(row): place for place, row in enumerate(self.column.kept)}
        for place, row in enumerate(self.column.kept):
            if problem := self._too_long(int(self.column.lengths[place]), int(store.lengths[int(row)])):
                raise UserError(f"--teacher_prompt_key {key}: {self.column.place(place)} {problem}")

    def __call__(self, experience: Experience) -> list[list[int]]:
        """Token ids before each sample. []: the policy's own prompt, where the column or the function has nothing, or
        where an episode goes on after its history was rewritten."""
        rows = experience.rows_S.tolist()
        if self.function is None:
            found = [self.column.ids(self.places[row]) if row in self.places else [] for row in rows]
        else:
            found = self._from_function(self.function, experience, rows)
        if experience.branches_S is None:
            return found
        return [[] if branch else ids for ids, branch in zip(found, experience.branches_S.tolist())]

    def _from_function(self, function: PromptFunction, experience: Experience, rows: list[int]) -> list[list[int]]:
        samples = range(len(rows))
        prompt_ids, response_ids = [experience.prompt(i) for i in samples], [experience.response(i) for i in samples]
        responses = texts_of(self.tokenizer, response_ids)
        openings = self.tokenizer.batch_decode(prompt_ids) if experience.episodes is not None else []
        request = make_reward_request(self.store, rows, responses, prompt_ids, response_ids, openings=openings)
        request.columns["rewards"] = experience.rewards_S.tolist()
        renderer = PromptRenderer("prompt", ["prompt", "tools"], self.tokenizer, self.settings, "teacher")
        found: list[list[int]] = [[] for _ in rows]
        try:
            prompts = function.prompts(request)
        except RewardFailed as error:
            if error.row is None:
                raise
            raise RewardFailed(f"{error}; its prompt stands in {self.store.place(rows[error.row])}") from error
        for i, prompt in enumerate(prompts):
            if prompt:
                where = f"{function.file}: {function.name}: a prompt for {self.store.place(rows[i])}"
                row = {"prompt": prompt, "tools": request.columns.get("tools", [None] * len(rows))[i]}
                try:
                    rendering = renderer.render(row, where)
                except UserError as error:  # a failure like any other of a function, so that the run is saved
                    raise RewardFailed(str(error)) from error
                if rendering is None:
                    raise RewardFailed(f"{where} is empty: return None for the policy's own")
                ((ids, _),) = tokenize_renderings([rendering], self.tokenizer)
                if problem := self._too_long(len(ids), len(prompt_ids[i])):
                    raise RewardFailed(f"{where} {problem}")
                found[i] = ids.tolist()
        return found

    def _too_long(self, length: int, own: int) -> str:
        """What is wrong with a prompt of this length in place of the policy's `own` tokens, if anything."""
        episode = self.options.episode_max_len if self.options.plays else None  # of all turns, with the prompt
        flag, answer = "generate_max_len", self.options.generate_max_len
        if episode is not None:
            flag, answer = "episode_max_len", episode - own
        longest = length + answer
        if self.room is None or longest <= self.room:
            return ""
        return (
            f"has {length:,} tokens, with --{flag} {longest:,}, but the teacher has a context of "
            f"{self.room:,} tokens: shorten it"
        )

    def close(self) -> None:
        if self.function is not None:
            self.function.close()


class Teaching:
    """The loop's side of the teacher."""

    def __init__(self, options: RLOptions, batcher: MicroBatcher, prompts: TeacherPrompts | None):
        self.options, self.batcher, self.prompts = options, batcher, prompts
        self.averaged = "averaged_" if options.teacher_ema else ""

    def use(self, actor: Group, teacher: Group | None) -> None:
        """Teach this actor, which without a `teacher` teaches itself. Distributions need the teacher's head there."""
        self.role: Group = teacher or actor
        if self.options.teaches_vocabulary and teacher is not None:
            actor.call("use_teacher_head", head=next(head for head in teacher.call("head") if head is not None))

    def score(self, experience: Experience) -> None:
        """Before the updates: which prompts the teacher reads, and its log-probs if these are the reward."""
        if self.prompts is not None:
            experience.teacher_prompts = self.prompts(experience)
        if not self.options.teaches_vocabulary:
            self.batcher.fill(experience, "teacher_N", self.role, f"{self.averaged}log_probs")

    def states(self, experience: Experience, samples: list[int]) -> Tensor | None:
        """For an update on these samples: the teacher's hidden states, if the loss compares distributions."""
        if not self.options.teaches_vocabulary:
            return None
        return self.batcher.teacher_states(experience, samples, self.role, f"{self.averaged}hidden_states")

    def close(self) -> None:
        if self.prompts is not None:
            self.prompts.close()
