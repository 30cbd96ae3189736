"""Sequence classifiers with one output: reward models score a sequence at its last token, critics every token.

transformers has no classifier for about half of its causal LMs. For those a class is created here: the causal LM's
backbone with its weight names, and a linear head called `score`. The config.json of such a model has `"score_head":
"trimtab"`; the folder has no code, and transformers' AutoModel can load the backbone from it.
"""

import copy
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from trimtab.data.batches import TokenBatch
from trimtab.errors import UserError
from trimtab.files import replacing
from trimtab.models.packed import PackedModel
from trimtab.models.parallel.context_parallel import Routers

REWARDS = "rewards.json"  # in the model's folder: rewards of the evaluation pairs, their mean and spread
HEAD = "score"  # the head's name in Hugging Face's decoder classifiers
OURS = "trimtab"  # `score_head` in the config.json of a model whose class is created here


class AutoClassifier:
    """AutoModelForSequenceClassification that also supports causal LMs without such a class."""

    @staticmethod
    def from_pretrained(pretrain: str, *, num_labels: int = 1, **arguments: Any) -> Any:
        reading = {name: arguments[name] for name in ("trust_remote_code", "local_files_only") if name in arguments}
        config = AutoConfig.from_pretrained(pretrain, num_labels=num_labels, **reading)
        if not _needs_head(config):
            return AutoModelForSequenceClassification.from_pretrained(pretrain, num_labels=num_labels, **arguments)
        kind, config = _scored_decoder(config)
        return kind.from_pretrained(pretrain, config=config, **arguments)

    @staticmethod
    def from_config(config: Any, *, trust_remote_code: bool = False, **arguments: Any) -> Any:
        if not _needs_head(config):
            arguments["trust_remote_code"] = trust_remote_code
            return AutoModelForSequenceClassification.from_config(config, **arguments)
        kind, config = _scored_decoder(config)
        return kind._from_config(config, **arguments)


Family: Any = object  # stands for the family's PreTrainedModel, which `_make_class` adds


class ScoredDecoder(Family):
    """A causal LM's backbone with a score head. `_make_class` combines it with the family's PreTrainedModel."""

    backbone_class: Any

    def __init__(self, config: Any):
        super().__init__(config)
        config.score_head = OURS
        setattr(self, self.base_model_prefix, self.backbone_class(config))
        setattr(self, HEAD, nn.Linear(config.get_text_config().hidden_size, config.num_labels, bias=False))
        self.post_init()

    def forward(self, input_ids: Tensor, **arguments: Any) -> Any:
        """`logits` at the last non-padding token of each row, like transformers' own classifiers."""
        states_STD = self.base_model(input_ids=input_ids, **arguments).last_hidden_state
        padding = self.config.get_text_config().pad_token_id
        filled_ST = torch.ones_like(input_ids) if padding is None else (input_ids != padding).long()
        last_S = filled_ST.shape[1] - 1 - filled_ST.flip(1).argmax(1)
        rows_S = torch.arange(len(input_ids), device=input_ids.device)
        return SequenceClassifierOutput(logits=getattr(self, HEAD)(states_STD[rows_S, last_S]))


def _needs_head(config: Any) -> bool:
    """Whether this is a causal LM of transformers without a sequence classifier."""
    brings_code = "AutoModelForSequenceClassification" in getattr(config, "auto_map", {})
    known = brings_code or type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    return not known and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def _scored_decoder(config: Any) -> tuple[Any, Any]:
    """The class for a model of this configuration, and the configuration for it: of a multimodal one the text part, if
    the causal LM takes that."""
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(config)
    parts = [(name, part) for name, part in causal.named_children() if isinstance(part, PreTrainedModel)]
    if type(causal.config) is not type(config):
        config = config.get_text_config()
    if len(parts) != 1 or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # such a model could not be loaded again
        raise ValueError(f"a score head cannot be put on {type(causal).__name__}; use another model")
    kinds: list[Any] = [type(causal), type(parts[0][1])]
    return _make_class(*kinds, parts[0][0]), config


