"""Checks of a model folder by its JSON files alone. Imports neither torch nor transformers."""

import json
from pathlib import Path

from trimtab.data.hub import looks_like_hub_name
from trimtab.errors import UserError
from trimtab.files import MARK, is_unfinished

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")

ADAPTER = "adapter_config.json"


def check_looks_like_model(pretrain: str, flag: str) -> bool:
    """Refuse a local folder that is not a model. False: there is no such folder, and the name may be on the hub."""
    folder = Path(pretrain).expanduser()
    if not folder.exists():
        if not looks_like_hub_name(pretrain):
            raise UserError(f"{flag} {pretrain}: no such folder; give a model folder or a hub name (owner/name)")
        return False
    if not folder.is_dir():
        raise UserError(f"{flag} {pretrain}: is a file; give the folder that holds config.json and the weights")
    if is_unfinished(folder):
        raise UserError(
            f"{flag} {pretrain}: the run in this folder has not finished, so the model there is an earlier one or not "
            f"whole; finish the run (--load_checkpoint), or remove the file {MARK} there to use it as it is"
        )
    if (folder / ADAPTER).exists() and not (folder / "config.json").exists():
        raise UserError(f"{flag} {pretrain}: an adapter, not a model; merge it first: {merging(folder, flag)}")
    if not (folder / "config.json").exists():
        raise UserError(f"{flag} {pretrain}: no config.json in this folder; is it a Hugging Face model?")
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHT_FILES):
        raise UserError(f"{flag} {pretrain}: config.json is there but no weights (*.safetensors); copy them there")
    return True


def merging(adapter: Path, flag: str) -> str:
    """The command that merges an adapter into its base model."""
    described = read_json(adapter / ADAPTER, flag)
    base = described.get("base_model_name_or_path") or "MODEL"
    kind = " --is_rm" if described.get("task_type") == "SEQ_CLS" else ""
    words = f"--model_path {base} --lora_path {adapter} --output_path {adapter}-merged{kind}"
    return f"trimtab lora-combine {words}"


def read_json(path: Path, flag: str) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {path}: not readable as JSON ({first_line(error)})") from error
    if not isinstance(content, dict):
        raise UserError(f"{flag} {path}: a JSON object is needed")
    return content


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
