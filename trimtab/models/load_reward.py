"""Load sequence classifiers with one score: reward models and critics to be trained, reward models that only score."""

from typing import Any

import torch
from torch import nn

from trimtab.config.jobs import AttackOptions, GenerateOptions, RMOptions, ServeRMOptions
from trimtab.config.rl_jobs import RLOptions
from trimtab.distributed.device import Device
from trimtab.distributed.mesh import Mesh
from trimtab.errors import UserError
from trimtab.models.hugging_face import (
    check_model_folder,
    from_pretrained,
    quiet_transformers,
    refuse_fresh_weights,
    skeleton,
)
from trimtab.models.load import (
    Loaded,
    arguments_of,
    cast_parameters,
    fingerprint,
    frozen_in_parts,
    in_parts,
    placed,
    to_be_trained,
    trained_in_parts,
)
from trimtab.models.lora import add_adapters
from trimtab.models.packed import PackedModel
from trimtab.models.reward import (
    HEAD,
    AutoClassifier,
    RewardModel,
    but_for_head,
    initialise_head,
    not_a_decoder,
    separate_padding,
)
from trimtab.models.sharded import TrainedModelOptions, shard_frozen
from trimtab.models.sharded_load import Unfilled, begin

RewardLoadOptions = RMOptions | RLOptions | GenerateOptions | AttackOptions | ServeRMOptions
"""What has LoadOptions and RewardHeadOptions."""


def load_reward_model(
    options: RMOptions | RLOptions,
    device: Device,
    tokenizer: Any,
    mesh: Mesh | None = None,
    *,
    root: type[PackedModel] = RewardModel,
) -> Loaded:
    """A reward model or critic to be trained, from one that has a head already or from a causal LM; split over the
    processes of `mesh`."""
    mesh, pretrain = mesh or Mesh(), options.pretrain
    head = _stored_head(pretrain, options)
    if in_parts(options, mesh) and (unfilled := _unfilled_classifier(pretrain, options, mesh, head)):
        _require_head(unfilled.model, pretrain)
        separate_padding(unfilled.model, tokenizer)
        return trained_in_parts(root, unfilled, options, device, mesh)
    model, found = _classifier(pretrain, options, device, head)
    _require_head(model, pretrain)
    if _without_head(found):
        initialise_head(model)
    refuse_fresh_weights(pretrain, but_for_head(found))
    separate_padding(model, tokenizer)
    return to_be_trained(root, model, options, device, mesh)


def load_frozen_reward_model(
    pretrain: str,
    options: RewardLoadOptions,
    device: Device,
    tokenizer: Any,
    flag: str = "--reward_pretrain",
    *,
    mesh: Mesh | None = None,
    offload: bool = False,
) -> Loaded:
    """A reward model that only scores: ours, or any sequence classifier with one score. `mesh`, `offload`: as those of
    a frozen policy."""
    head = _stored_head(pretrain, options, flag)
    if mesh and (unfilled := _unfilled_classifier(pretrain, options, mesh, head, flag)):
        if hasattr(unfilled.model, HEAD) and not unfilled.has_head:
            raise UserError(_NO_HEAD.format(flag, pretrain))
        separate_padding(unfilled.model, tokenizer)
        return frozen_in_parts(RewardModel, unfilled, pretrain, options, device, mesh, flag, offload)
    model, found = _classifier(pretrain, options, device, head, flag)
    if _without_head(found):
        raise UserError(_NO_HEAD.format(flag, pretrain))
    refuse_fresh_weights(pretrain, found, flag=flag)
    separate_padding(model, tokenizer)
    weights = fingerprint(model, pretrain, options, flag)
    model.requires_grad_(False)
    if hasattr(model, HEAD):
        reward = RewardModel(model).eval()
        verdict = placed(reward, options, device, cast=options.bf16)
    else:
        reward, verdict = not_a_decoder(model)
        if options.bf16:
            cast_parameters(reward, torch.bfloat16)
        reward.to(device.torch)
    if mesh:
        shard_frozen(reward, mesh, offload=offload)
    return Loaded(reward, verdict, weights)


_NO_HEAD = "{} {}: a model without a trained score head; make one of it with trimtab rm"


def _stored_head(pretrain: str, options: RewardLoadOptions, flag: str = "--pretrain") -> str:
    """What the score head is called in the files."""
    from transformers import AutoConfig

    check_model_folder(pretrain, flag)
    quiet_transformers()
    return getattr(from_pretrained(AutoConfig, pretrain, flag=flag), "value_head_prefix", options.value_head_prefix)


def _unfilled_classifier(
    pretrain: str, options: RewardLoadOptions, mesh: Mesh, head: str, flag: str = "--pretrain"
) -> Unfilled | None:
    return begin(pretrain, AutoClassifier, options, mesh, flag, head=head, num_labels=1)


def _classifier(
    pretrain: str, options: RewardLoadOptions, device: Device, head: str, flag: str = "--pretrain"
) -> tuple[nn.Module, dict]:
    """A sequence classifier with one score, and what loading found."""
    arguments = arguments_of(options, device) | {"num_labels": 1}
    if head != HEAD:
        arguments["key_mapping"] = {rf"^{head}\.": f"{HEAD}."}
    return from_pretrained(AutoClassifier, pretrain, flag=flag, **arguments)


def _without_head(found: dict) -> bool:
    weight = f"{HEAD}.weight"
    return weight in found["missing_keys"] or any(key[0] == weight for key in found["mismatched_keys"])


def reward_skeleton(options: TrainedModelOptions, flag: str = "--pretrain") -> RewardModel:
    """`flag`: what the user calls the model."""
    model = skeleton(options.pretrain, AutoClassifier, flag, num_labels=1)
    _require_head(model, options.pretrain, flag)
    return RewardModel(add_adapters(model, options, "SEQ_CLS") if options.lora_rank > 0 else model)


def _require_head(model: nn.Module, pretrain: str, flag: str = "--pretrain") -> None:
    if not hasattr(model, HEAD):
        raise UserError(f"{flag} {pretrain}: {type(model).__name__} is not a decoder with a score head")