@functools.cache
def _make_class(causal: Any, backbone: Any, prefix: str) -> Any:
    """A classifier class with the name transformers would give it, and the causal LM's weight names."""
    family = next(kind for kind in causal.__mro__ if issubclass(backbone, kind))
    name = f"{causal.__name__.removesuffix('ForCausalLM')}ForSequenceClassification"
    content = {"base_model_prefix": prefix, "backbone_class": backbone}
    # transformers inspects the source file of a class to decide which attention implementations it supports.
    return type(name, (ScoredDecoder, family), content | {"__module__": causal.__module__})


@dataclass
class RewardOutput:
    scores_S: Tensor  # fp32, one a sequence
    router_logits: Routers = None


register_dataclass(RewardOutput)  # as PolicyOutput


class RewardModel(PackedModel):
    """Scores each sequence at its last token."""

    def forward(self, batch: TokenBatch, *, router: bool = False) -> RewardOutput:
        batch = self.rotary.separate(batch)
        if self.path == "logits":
            # The model finds the last non-padding token itself.
            _, logits = self.own_logits(batch, self.config.get_text_config().pad_token_id)
            return RewardOutput(logits[:, 0].float())
        read = self.read(batch, batch.last_S, router=router)
        return RewardOutput(read.whole(getattr(self.inner, HEAD)(read.states_ND)[:, 0].float()), read.routers)

    def check_values(self, batch: TokenBatch) -> Tensor:
        return self(batch).scores_S

    def reference_values(self, batch: TokenBatch) -> Tensor:
        sequences = [batch.sequence(i) for i in range(len(batch.spans))]
        return torch.stack([self.inner(input_ids=s[None], use_cache=False).logits[0, 0].float() for s in sequences])


class Critic(PackedModel):
    """A classifier used at every position. `mean`, `deviation`: normalization of the reward model it started from."""

    mean = 0.0
    deviation = 1.0

    def forward(self, batch: TokenBatch, *, after: bool = False) -> Tensor:
        """fp32 values [N] of the states before the trained tokens, or `after` them."""
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


def initialise_head(model: nn.Module) -> None:
    """Initialize a new head with small weights, so that all rewards start near zero."""
    _draw(getattr(model, HEAD), model)


def drawn_head(model: nn.Module) -> Tensor:
    """The weight of a new head for a model without weights: the same values that loading it whole would draw."""
    head = copy.deepcopy(getattr(model, HEAD)).to_empty(device="cpu")
    with torch.no_grad():
        model._init_weights(head)  # loading initializes missing weights first
        _draw(head, model)
    return head.weight.detach()


def _draw(head: nn.Module, model: nn.Module) -> None:
    nn.init.normal_(head.weight, std=1 / (model.config.get_text_config().hidden_size + 1))


def separate_padding(model: nn.Module, tokenizer) -> None:
    """Choose a padding token that is not the end token.

    Hugging Face's classifiers score the last non-padding token. Answers end with the end token, so with the same token
    as padding the saved model would score another position than the trained one.
    """
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        named = [tokenizer.unk_token, tokenizer.bos_token, *tokenizer.all_special_tokens]
        others = [t for t in named if t and tokenizer.convert_tokens_to_ids(t) != tokenizer.eos_token_id]
        if not others:
            raise UserError(
                "--pretrain: the tokenizer has no special token besides the end token to pad with; give it a pad token"
            )
        tokenizer.pad_token = others[0]
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def rename_head(folder: Path, old: str, new: str) -> None:
    """Rename the head of a saved model in its weight files and in their index."""
    for path in folder.glob("*.safetensors.index.json"):
        index = json.loads(path.read_text())
        index["weight_map"] = {renamed(name, old, new): file for name, file in index["weight_map"].items()}
        path.write_text(json.dumps(index, indent=2))
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        after = {renamed(name, old, new): tensor for name, tensor in tensors.items()}
        if after.keys() != tensors.keys():
            with replacing(path) as temporary:
                save_file(after, temporary, metadata={"format": "pt"})


def renamed(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(f"{old}.") else name
