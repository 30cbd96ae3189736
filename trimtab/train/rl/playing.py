"""An environment around the engine of a run: what plays it, and the rows that it brings where no prompts are given."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pyarrow
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trimtab.agents.engine import AgentEngine
from trimtab.agents.led_pool import LedPool
from trimtab.agents.settings import PlaySettings
from trimtab.config.agents import EnvironmentOptions
from trimtab.config.jobs import RLOptions
from trimtab.data.prompts import PromptStore, build_prompt_stores, load_prompt_stores
from trimtab.data.sources import SOURCE_COLUMN
from trimtab.distributed.peers import Peers
from trimtab.envs.pool import EnvLimits, Pool
from trimtab.errors import UserError
from trimtab.models.load import policy_skeleton
from trimtab.models.packed import PackedModel
from trimtab.rollout.engine import Engine
from trimtab.serving.playing import playing_engine

PROMPT, LABEL = "prompt", "label"
EVALUATION = 1_000_003
"""What is added to the seed of rows to measure with."""


def never() -> bool:
    return False


def open_pool(options: EnvironmentOptions, stopped: Callable[[], bool] = never) -> Pool:
    assert options.environment_source is not None
    limits = EnvLimits(options.env_timeout, options.env_workers, options.env_threads, options.env_memory)
    return Pool(options.environment_source, limits, stopped)


def player_of(
    options: RLOptions,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    stopped: Callable[[], bool],
    tensor: Peers | None = None,
) -> Engine | None:
    """What has the engine play, if there is an environment. `tensor`: whose engines draw the same. Told to stop, one
    that is alone gives up what it waits for, unless episodes are kept."""
    if not options.plays:
        return None
    settings = PlaySettings(
        max_turns=options.max_turns,
        episode_max_len=options.episode_max_len,
        observation_max_len=options.observation_max_len,
        retries=options.env_retries,
        history="template" if options.agent_history == "template" else "append",
        plain=not options.apply_chat_template,
    )
    if tensor is not None and tensor.size > 1:
        led = LedPool(open_pool(options) if tensor.leads else None, tensor)
        if led.about.kind == "agent":
            raise UserError(f"{options.environment_flag}: an agent asks one engine; train without tensor parallelism")
        return AgentEngine(engine, led, tokenizer, settings)
    pool = open_pool(options, never if options.outlives_updates else stopped)
    try:
        return playing_engine(engine, pool, tokenizer, settings)
    except BaseException:
        pool.close()
        raise


# ---- before the first episode


def settled(options: RLOptions, tokenizer: PreTrainedTokenizerBase) -> RLOptions:
    """With what options leave open that only model and tokenizer know: episodes are as long as the context, and
    prompts in the chat template, if there is one, unless somebody says otherwise."""
    if not options.plays:
        return options
    changes: dict[str, Any] = {}
    if "apply_chat_template" not in options.given:
        changes["apply_chat_template"] = tokenizer.chat_template is not None and options.input_template is None
    if options.episode_max_len is None:
        changes["episode_max_len"] = context_of(policy_skeleton(options))
        if changes["episode_max_len"] is None:
            raise UserError(
                f"--pretrain {options.pretrain} does not say how long its context is; give --episode_max_len"
            )
    return dataclasses.replace(options, **changes)


def context_of(model: PackedModel) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def load_stores(
    options: RLOptions, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, PromptStore], dict[str, Any]]:
    """The prompts to train on and, if there are any, to measure with: given, or the environment's own."""
    if options.prompt_data is not None:
        return load_prompt_stores(options, tokenizer)
    rows = _own_rows(options)
    label_key = LABEL if LABEL in rows["train"].column_names else None
    return build_prompt_stores(rows, tokenizer, dataclasses.replace(options, input_key=PROMPT, label_key=label_key))


def _own_rows(options: RLOptions) -> dict[str, Dataset]:
    pool = open_pool(options)
    try:
        if not pool.about.offers_rows:
            raise UserError(f"{options.environment_flag} has no prompts of its own: give --prompt_data")
        found = {"train": pool.rows(min(options.env_rows, options.max_samples), options.seed)}
        if options.env_eval_rows:
            found["evaluation"] = pool.rows(options.env_eval_rows, options.seed + EVALUATION)
    finally:
        pool.close()
    return {what: _as_dataset(rows, options) for what, rows in found.items()}


def _as_dataset(rows: list[dict[str, Any]], options: RLOptions) -> Dataset:
    """Where the environment says everything itself, its name stands for the prompt."""
    source = str(options.environment_source)
    named = [{**row, PROMPT: row.get(PROMPT) or source, SOURCE_COLUMN: source} for row in rows]
    if not named:
        raise UserError(f"{options.environment_flag} gives no rows; give --prompt_data")
    try:
        return Dataset.from_list(named)
    except pyarrow.ArrowException as error:
        raise UserError(f"{options.environment_flag}: its rows are not alike ({error}); give --prompt_data") from error
