"""The workload of one step as a plan sees it: the models, the number of tokens, and the shape of rows."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from trimtab.config.data_options import PreferenceColumns, listed
from trimtab.config.objective_options import (
    CachedReferenceOptions,
    DistillationOptions,
    PreferenceLossOptions,
    ReferenceOptions,
)
from trimtab.config.rl_jobs import RLOptions
from trimtab.data.batches import Example
from trimtab.errors import UserError
from trimtab.models.load import TrainedModelOptions, fake_frozen_policy, fake_policy, fake_reward_model
from trimtab.models.packed import PackedModel
from trimtab.models.pretrained import RANDOM, SINGLE
from trimtab.models.reward import Critic, RewardModel
from trimtab.rewards.models import MAX_TOKENS

WITHOUT_REFERENCE = ("orpo", "simpo")
TOKENS_ON_CPU = 2048
"""Default micro-batch size on a CPU: enough to keep its cores busy, in little memory."""
SCORING_TOKENS, SCORING_TIMES = 32_768, 4


@dataclass(frozen=True)
class RowShape:
    """The shape of a micro-batch's row: groups of answers to one prompt, whose tokens are in the row once; in
    supervised jobs samples, or the two of a pair, without a common prompt."""

    prompt: int
    answer: int
    group: int = 1

    @property
    def longest(self) -> int:
        return self.prompt + self.answer

    def _answers(self, budget: int) -> int:
        """Answers to a prompt that are one piece of a row of at most `budget` tokens."""
        return max(1, min(self.group, (budget - self.prompt) // self.answer))

    def packed(self, budget: int) -> int:
        """Tokens of a row of whole pieces, of at most `budget` tokens if one piece is."""
        piece = self.prompt + self._answers(budget) * self.answer
        return max(1, budget // piece) * piece

    def filling(self, budget: int) -> "RowShape":
        """Rows with answers so much shorter that whole pieces fill `budget` tokens."""
        answers = self._answers(budget)
        pieces = -(-budget // (self.prompt + answers * self.answer))
        answer = (budget // pieces - self.prompt) // answers
        return dataclasses.replace(self, answer=answer) if 0 < answer < self.answer else self

    def examples(self, tokens: int) -> tuple[list[Example], list[int]]:
        """A row of exactly `tokens` tokens, and the length of each sequence's shared prefix; the last one may be
        shorter."""
        examples: list[Example] = []
        shared: list[int] = []
        left = tokens
        while left > 0:
            prefix = self.prompt if len(examples) % self.group else 0
            own = min(self.longest - prefix, left)
            trained = np.arange(prefix + own) >= max(self.prompt, 1)
            examples.append((np.zeros(prefix + own, dtype=np.int64), trained))
            shared.append(prefix)
            left -= own
        return examples, shared


@dataclass(frozen=True)
class Work:
    """The tokens of an optimizer step."""

    rows: RowShape
    """The shape of the samples."""
    tokens: int
    """Tokens of one optimizer step, in rows: the largest useful micro-batch."""
    least: int
    """Tokens of one sample: the smallest possible micro-batch."""


def supposed(options: TrainedModelOptions) -> Work:
    """The largest workload that the options allow, without reading data: every sample has the maximum length."""
    if isinstance(options, RLOptions):
        return rl_work(options, options.prompt_max_len)
    answers = 2 if isinstance(options, PreferenceColumns) else 1
    sample = answers * options.max_len
    return Work(RowShape(0, options.max_len, answers), options.train_batch_size * sample, sample)


def rl_work(options: RLOptions, longest_prompt: int) -> Work:
    group = options.n_samples_per_prompt
    answer = max(1, options.longest_rollout - longest_prompt) if options.plays else options.generate_max_len
    rows = RowShape(longest_prompt, answer, group)
    return Work(rows, options.groups_per_update * (rows.prompt + group * rows.answer), rows.longest)


def refuse_unplannable(options: TrainedModelOptions) -> None:
    if options.trainer == "tail":
        raise UserError("the models of a tail run are not planned; plan the grpo or ppo of the same sizes")
    if options.load_in_4bit:
        raise UserError("--load_in_4bit: 4-bit weights are not planned")
    if options.attn_implementation is not None:
        raise UserError("--attn_implementation: only the attention that is used by default is planned")


# ---- tokens of a micro-batch


def packs_by_tokens(options: TrainedModelOptions) -> bool:
    return options.use_dynamic_batch if isinstance(options, RLOptions) else options.packing_samples


def given_budget(options: TrainedModelOptions, work: Work) -> int:
    """The micro-batch size in tokens that the options set."""
    if packs_by_tokens(options) and options.train_max_tokens_per_gpu:
        return options.row_tokens(options.train_max_tokens_per_gpu)
    return options.micro_train_batch_size * work.least


def budget_changes(options: TrainedModelOptions, tokens: int | None) -> dict[str, Any]:
    """Options for micro-batches of at most `tokens` tokens; None: limited by samples."""
    how = "use_dynamic_batch" if isinstance(options, RLOptions) else "packing_samples"
    return {how: tokens is not None, "train_max_tokens_per_gpu": tokens}


def scoring_tokens(tokens: int) -> int:
    """Size of a scoring micro-batch on an accelerator, if a training one has `tokens`. It may be larger, because no
    activations are saved for a backward pass."""
    return max(tokens, min(SCORING_TOKENS, SCORING_TIMES * tokens))


# ---- models


@dataclass(frozen=True)
class JobModel:
    """A fake model of a job."""

    name: str
    role: str
    skeleton: PackedModel
    trained: bool = False
    """False: it only scores."""
    offload: bool = False
    """It is in main memory while it is not used."""
    pass_tokens: int | None = None
    """Size of its micro-batches, if different from training."""


def job_models(options: TrainedModelOptions) -> list[JobModel]:
    """All models of a job, trained ones first."""
    if not isinstance(options, RLOptions):
        skeleton = fake_reward_model(options) if options.verb == "rm" else fake_policy(options)
        found = [JobModel("model", "model", skeleton, trained=True)]
        reference_offload = teacher_offload = False
    else:
        found = [JobModel("actor", "actor", fake_policy(options), trained=True)]
        if options.estimator.critic:
            critic = Critic(_with_score_head(options, *_origin_of_critic(options)).model)
            found.append(JobModel("critic", "critic", critic, trained=True))
        reference_offload = teacher_offload = options.ref_reward_offload
    if _has_reference(options):
        name = options.pretrain
        if isinstance(options, ReferenceOptions):
            name, reference_offload = options.ref_pretrain or name, options.ref_offload
        skeleton = fake_frozen_policy(name, "--ref_pretrain")
        found.append(JobModel("reference", "reference", skeleton, offload=reference_offload))
    own_base = isinstance(options, RLOptions) and options.teacher_is_base
    if isinstance(options, RLOptions | DistillationOptions) and options.teacher_model and not own_base:
        if isinstance(options, DistillationOptions):
            teacher_offload = options.teacher_offload
        skeleton = fake_frozen_policy(options.teacher_model, "--teacher_model")
        found.append(JobModel("teacher", "teacher", skeleton, offload=teacher_offload))
    for name in listed(options.reward_pretrain) if isinstance(options, RLOptions) else []:
        assert isinstance(options, RLOptions)
        skeleton = _with_score_head(dataclasses.replace(options, lora_rank=0), name, "--reward_pretrain")
        called = f"reward model {Path(name).name}"
        found.append(JobModel(called, "reward", skeleton, offload=options.ref_reward_offload, pass_tokens=MAX_TOKENS))
    return found


def _origin_of_critic(options: RLOptions) -> tuple[str, str]:
    """The model that initializes the critic, and its flag."""
    if options.critic_pretrain:
        return options.critic_pretrain, "--critic_pretrain"
    if rewards := listed(options.reward_pretrain):
        return rewards[0], "--reward_pretrain"
    return options.pretrain, "--pretrain"


def _with_score_head(options: RLOptions, name: str, flag: str) -> RewardModel:
    return fake_reward_model(dataclasses.replace(options, pretrain=name), flag)


def _has_reference(options: TrainedModelOptions) -> bool:
    if isinstance(options, RLOptions):
        return options.init_kl_coef > 0 and options.lora_rank == 0
    if not isinstance(options, ReferenceOptions):
        return False
    if isinstance(options, PreferenceLossOptions) and options.preference_loss in WITHOUT_REFERENCE:
        return False
    if isinstance(options, CachedReferenceOptions) and options.precompute_ref_log_probs:
        return False
    return options.lora_rank == 0 or options.ref_pretrain is not None


# ---- models given by size: `70B` is a Llama of that size, without files

_CONFIG_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
_LLAMAS = {
    "7B": (4096, 11_008, 32, 32, 32, 32_000),
    "8B": (4096, 14_336, 32, 32, 8, 128_256),
    "13B": (5120, 13_824, 40, 40, 40, 32_000),
    "34B": (8192, 22_016, 48, 64, 8, 32_000),
    "70B": (8192, 28_672, 80, 64, 8, 32_000),
    "405B": (16_384, 53_248, 126, 128, 8, 128_256),
}
_MIXTRALS = {  # 8 experts, 2 per token
    "8x7B": (4096, 14_336, 32, 32, 8, 32_000),
    "8x22B": (6144, 16_384, 56, 48, 8, 32_768),
}
SIZES = (*_LLAMAS, *_MIXTRALS)
LONGEST = 131_072  # positions, more than these models have, so that long rows can be planned


def with_sized_models(options: TrainedModelOptions, folder: Path) -> TrainedModelOptions:
    """The options with a folder for each model that is given by its size alone."""
    changes: dict[str, Any] = {}
    for name in ("pretrain", "reward_pretrain", "critic_pretrain", "ref_pretrain", "teacher_model"):
        named = listed(getattr(options, name, None))
        if any(model in SIZES for model in named):
            found = [write_sized_model(m, folder) if m in SIZES and not Path(m).exists() else m for m in named]
            changes[name] = ",".join(found)
    return dataclasses.replace(options, **changes)


def write_sized_model(size: str, folder: Path) -> str:
    """A folder with the config.json of a model of this size, random weights and a tokenizer of three tokens."""
    config: dict[str, Any] = {"tie_word_embeddings": False, "max_position_embeddings": LONGEST}
    config |= {"mean": 0.0, "std": 1.0}  # of a reward model's scores
    if size in _LLAMAS:
        config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | dict(
            zip(_CONFIG_KEYS, _LLAMAS[size])
        )
    else:
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        config |= dict(zip(_CONFIG_KEYS, _MIXTRALS[size])) | {"num_local_experts": 8, "num_experts_per_tok": 2}
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    config |= {f"{name}_id": number for number, name in enumerate(special)}
    place = folder / size
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    save_file({}, place / SINGLE, metadata={RANDOM: "True"})
    known = {token: number for number, token in enumerate(special.values())}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(place)
    return str(place)
