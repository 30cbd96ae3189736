"""Answers to many prompts, from Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.api.arguments import Arguments, argument_names, resolved
from trimtab.api.call import Hearing, call_errors, check_can_be_asked, in_words, with_paths, without_keys
from trimtab.config.jobs import GenerateOptions
from trimtab.config.parser import parse_values
from trimtab.config.resolved_config import redact
from trimtab.files import new_temporary_folder, remove
from trimtab.job import prepared, trusting_code
from trimtab.rewards.functions import register_functions

if TYPE_CHECKING:
    from trimtab.api.types import Model, Rows, Tokenizer


def generate(
    model: Model | None = None,
    prompts: Rows | None = None,
    reward: Any = None,
    *,
    tokenizer: Tokenizer | None = None,
    output_path: Any = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Answers to many prompts, and their scores where a reward is given: a list of rows.

    Args:
        model: a folder, a hub name or a loaded PreTrainedModel.
        prompts: paths or hub names; or rows: texts, lists of messages, dicts of columns, a datasets.Dataset.
        reward: as in ``trimtab.grpo``.
        output_path: a JSONL file for the rows, which is made while they come; a call that was stopped goes on there.

    Every other option of the command is a keyword, under the flag's name and checked by the same code:
    ``trimtab.options("generate")`` lists them, such as ``best_of_n``, ``max_new_tokens`` and ``temperature``.
    """
    named = {"pretrain": model, "dataset": prompts, "output_path": output_path}
    names = argument_names({"pretrain": "model", "dataset": "prompts"}, reward)
    objects = {"tokenizer": tokenizer, "reward": reward, "names": names}
    with call_errors(GenerateOptions, names), resolved(GenerateOptions, options, named, **objects) as arguments:
        home = new_temporary_folder("trimtab-generate")
        try:
            if output_path is None and not options.get("config"):
                arguments.values["output_path"] = str(home / "answers.jsonl")
            chosen = prepared(parse_values(GenerateOptions, arguments.values), arguments.given.aside)
            check_can_be_asked(chosen, arguments)
            with without_keys(chosen), trusting_code(chosen), register_functions(arguments.functions):
                return _rows(chosen, arguments, arguments.given.move_in(str(home)))
        finally:
            remove(home)


def _rows(options: GenerateOptions, arguments: Arguments, settled: Callable[[Any], Any]) -> list[dict[str, Any]]:
    from trimtab.job import rehearse_job, start_job

    if options.dry_run:
        for line in rehearse_job(with_paths(options, settled)):
            print(redact(line, options))
        return []
    words, hearing = in_words(arguments.values, settled), Hearing("generate")
    hearing.check(start_job(with_paths(options, settled), words, hearing))
    with Path(options.output_path).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
