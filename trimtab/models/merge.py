"""Merge a LoRA adapter into its base model and write the result as a Hugging Face folder."""

import json
from pathlib import Path
from pickle import UnpicklingError

import torch

from trimtab.errors import UserError
from trimtab.files import is_unfinished, locked, remove_leftovers, writing
from trimtab.models.hugging_face import check_model_folder, first_line, from_pretrained, quiet_transformers
from trimtab.models.load import cast_parameters
from trimtab.models.reward import REWARDS, AutoClassifier
from trimtab.models.save import write_folder


def merge_adapter(
    model_path: str, lora_path: str, output_path: str, *, is_rm: bool = False, bf16: bool = False
) -> None:
    """The sum is taken in fp32; `bf16` is how it is written."""
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_model_folder(model_path, "--model_path")
    folder = Path(lora_path).expanduser()
    if is_unfinished(folder):
        raise UserError(f"--lora_path {lora_path}: the run in this folder has not finished; finish it first")
    if not (folder / "adapter_config.json").exists():
        raise UserError(f"--lora_path {lora_path}: no adapter_config.json there; give the --save_path of a LoRA run")
    _check_kind(folder / "adapter_config.json", is_rm)
    quiet_transformers()
    loader, more = (AutoClassifier, {"num_labels": 1}) if is_rm else (AutoModelForCausalLM, {})
    base = from_pretrained(loader, model_path, flag="--model_path", dtype=torch.float32, **more)
    tokenizer_from = folder if (folder / "tokenizer_config.json").exists() else model_path
    tokenizer = from_pretrained(AutoTokenizer, str(tokenizer_from), flag="--lora_path")
    try:
        adapted = PeftModel.from_pretrained(base, str(folder))
        left_over = load_peft_weights(str(folder), device="cpu").keys() - get_peft_model_state_dict(adapted).keys()
    except UnpicklingError as error:
        raise UserError(f"--lora_path {lora_path}: pickled weights, which may run code; give safetensors") from error
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        raise UserError(
            f"--lora_path {lora_path}: does not fit --model_path {model_path}: {first_line(error)}"
        ) from error
    if left_over:
        raise UserError(
            f"--lora_path {lora_path}: does not fit --model_path {model_path}, which has no place for {len(left_over)} "
            f"of its weights, such as {min(left_over)}; give the model it was trained on"
        )
    model = adapted.merge_and_unload()
    if is_rm:
        model.config.pad_token_id = tokenizer.pad_token_id
        if (folder / REWARDS).exists():
            facts = json.loads((folder / REWARDS).read_text())
            model.config.mean, model.config.std = facts["mean"], facts["std"]
    if bf16:
        cast_parameters(model, torch.bfloat16)
    place = Path(output_path).expanduser()
    with writing(f"--output_path {output_path}: cannot write the model"), locked("output_path", place):
        remove_leftovers(place)
        write_folder(place, model.save_pretrained, tokenizer.save_pretrained)


def _check_kind(path: Path, is_rm: bool) -> None:
    """A reward model's adapter on a language model, or the reverse, would leave a head that nobody trained."""
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("task_type")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"--lora_path {path}: not readable as JSON ({first_line(error)})") from error
    if kind == "SEQ_CLS" and not is_rm:
        raise UserError(f"--lora_path {path.parent}: the adapter of a reward model; add --is_rm")
    if kind == "CAUSAL_LM" and is_rm:
        raise UserError(f"--lora_path {path.parent}: the adapter of a language model; drop --is_rm")
