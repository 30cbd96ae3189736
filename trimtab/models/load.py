"""Load a causal LM as a Policy: working weights, adapters, attention path, memory savers."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from trimtab.config.groups import LoraOptions, ModelOptions
from trimtab.distributed.device import Device
from trimtab.errors import UserError
from trimtab.models.lora import add_adapters
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import Verdict, choose_path

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")


class PolicyOptions(ModelOptions, LoraOptions):
    """What loading reads; every training job has these two groups."""


@dataclass
class LoadedPolicy:
    policy: Policy
    verdict: Verdict


def load_policy(options: PolicyOptions, device: Device) -> LoadedPolicy:
    model = load_causal_lm(options, device)
    if options.lora_rank > 0:
        model = add_adapters(model, options)
    if options.bf16:
        cast_parameters(model, torch.bfloat16)
    model.to(device.torch)
    if options.use_liger_kernel:
        _apply_liger(model)
    policy = Policy(model)
    verdict = choose_path(policy, packed_allowed=options.attn_implementation is None)
    if options.gradient_checkpointing:
        enable_gradient_checkpointing(policy, reentrant=options.gradient_checkpointing_use_reentrant)
    policy.train()
    return LoadedPolicy(policy, verdict)


def load_causal_lm(options: PolicyOptions, device: Device) -> nn.Module:
    """The Hugging Face model in fp32 (or 4-bit), with a mistake in the name told in one line."""
    from transformers import AutoModelForCausalLM

    check_model_folder(options.pretrain)
    arguments = {"dtype": torch.float32}
    if options.attn_implementation is not None:
        arguments["attn_implementation"] = options.attn_implementation
    if options.load_in_4bit:
        arguments |= {"quantization_config": _four_bit(), "dtype": torch.bfloat16, "device_map": {"": device.torch}}
    quiet_transformers()
    try:
        return AutoModelForCausalLM.from_pretrained(options.pretrain, **arguments)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"--pretrain {options.pretrain}: {_first_line(error)}") from error


def quiet_transformers() -> None:
    """Its bars and warnings belong to its own users; what matters to ours is said by us."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def skeleton(options: PolicyOptions) -> nn.Module:
    """The model's modules without its weights, to check options against."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(options.pretrain)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"--pretrain {options.pretrain}: {_first_line(error)}") from error


def check_model_folder(pretrain: str) -> None:
    """Catch the common mistakes with a local folder before a library explains them at length."""
    folder = Path(pretrain).expanduser()
    if not folder.exists():
        looks_local = pretrain.startswith((".", "/", "~")) or pretrain.count("/") != 1
        if looks_local:
            raise UserError(f"--pretrain {pretrain}: no such folder; give a model folder or a hub name (owner/name)")
        return
    if not folder.is_dir():
        raise UserError(f"--pretrain {pretrain}: is a file; give the folder that holds config.json and the weights")
    if not (folder / "config.json").exists():
        hint = " (an adapter: merge it into its base first)" if (folder / "adapter_config.json").exists() else ""
        raise UserError(f"--pretrain {pretrain}: no config.json in this folder{hint}; is it a Hugging Face model?")
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHT_FILES):
        raise UserError(f"--pretrain {pretrain}: config.json is there but no weights (*.safetensors); copy them there")


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: casting buffers too would round the rotary frequencies. Tied weights stay tied."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def enable_gradient_checkpointing(policy: Policy, *, reentrant: bool) -> None:
    policy.causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        policy.causal.enable_input_require_grads()  # a frozen embedding would cut the reentrant graph


def _four_bit():
    try:
        import bitsandbytes  # noqa: F401
        from transformers import BitsAndBytesConfig
    except Exception as error:  # a broken CUDA set-up raises anything
        raise UserError(f"--load_in_4bit: bitsandbytes does not work here ({_first_line(error)}); drop it") from error
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def _apply_liger(model: nn.Module) -> None:
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError as error:
        raise UserError("--use_liger_kernel: the package is not installed; pip install 'trimtab[liger]'") from error
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    # Our own chunked head replaces Liger's fused loss.
    _apply_liger_kernel_to_instance(base, fused_linear_cross_entropy=False)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
