"""A hook of mkdocs: a page for each command, with all its options as the program knows them."""

from __future__ import annotations

import contextlib
import io
import os
from itertools import groupby
from typing import TYPE_CHECKING

from trimtab.cli.main import VERBS, main
from trimtab.config.jobs import JOBS
from trimtab.config.option import Option, options_of
from trimtab.config.parser import common_options, metavar, shown_default

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

AFTER_GUIDES = "---\nsearch:\n  boost: 0.5\n---\n"
"""An option is on a dozen of these pages: who searches for it finds the page that explains it first."""


def page(verb: str) -> str:
    """What there is to say of a command."""
    line = VERBS[verb][1]
    opening = f"{AFTER_GUIDES}# trimtab {verb}\n\n{line[0].upper()}{line[1:]}.\n\n"
    return opening + (_of_job(verb) if verb in JOBS else _of_command(verb))


def _of_job(verb: str) -> str:
    options, common = options_of(JOBS[verb]), common_options(JOBS[verb])
    needed = " ".join(f"{option.flag} {option.required[0]}" for option in options.values() if option.required)
    text = (
        f"```text\ntrimtab {verb} {needed} [option ...]\ntrimtab {verb} --config FILE.yaml [option ...]\n```\n\n"
        "A switch stands alone or is followed by `True` or `False`. Where no default is shown, a switch is off and any "
        "other option unset; `None` unsets one that can be unset. In a config file an option is its name without the "
        "dashes.\n"
    )
    if len(common) < len(options):
        text += f"\nThe {len(common)} options most used, of {len(options)}, have their names in **bold**.\n"
    order = list(dict.fromkeys(option.section for option in options.values()))
    by_section = sorted(options.values(), key=lambda option: order.index(option.section))
    for section, members in groupby(by_section, key=lambda option: option.section):
        text += f"\n## {section}\n\n| option | default | what it does |\n|---|---|---|\n"
        text += "".join(_row(option, option.name in common and len(common) < len(options)) for option in members)
    return text


def _row(option: Option, bold: bool) -> str:
    flag = f"`{option.flag}`"
    value = f" `{metavar(option)}`" if metavar(option) else ""
    default = "" if option.default is None or option.default is False else f"`{shown_default(option)}`"
    bounds = str(option.limits)
    known = all(str(choice) in option.help for choice in option.limits.choices)
    notes = [bounds] if bounds and not (option.limits.choices and known) else []
    notes += [f"also `--{alias}`" for alias in option.aliases if "." not in alias]
    what = option.help + (f" ({'; '.join(notes)})" if notes else "")
    cells = [f"**{flag}**{value}" if bold else flag + value, default, what]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _of_command(verb: str) -> str:
    written, width = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(written), contextlib.suppress(SystemExit):
            main([verb, "--help"])
    finally:
        os.environ.pop("COLUMNS") if width is None else os.environ.update(COLUMNS=width)
    return f"```text\n{written.getvalue().rstrip()}\n```\n"


def contents() -> str:
    """The page that leads to those of all commands."""
    rows = (f"| [`trimtab {verb}`]({verb}.md) | {line} |\n" for verb, (_, line) in VERBS.items())
    return (
        "# Commands\n\nAll options of every command, as `--help all` shows them.\n\n"
        f"| command | what it does |\n|---|---|\n{''.join(rows)}"
    )


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    files.append(File.generated(config, "commands/index.md", content=contents()))
    for verb in VERBS:
        files.append(File.generated(config, f"commands/{verb}.md", content=page(verb)))
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav.append({"Commands": ["commands/index.md", *(f"commands/{verb}.md" for verb in VERBS)]})
    return config
