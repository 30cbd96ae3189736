"""Names on the Hugging Face hub, and model folders. Imports neither torch nor transformers.

The hub libraries retry a missing network for half a minute, printing every attempt. One short question beforehand
decides: when it fails, they are switched to their local caches for the length of the call.
"""

import contextlib
import functools
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trimtab.errors import UserError
from trimtab.files import MARK, is_unfinished

PROBE_SECONDS = 5.0

_trusted = False


@contextlib.contextmanager
def trusting(code: bool) -> Iterator[None]:
    """Inside, code that comes with a model or tokenizer may run (`--trust_remote_code`), or may not."""
    global _trusted
    before, _trusted = _trusted, code
    try:
        yield
    finally:
        _trusted = before


def trust(code: bool) -> None:
    """The same for good, in a process that works for one run."""
    global _trusted
    _trusted = code


def trust_remote_code() -> bool:
    """What every loader of Hugging Face must be told: left to itself it asks on standard input."""
    return _trusted


def needs_code(error: Exception) -> str | None:
    """What to say if loading failed because code was not trusted."""
    if "trust_remote_code" not in str(error):
        return None
    return "comes with Python code of its own, which is not run unless you say so: read it, and add --trust_remote_code"


@functools.cache
def hub_reachable() -> bool:
    """Whether the hub answers at all (asked once a process; HF_HUB_OFFLINE counts as no)."""
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    return answered(lambda: huggingface_hub.get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS))


def answered(question: Callable[[], Any]) -> bool:
    """Whether the question got an answer in time; looking up a server's name ignores the timeouts of HTTP libraries."""
    heard = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):  # HTTP libraries change: any failure means "not there"
            question()
            heard.set()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PROBE_SECONDS)
    return heard.is_set()


def looks_like_hub_name(name: str) -> bool:
    """`name` or `owner/name`, and not what only a path can be."""
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name)) and not os.path.isabs(name)


@contextlib.contextmanager
def hub_or_cache() -> Iterator[bool]:
    """Yields whether the hub is reachable; inside, an unreachable hub means the local caches, at once and quietly."""
    import datasets.config
    from huggingface_hub import constants

    reachable = hub_reachable()
    before = (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)
    chatter = logging.getLogger("huggingface_hub")
    level = chatter.level
    chatter.setLevel(logging.ERROR)
    if not reachable:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield reachable
    finally:
        chatter.setLevel(level)
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


# ---- uploads

# Nothing else of a run: its answers and rollouts may be private.
UPLOADED: tuple[str, ...] = (
    *("README.md", "rewards.json", "config.json", "generation_config.json", "adapter_config.json"),
    *("model*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json", "*.model", "*.tiktoken"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
)


def code_files(folder: Path) -> list[str]:
    """Files with code that the model or its tokenizer names, and what these import."""
    found: set[str] = set()
    for name in ("config.json", "tokenizer_config.json"):
        classes = read_json(folder / name, "push").get("auto_map") if (folder / name).exists() else None
        for value in classes.values() if isinstance(classes, dict) else ():
            for one in value if isinstance(value, list) else [value]:
                file = folder / f"{str(one).partition('.')[0]}.py"  # else it is another repository's
                if file.is_file():
                    from transformers.dynamic_module_utils import get_relative_import_files

                    found |= {file.name, *(Path(other).name for other in get_relative_import_files(file))}
    return sorted(found)


def check_push(repo: str, flag: str, *, ask: bool = True) -> None:
    """Refuse an upload that cannot succeed: a wrong name, no token, or, if the hub may be asked, one it refuses."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"{flag} {repo}: no name of a repository, give owner/name ({first_line(error)})") from None
    if get_token() is None:
        raise UserError(f"{flag} {repo}: the hub needs a token: hf auth login, or set HF_TOKEN")
    if not ask:
        return
    try:
        token = (HfApi().whoami().get("auth") or {}).get("accessToken") or {}
    except Exception as error:  # HTTP libraries change
        refused = "refuses the token" if isinstance(error, HfHubHTTPError) else "does not answer"
        raise UserError(
            f"{flag} {repo}: the hub {refused} ({first_line(error)}): hf auth login, or upload later"
        ) from None
    if token.get("role") == "read":
        raise UserError(f"{flag} {repo}: the token may only read: hf auth login with one that may write")


def push_folder(folder: Path, repo: str, *, private: bool) -> str:
    """Upload a model folder; returns its address. Of an adapter's base model that is a folder here, the last name."""
    from huggingface_hub import HfApi

    made = HfApi().create_repo(repo, private=private, exist_ok=True)
    how: dict[str, Any] = {"allow_patterns": [*UPLOADED, *code_files(folder)], "ignore_patterns": ["*/*"]}
    if (folder / ADAPTER).exists():
        described = read_json(folder / ADAPTER, "push")
        base = str(described.get("base_model_name_or_path") or "")
        if not looks_like_hub_name(base):
            how["ignore_patterns"].append(ADAPTER)
            content = json.dumps(described | {"base_model_name_or_path": Path(base).name}, indent=2).encode()
            HfApi().upload_file(repo_id=made.repo_id, path_in_repo=ADAPTER, path_or_fileobj=content)
    HfApi().upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Upload by trimtab", **how)
    return str(made)


def base_card(base: str) -> dict[str, Any]:
    """What the card of a base model says; with its name, if it is on the hub."""
    from huggingface_hub import ModelCard

    local = Path(base).expanduser().is_dir()
    named: dict[str, Any] = {"base_model": base} if looks_like_hub_name(base) and not local else {}
    with contextlib.suppress(Exception):  # many models have no card, or a broken one
        card = ModelCard.load(Path(base).expanduser() / "README.md" if local else base)
        named = card.data.to_dict() | named
    return named


# ---- model folders, by their JSON files alone

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
