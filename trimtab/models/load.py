"""Load a causal LM as a Policy: working weights, adapters, attention path, memory savers."""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from trimtab.config.groups import LoraOptions, ModelOptions
from trimtab.data.hub import hub_or_cache, looks_like_hub_name
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
    # A size that does not fit is reported by us, by name.
    arguments = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if options.attn_implementation is not None:
        arguments["attn_implementation"] = options.attn_implementation
    if options.load_in_4bit:
        arguments |= {"quantization_config": _four_bit(), "dtype": torch.bfloat16, "device_map": {"": device.torch}}
    quiet_transformers()
    model, found = _from_pretrained(AutoModelForCausalLM, options.pretrain, **arguments)
    _refuse_fresh_weights(options.pretrain, found)
    if options.load_in_4bit:
        _keep_gradients_on_cpu(model)
    return model


def _from_pretrained(loader: Any, pretrain: str, **arguments: Any) -> Any:
    """What one of Hugging Face's auto classes loads from a folder or the hub; a failure is told in one line."""
    arguments["trust_remote_code"] = False  # asked otherwise, a terminal user gets a question instead of an answer
    reachable = True
    try:
        if Path(pretrain).expanduser().is_dir():
            return loader.from_pretrained(os.path.expanduser(pretrain), **arguments)
        with hub_or_cache() as reachable:
            return loader.from_pretrained(pretrain, local_files_only=not reachable, **arguments)
    except Exception as error:  # broken files raise whatever the library that reads them likes
        if reachable:
            raise UserError(f"--pretrain {pretrain}: {_first_line(error)}") from error
        raise UserError(
            f"--pretrain {pretrain}: no such local folder, not in the local cache, and the hub cannot be reached "
            "(check the name, or the network and HF_HUB_OFFLINE)"
        ) from error


def _refuse_fresh_weights(pretrain: str, found: dict) -> None:
    """The library would draw missing weights at random, without a word."""
    if wrong := sorted(found["mismatched_keys"]):
        name, stored, expected = wrong[0]
        raise UserError(
            f"--pretrain {pretrain}: {len(wrong)} weights do not fit config.json: {name} has shape "
            f"{list(stored)}, {list(expected)} is needed"
        )
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"--pretrain {pretrain}: {len(missing)} weights of this model are not in its files, such as {missing[0]}; "
            "is it a causal LM, completely copied?"
        )


def quiet_transformers() -> None:
    """Its bars and warnings belong to its own users; what matters to ours is said by us."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def skeleton(options: PolicyOptions) -> nn.Module:
    """The model's modules without its weights, to check options against."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = _from_pretrained(AutoConfig, options.pretrain)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"--pretrain {options.pretrain}: {_first_line(error)}") from error


def check_model_folder(pretrain: str) -> None:
    """Catch the common mistakes with a local folder before a library explains them at length."""
    folder = Path(pretrain).expanduser()
    if not folder.exists():
        if not looks_like_hub_name(pretrain):
            raise UserError(f"--pretrain {pretrain}: no such folder; give a model folder or a hub name (owner/name)")
        return
    if not folder.is_dir():
        raise UserError(f"--pretrain {pretrain}: is a file; give the folder that holds config.json and the weights")
    if not (folder / "config.json").exists():
        hint = " (an adapter: merge it into its base first)" if (folder / "adapter_config.json").exists() else ""
        raise UserError(f"--pretrain {pretrain}: no config.json in this folder{hint}; is it a Hugging Face model?")
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHT_FILES):
        raise UserError(f"--pretrain {pretrain}: config.json is there but no weights (*.safetensors); copy them there")
    _read_json(folder / "config.json")
    for path in _safetensors_files(folder):
        try:
            with safe_open(path, framework="pt"):
                pass  # reads the header, which tells whether the file is whole
        except (OSError, SafetensorError) as error:
            reason = "no such file" if isinstance(error, FileNotFoundError) else _first_line(error)
            raise UserError(f"--pretrain {path}: damaged or missing weights ({reason}); copy the file again") from error


def _safetensors_files(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists() or not index.exists():
        return [single] if single.exists() else []
    return [folder / name for name in sorted(set(_read_json(index).get("weight_map", {}).values()))]


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--pretrain {path}: not readable as JSON ({_first_line(error)})") from error
    if not isinstance(content, dict):
        raise UserError(f"--pretrain {path}: a JSON object is needed")
    return content


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: casting buffers too would round the rotary frequencies. Tied weights stay tied."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def enable_gradient_checkpointing(policy: Policy, *, reentrant: bool) -> None:
    policy.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        policy.inner.enable_input_require_grads()  # a frozen embedding would cut the reentrant graph


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
