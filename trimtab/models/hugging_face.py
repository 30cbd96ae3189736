"""Reading a Hugging Face folder or hub name, with every mistake told in one line that names the option."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from trimtab.data.hub import hub_or_cache, needs_code, trust_remote_code
from trimtab.errors import UserError
from trimtab.models.folder import check_looks_like_model, first_line, read_json


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
    if not check_looks_like_model(pretrain, flag):
        return
    folder = Path(pretrain).expanduser()
    read_json(folder / "config.json", flag)
    for path in safetensors_files(folder, flag):
        try:
            with safe_open(path, framework="pt"):
                pass  # reads the header, which tells whether the file is whole
        except (OSError, SafetensorError) as error:
            reason = "no such file" if isinstance(error, FileNotFoundError) else first_line(error)
            raise UserError(f"{flag} {path}: damaged or missing weights ({reason}); copy the file again") from error


def safetensors_files(folder: Path, flag: str) -> list[Path]:
    """Those that hold a model's weights, in a folder of it; none where they are in other files."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists() or not index.exists():
        return [single] if single.exists() else []
    return [folder / name for name in sorted(set(read_json(index, flag).get("weight_map", {}).values()))]
