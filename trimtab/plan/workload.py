"""What a job does in one step, as far as a plan must know it: which models, how many tokens, in rows of what shape."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.config.data import PreferenceColumns
from trimtab.config.jobs import RLOptions
from trimtab.config.objectives import (
    CachedReferenceOptions,
    DistillationOptions,
    PreferenceLossOptions,
    ReferenceOptions,
)
from trimtab.config.sources import listed
from trimtab.data.batches import Example
from trimtab.models.load import TrainedModelOptions, fake_frozen_policy, fake_policy, fake_reward_model
from trimtab.models.packed import PackedModel
from trimtab.models.reward import Critic, RewardModel
from trimtab.rewards.models import MAX_TOKENS

WITHOUT_REFERENCE = ("orpo", "simpo")
TOKENS_ON_CPU = 2048
"""Of a micro-batch where no option says how large it is: enough to keep the cores of a CPU busy, in little memory."""
SCORING_TOKENS, SCORING_TIMES = 32_768, 4


@dataclass(frozen=True)
class Rows:
    """What passes read: groups of answers to one prompt, whose tokens stand in a row once."""

    prompt: int
    answer: int
    group: int = 1

    @property
    def longest(self) -> int:
        return self.prompt + self.answer

    def examples(self, tokens: int) -> tuple[list[Example], list[int]]:
        """A row of exactly so many tokens, and what each sequence borrows; the last one may be shorter."""
        examples: list[Example] = []
        shared: list[int] = []
        left = tokens
        while left > 0:
            borrowed = self.prompt if len(examples) % self.group else 0
            own = min(self.longest - borrowed, left)
            trained = np.arange(borrowed + own) >= max(self.prompt, 1)
            examples.append((np.zeros(borrowed + own, dtype=np.int64), trained))
            shared.append(borrowed)
            left -= own
        return examples, shared


@dataclass(frozen=True)
class Work:
    rows: Rows
    """The shape of the samples."""
    tokens: int
    """Tokens of one optimiser step, in rows; a pass need not be larger."""
    least: int
    """Tokens of one sample: a pass cannot be smaller."""


@dataclass(frozen=True)
class Frozen:
    """A model that only scores."""

    name: str
    model: PackedModel
    offload: bool = False
    """Waits in main memory while it has nothing to do."""
    pass_tokens: int | None = None
    """Of its passes, if they are not as large as those of training."""


def supposed(options: TrainedModelOptions) -> Work:
    """What the options allow, without a look at the data: every sample as long as it may be."""
    if isinstance(options, RLOptions):
        return rl_work(options, options.prompt_max_len)
    answers = 2 if isinstance(options, PreferenceColumns) else 1
    sample = answers * options.max_len
    return Work(Rows(0, options.max_len), options.train_batch_size * sample, sample)


def rl_work(options: RLOptions, longest_prompt: int) -> Work:
    group = options.n_samples_per_prompt
    answer = max(1, options.longest_rollout - longest_prompt) if options.plays else options.generate_max_len
    rows = Rows(longest_prompt, answer, group)
    groups = max(1, options.train_batch_size // group)
    return Work(rows, groups * (rows.prompt + group * rows.answer), rows.longest)


def given_budget(options: TrainedModelOptions, work: Work) -> int:
    """Tokens of a pass as the options have it."""
    by_tokens = options.use_dynamic_batch if isinstance(options, RLOptions) else options.packing_samples
    if by_tokens and options.train_max_tokens_per_gpu:
        return options.row_tokens(options.train_max_tokens_per_gpu)
    return options.micro_train_batch_size * work.least


def scoring_tokens(tokens: int) -> int:
    """Tokens of a micro-batch of scoring on an accelerator, where those of training have `tokens`: nothing is kept for
    a backward pass, so that a layer's activations are all that grows."""
    return max(tokens, min(SCORING_TOKENS, SCORING_TIMES * tokens))


def budget_changes(options: TrainedModelOptions, tokens: int | None) -> dict[str, Any]:
    """The options that make passes of at most so many tokens; None: of a number of samples."""
    how = "use_dynamic_batch" if isinstance(options, RLOptions) else "packing_samples"
    return {how: tokens is not None, "train_max_tokens_per_gpu": tokens}


def trained_models(options: TrainedModelOptions) -> dict[str, PackedModel]:
    if not isinstance(options, RLOptions):
        return {"model": fake_reward_model(options) if options.verb == "rm" else fake_policy(options)}
    models: dict[str, PackedModel] = {"actor": fake_policy(options)}
    if options.estimator.critic:
        models["critic"] = Critic(_judge(options, *_origin_of_critic(options)).model)
    return models


def frozen_models(options: TrainedModelOptions) -> list[Frozen]:
    found = []
    if _has_reference(options):
        if isinstance(options, ReferenceOptions):
            name, offload = options.ref_pretrain or options.pretrain, options.ref_offload
        else:
            name, offload = options.pretrain, isinstance(options, RLOptions) and options.ref_reward_offload
        found.append(Frozen("reference", fake_frozen_policy(name, "--ref_pretrain"), offload))
    if isinstance(options, RLOptions | DistillationOptions) and options.teacher_model:
        offload = options.ref_reward_offload if isinstance(options, RLOptions) else options.teacher_offload
        found.append(Frozen("teacher", fake_frozen_policy(options.teacher_model, "--teacher_model"), offload))
    if not isinstance(options, RLOptions):
        return found
    for name in listed(options.reward_pretrain):
        judge = _judge(dataclasses.replace(options, lora_rank=0), name, "--reward_pretrain")
        found.append(Frozen(f"reward model {name}", judge, options.ref_reward_offload, pass_tokens=MAX_TOKENS))
    return found


def _origin_of_critic(options: RLOptions) -> tuple[str, str]:
    """The model that the critic begins as, and the flag that names it."""
    if options.critic_pretrain:
        return options.critic_pretrain, "--critic_pretrain"
    if rewards := listed(options.reward_pretrain):
        return rewards[0], "--reward_pretrain"
    return options.pretrain, "--pretrain"


def _judge(options: RLOptions, name: str, flag: str) -> RewardModel:
    """The model `name` with a score head."""
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


# ---- Models that can be planned by their size alone: `70B` is a Llama of that size, of which no file is needed.


_NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
_SIZES = {  # width, width of the feed-forward part, layers, heads, heads of keys and values, words
    "7B": (4096, 11_008, 32, 32, 32, 32_000),
    "8B": (4096, 14_336, 32, 32, 8, 128_256),
    "13B": (5120, 13_824, 40, 40, 40, 32_000),
    "34B": (8192, 22_016, 48, 64, 8, 32_000),
    "70B": (8192, 28_672, 80, 64, 8, 32_000),
    "405B": (16_384, 53_248, 126, 128, 8, 128_256),
}
_MIXTURES = {  # the same of Mixtrals: 8 experts, of which a token goes to 2
    "8x7B": (4096, 14_336, 32, 32, 8, 32_000),
    "8x22B": (6144, 16_384, 56, 48, 8, 32_768),
}
NAMES = (*_SIZES, *_MIXTURES)
LONGEST = 131_072  # positions: more than any of them, so that long rows can be planned


def written(name: str, folder: Path) -> str:
    """A folder with the config.json of this shape."""
    config: dict[str, Any] = {"tie_word_embeddings": False, "max_position_embeddings": LONGEST}
    if name in _SIZES:
        config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | dict(zip(_NAMES, _SIZES[name]))
    else:
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        config |= dict(zip(_NAMES, _MIXTURES[name])) | {"num_local_experts": 8, "num_experts_per_tok": 2}
    place = folder / name
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    return str(place)
