"""Load models as the root modules that jobs train or score with: working weights, adapters, path, memory savers."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trimtab.config.groups import DropoutOptions, LoadOptions
from trimtab.config.jobs import AttackOptions, GenerateOptions, RMOptions, ServeRMOptions, SupervisedOptions
from trimtab.config.rl_jobs import RLOptions
from trimtab.distributed.device import Device
from trimtab.errors import UserError
from trimtab.models.dropout import has_dropout, switch_off_dropout
from trimtab.models.fingerprint import weights_fingerprint
from trimtab.models.hugging_face import (
    check_model_folder,
    first_line,
    from_pretrained,
    quiet_transformers,
    refuse_fresh_weights,
    skeleton,
)
from trimtab.models.lora import add_adapters
from trimtab.models.packed import PackedModel
from trimtab.models.policy import Policy
from trimtab.models.reward import HEAD, RewardModel, initialise_head, separate_padding
from trimtab.models.selfcheck import Verdict, choose_path

TrainedModelOptions = SupervisedOptions | RLOptions
RewardLoadOptions = RMOptions | RLOptions | GenerateOptions | AttackOptions | ServeRMOptions
"""What has LoadOptions and RewardHeadOptions."""


@dataclass
class Loaded:
    model: PackedModel
    verdict: Verdict
    weights: str  # fingerprint of what was read, before adapters and casts
    notes: tuple[str, ...] = ()  # what there is to say of it


def load_policy(options: TrainedModelOptions, device: Device, *, cast: bool = True) -> Loaded:
    """A causal LM to be trained. `cast`: with --bf16 to the working weights; a split model casts as it gathers."""
    model = _causal_lm(options.pretrain, options, device)
    return _to_be_trained(Policy, model, options, device, "CAUSAL_LM", cast)


def policy_skeleton(options: TrainedModelOptions) -> Policy:
    """The policy without its weights, adapters included, to check options against."""
    from transformers import AutoModelForCausalLM

    model = skeleton(options.pretrain, AutoModelForCausalLM)
    return Policy(add_adapters(model, options) if options.lora_rank > 0 else model)


def load_frozen_policy(pretrain: str, options: LoadOptions, device: Device, flag: str = "--ref_pretrain") -> Loaded:
    """A causal LM that only scores: a reference or a teacher, in the trained model's precision."""
    model = _causal_lm(pretrain, options, device, flag=flag)
    weights = weights_fingerprint(model)
    model.requires_grad_(False)
    policy = Policy(model).eval()
    return Loaded(policy, _placed(policy, options, device, cast=options.bf16), weights)


def frozen_skeleton(pretrain: str, flag: str) -> Policy:
    """The same without its weights."""
    from transformers import AutoModelForCausalLM

    return Policy(skeleton(pretrain, AutoModelForCausalLM, flag))


def load_reward_model(
    options: RMOptions | RLOptions,
    device: Device,
    tokenizer: Any,
    *,
    cast: bool = True,
    root: type[PackedModel] = RewardModel,
) -> Loaded:
    """A reward model or critic to be trained, from one that has a head already or from a causal LM."""
    model, found = _classifier(options.pretrain, options, device)
    _require_head(model, options.pretrain)
    if _without_head(found):
        initialise_head(model)
    found = {key: {k for k in keys if HEAD not in str(k)} for key, keys in found.items()}
    refuse_fresh_weights(options.pretrain, found)
    separate_padding(model, tokenizer)
    return _to_be_trained(root, model, options, device, "SEQ_CLS", cast)


def load_frozen_reward_model(
    pretrain: str, options: RewardLoadOptions, device: Device, tokenizer: Any, flag: str = "--reward_pretrain"
) -> Loaded:
    """A reward model that only scores: ours, or any sequence classifier with one score."""
    model, found = _classifier(pretrain, options, device, flag)
    if _without_head(found):
        raise UserError(f"{flag} {pretrain}: a model without a trained score head; make one of it with trimtab rm")
    refuse_fresh_weights(pretrain, found, flag=flag)
    separate_padding(model, tokenizer)
    weights = weights_fingerprint(model)
    model.requires_grad_(False)
    if hasattr(model, HEAD):
        root = RewardModel(model).eval()
        return Loaded(root, _placed(root, options, device, cast=options.bf16), weights)
    # Not a decoder, so only its own forward pass knows where its score comes from.
    root = RewardModel(model, path="logits").eval()
    if options.bf16:
        cast_parameters(root, torch.bfloat16)
    root.to(device.torch)
    return Loaded(root, Verdict("logits", f"{type(model).__name__} is not a decoder", 0.0), weights)


