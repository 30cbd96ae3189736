"""Reading a Hugging Face folder or hub name, with every mistake told in one line that names the option."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from trimtab.data.hub import hub_or_cache, looks_like_hub_name, needs_code, trust_remote_code
from trimtab.errors import UserError
from trimtab.files import MARK, is_unfinished

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")

ADAPTER = "adapter_config.json"


def from_pretrained(loader: Any, pretrain: str, *, flag: str = "--pretrain", **arguments: Any) -> Any:
    """What one of Hugging Face's auto classes loads from a folder or the hub; a failure is told in one line."""
    arguments["trust_remote_code"] = trust_remote_code()
    reachable = True
    try:
        if Path(pretrain).expanduser().is_dir():
            return loader.from_pretrained(os.path.expanduser(pretrain), **arguments)
        with hub_or_cache() as reachable:
            return loader.from_pretrained(pretrain, local_files_only=not reachable, **arguments)
    except Exception as error:  # broken files raise whatever the library that reads them likes
        raise told(error, pretrain, flag, reachable=reachable) from error


def told(error: Exception, pretrain: str, flag: str, *, reachable: bool) -> UserError:
    """In one line, why a model could not be read or fetched. `reachable`: the hub is, where it was asked."""
    if (why := needs_code(error)) is not None:
        return UserError(f"{flag} {pretrain}: {why}")
    if reachable:
        return UserError(f"{flag} {pretrain}: {first_line(error)}")
    return UserError(
        f"{flag} {pretrain}: no such local folder, not in the local cache, and the hub cannot be reached "
        "(check the name, or the network and HF_HUB_OFFLINE)"
    )


def refuse_fresh_weights(pretrain: str, found: dict, *, flag: str = "--pretrain") -> None:
    """The library would draw missing weights at random, without a word."""
    if wrong := sorted(found["mismatched_keys"]):
        name, stored, expected = wrong[0]
        raise UserError(
            f"{flag} {pretrain}: {len(wrong)} weights do not fit config.json: {name} has shape "
            f"{list(stored)}, {list(expected)} is needed"
        )
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"{flag} {pretrain}: {len(missing)} weights of this model are not in its files, such as {missing[0]}; "
            "is it a causal LM, completely copied?"
        )


def quiet_transformers() -> None:
    """Its bars and warnings belong to its own users; what matters to ours is said by us."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def skeleton(
    pretrain: str, loader: Any, flag: str = "--pretrain", *, building: dict[str, Any] | None = None, **arguments: Any
) -> nn.Module:
    """The model's modules without its weights. `building`: what else its class is told, beside its configuration."""
    from transformers import AutoConfig

    config = from_pretrained(AutoConfig, pretrain, flag=flag, **arguments)
    try:
        with torch.device("meta"):
            return loader.from_config(config, trust_remote_code=trust_remote_code(), **building or {})
    except (OSError, ValueError, ImportError) as error:
        if (why := needs_code(error)) is not None:
            raise UserError(f"{flag} {pretrain}: {why}") from error
        raise UserError(f"{flag} {pretrain}: {first_line(error)}") from error


def check_model_folder(pretrain: str, flag: str = "--pretrain") -> None:
    """Catch the common mistakes with a local folder before a library explains them at length."""
    folder = Path(pretrain).expanduser()
    if not folder.exists():
        if not looks_like_hub_name(pretrain):
            raise UserError(f"{flag} {pretrain}: no such folder; give a model folder or a hub name (owner/name)")
        return
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
    _read_json(folder / "config.json", flag)
    for path in safetensors_files(folder, flag):
        try:
            with safe_open(path, framework="pt"):
                pass  # reads the header, which tells whether the file is whole
        except (OSError, SafetensorError) as error:
            reason = "no such file" if isinstance(error, FileNotFoundError) else first_line(error)
            raise UserError(f"{flag} {path}: damaged or missing weights ({reason}); copy the file again") from error


def merging(adapter: Path, flag: str) -> str:
    """The command that makes a model of an adapter."""
    described = _read_json(adapter / ADAPTER, flag)
    base = described.get("base_model_name_or_path") or "MODEL"
    kind = " --is_rm" if described.get("task_type") == "SEQ_CLS" else ""
    words = f"--model_path {base} --lora_path {adapter} --output_path {adapter}-merged{kind}"
    return f"trimtab lora-combine {words}"


def safetensors_files(folder: Path, flag: str) -> list[Path]:
    """Those that hold a model's weights, in a folder of it; none where they are in other files."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists() or not index.exists():
        return [single] if single.exists() else []
    return [folder / name for name in sorted(set(_read_json(index, flag).get("weight_map", {}).values()))]


def _read_json(path: Path, flag: str) -> dict:
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
