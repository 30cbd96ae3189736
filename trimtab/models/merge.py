"""Merge a LoRA adapter into its base model and write the result as a Hugging Face folder."""

import json
from pathlib import Path

import torch

from trimtab.errors import UserError
from trimtab.models.hugging_face import check_model_folder, first_line, from_pretrained, quiet_transformers
from trimtab.models.load import cast_parameters
from trimtab.models.reward import REWARDS
from trimtab.models.save import write_folder


def merge_adapter(
    model_path: str, lora_path: str, output_path: str, *, is_rm: bool = False, bf16: bool = False
) -> None:
    """The sum is taken in fp32; `bf16` is how it is written."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    check_model_folder(model_path, "--model_path")
    folder = Path(lora_path).expanduser()
    if not (folder / "adapter_config.json").exists():
        raise UserError(f"--lora_path {lora_path}: no adapter_config.json there; give the --save_path of a LoRA run")
    quiet_transformers()
    loader, more = (AutoModelForSequenceClassification, {"num_labels": 1}) if is_rm else (AutoModelForCausalLM, {})
    base = from_pretrained(loader, model_path, flag="--model_path", dtype=torch.float32, **more)
    tokenizer_from = folder if (folder / "tokenizer_config.json").exists() else model_path
    tokenizer = from_pretrained(AutoTokenizer, str(tokenizer_from), flag="--lora_path")
    try:
        model = PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        hint = "" if is_rm else " (a reward model's adapter needs --is_rm)"
        raise UserError(
            f"--lora_path {lora_path}: does not fit --model_path {model_path}{hint}: {first_line(error)}"
        ) from error
    if is_rm:
        model.config.pad_token_id = tokenizer.pad_token_id
        if (folder / REWARDS).exists():
            facts = json.loads((folder / REWARDS).read_text())
            model.config.mean, model.config.std = facts["mean"], facts["std"]
    if bf16:
        cast_parameters(model, torch.bfloat16)
    write_folder(Path(output_path), model.save_pretrained, tokenizer.save_pretrained)