def _classifier(
    pretrain: str, options: RewardLoadOptions, device: Device, flag: str = "--pretrain"
) -> tuple[nn.Module, dict]:
    """A sequence classifier with one score, whatever its head is called in the files, and what loading found."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    check_model_folder(pretrain, flag)
    quiet_transformers()
    config = from_pretrained(AutoConfig, pretrain, flag=flag)
    stored = getattr(config, "value_head_prefix", options.value_head_prefix)
    arguments = _arguments(options, device) | {"num_labels": 1}
    if stored != HEAD:
        arguments["key_mapping"] = {rf"^{stored}\.": f"{HEAD}."}
    return from_pretrained(AutoModelForSequenceClassification, pretrain, flag=flag, **arguments)


def _without_head(found: dict) -> bool:
    weight = f"{HEAD}.weight"
    return weight in found["missing_keys"] or any(key[0] == weight for key in found["mismatched_keys"])


def reward_skeleton(options: TrainedModelOptions, flag: str = "--pretrain") -> RewardModel:
    """`flag`: what the user calls the model."""
    from transformers import AutoModelForSequenceClassification

    model = skeleton(options.pretrain, AutoModelForSequenceClassification, flag, num_labels=1)
    _require_head(model, options.pretrain, flag)
    return RewardModel(add_adapters(model, options, "SEQ_CLS") if options.lora_rank > 0 else model)


def _require_head(model: nn.Module, pretrain: str, flag: str = "--pretrain") -> None:
    if not hasattr(model, HEAD):
        raise UserError(f"{flag} {pretrain}: {type(model).__name__} is not a decoder with a score head")


def _causal_lm(pretrain: str, options: LoadOptions, device: Device, flag: str = "--pretrain") -> nn.Module:
    from transformers import AutoModelForCausalLM

    check_model_folder(pretrain, flag)
    quiet_transformers()
    model, found = from_pretrained(AutoModelForCausalLM, pretrain, flag=flag, **_arguments(options, device))
    refuse_fresh_weights(pretrain, found, flag=flag)
    return model


def _arguments(options: LoadOptions, device: Device) -> dict[str, Any]:
    # A size that does not fit is reported by us, by name.
    arguments = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if options.attn_implementation is not None:
        arguments["attn_implementation"] = options.attn_implementation
    if options.load_in_4bit:
        arguments |= {"quantization_config": _four_bit(), "dtype": torch.bfloat16, "device_map": {"": device.torch}}
    return arguments


def _to_be_trained(
    root: type[PackedModel], model: nn.Module, options: TrainedModelOptions, device: Device, task_type: str, cast: bool
) -> Loaded:
    weights = weights_fingerprint(model)
    notes = _settle_dropout(model, options) if isinstance(options, DropoutOptions) else ()
    if options.load_in_4bit:
        _keep_gradients_on_cpu(model)
    if options.lora_rank > 0:
        model = add_adapters(model, options, task_type)
    module = root(model)
    verdict = _placed(module, options, device, cast=options.bf16 and cast)
    if options.use_liger_kernel:
        _apply_liger(model, device)
    if options.gradient_checkpointing:
        enable_gradient_checkpointing(module, reentrant=options.gradient_checkpointing_use_reentrant)
    module.train()
    return Loaded(module, verdict, weights, notes)


def _settle_dropout(model: nn.Module, options: DropoutOptions) -> tuple[str, ...]:
    """Before adapters are added, whose dropout is a wish of its own."""
    if options.keep_dropout:
        return () if has_dropout(model) else ("--keep_dropout has no effect: the model has no dropout",)
    if not switch_off_dropout(model):
        return ()
    return ("the model's own dropout is off, as it is in what updates are compared with; --keep_dropout keeps it",)


def _placed(module: PackedModel, options: LoadOptions, device: Device, *, cast: bool) -> Verdict:
    """Choose the path, cast and move to the device, in this order: rounding would blur the comparison."""
    ours = options.attn_implementation is None
    verdict = choose_path(module) if ours else None
    if cast:
        cast_parameters(module, torch.bfloat16)
    module.to(device.torch)
    # An implementation that was asked for by name may know only half precision, or only the accelerator.
    return verdict or choose_path(module, packed_allowed=False)


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: casting buffers too would round the rotary frequencies. Tied weights stay tied."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def enable_gradient_checkpointing(module: PackedModel, *, reentrant: bool) -> None:
    module.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        module.inner.enable_input_require_grads()  # a frozen embedding would cut the reentrant graph


def _keep_gradients_on_cpu(model: nn.Module) -> None:
    """On some CPUs bitsandbytes repacks weights for good when it first sees eval mode, and then has no gradient."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _four_bit():
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # advice about kernels for inference
    try:
        import bitsandbytes  # noqa: F401
        from transformers import BitsAndBytesConfig
    except Exception as error:  # a broken CUDA set-up raises anything
        raise UserError(f"--load_in_4bit: bitsandbytes does not work here ({first_line(error)}); drop it") from error
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def _apply_liger(model: nn.Module, device: Device) -> None:
    if not device.is_accelerator:
        raise UserError("--use_liger_kernel: its kernels need an accelerator, and none is here; leave it out")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError as error:
        raise UserError("--use_liger_kernel: the package is not installed; pip install 'trimtab[liger]'") from error
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    # Our own chunked head replaces Liger's fused loss.
    _apply_liger_kernel_to_instance(base, fused_linear_cross_entropy=False)
