"""The model card of a run, from what it left behind: method, data, options, figures, licence and versions."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from trimtab.files import write_text
from trimtab.report.formatting import short_number
from trimtab.report.run_data import read_run
from trimtab.report.summary import achieved, chosen_options, facts, job_name, summary

LICENCE = ("license", "license_name", "license_link")
KINDS = {"rm": "text-classification", "prm": "token-classification"}  # the hub's names; all others generate text
PART = re.compile(r"[^@:]+")
LOCAL = re.compile(r"[/.~]|.*/.*/|.*/.*\.(py|jsonl?|csv|parquet|arrow|txt|ya?ml)$")  # hub names are OWNER/NAME
ADDRESS = re.compile(r".*://.*|(localhost|[\w-]+(\.[\w-]+)+):\d+(/.*)?")
LOSSES = ("loss", "eval_loss", "eval_accuracy")


def write_model_card(folder: Path, base: dict[str, Any]) -> None:
    """Write README.md into a run's folder. `base`: what the base model's card says of its licence, and `base_model`,
    its name on the hub, if it has one."""
    run = read_run(folder)
    chosen = {name: _public(value) for name, value in chosen_options(run).items()}
    # The manifest's reward is a sentence that may name anything; without it, the options say what it was.
    manifest = {name: value for name, value in run.manifest.items() if name != "reward"}
    run = replace(run, manifest=manifest, options={name: _public(value) for name, value in run.options.items()})
    adapter = (folder / "adapter_config.json").exists()
    about: dict[str, Any] = {name: base[name] for name in (*LICENCE, "base_model") if base.get(name)}
    if "base_model" in about:
        about["base_model_relation"] = "adapter" if adapter else "finetune"
    about["library_name"] = "peft" if adapter else "transformers"
    about["pipeline_tag"] = KINDS.get(run.job, "text-generation")
    about["tags"] = ["trimtab", run.job, *(["lora"] if adapter else [])]
    version = run.manifest.get("versions", {}).get("trimtab", "")
    figures = achieved(run)
    figures += [(name, short_number(last), "") for name in LOSSES if (last := run.last(name)) is not None]
    licence = f"As the base model: {about['license']}." if "license" in about else "The base model's card names none."
    parts = [
        f"---\n{yaml.safe_dump(about, sort_keys=False)}---",
        f"# {folder.resolve().name}",
        f"{job_name(run)} with trimtab {version}. {summary(run)}".strip(),
        "## Training",
        _table(("", ""), facts(run)),
        "## Figures",
        _table(("figure", "value", ""), figures),
        "## Options",
        f"All others have trimtab's defaults.\n\n```yaml\n{yaml.safe_dump(chosen, sort_keys=False)}```",
        "## Licence",
        licence,
        "## Versions",
        ", ".join(f"{name} {number}" for name, number in run.manifest.get("versions", {}).items()),
    ]
    write_text(folder / "README.md", "\n\n".join(parts) + "\n")


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)


def _public(value: Any) -> Any:
    """A value of an option without addresses; of files and folders of this machine, also in lists (`,`), with their
    kind (`json@FOLDER`) or a function (`FILE.py:NAME`), the last name."""
    if isinstance(value, list):
        return [_public(one) for one in value]
    if not isinstance(value, str):
        return value
    return ",".join("(an address)" if ADDRESS.fullmatch(one) else PART.sub(_last_name, one) for one in value.split(","))


def _last_name(found: re.Match[str]) -> str:
    part = found.group()
    return Path(part).name if LOCAL.match(part) or os.path.exists(part) else part
