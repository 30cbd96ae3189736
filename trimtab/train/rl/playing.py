"""An environment around the engine of a run: what plays it, and the rows that it brings where no prompts are given."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trimtab.config.jobs import RLOptions
from trimtab.data.prompts import PromptStore, build_prompt_stores, load_prompt_stores
from trimtab.distributed.peers import Peers
from trimtab.envs.episode_engine import BroadcastPool
from trimtab.envs.episode_session import EnvironmentEngine
from trimtab.errors import UserError
from trimtab.models.load import policy_skeleton
from trimtab.models.packed import PackedModel
from trimtab.models.rotary import generated_context
from trimtab.rollout.engine import Engine
from trimtab.server.environment_engine import (
    columns_of,
    never,
    open_pool,
    playing_engine,
    rows_of_environment,
    settings_of,
)
from trimtab.train.launch import load_job_tokenizer


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
    settings = settings_of(options, plain=not options.apply_chat_template)
    if tensor is None or tensor.size == 1:
        pool = open_pool(options, never if options.outlives_updates else stopped)
        return playing_engine(engine, pool, tokenizer, settings)
    led = BroadcastPool(lambda: open_pool(options), tensor)
    try:
        if led.about.kind == "agent":
            raise UserError(
                f"{options.environment_flag}: an agent asks for its turns itself, and not a policy cut over processes; "
                "use --zero_stage 3"
            )
        return EnvironmentEngine(engine, led, tokenizer, settings)
    except BaseException:
        led.close()
        raise


# ---- before the first episode


def as_played(options: RLOptions) -> RLOptions:
    """With what options leave open that only model and tokenizer know: episodes are as long as the context, and
    prompts in the chat template, if there is one, unless somebody says otherwise. Every process of a run asks, before
    any of them speaks."""
    if not options.plays:
        return options
    changes: dict[str, Any] = {}
    if "apply_chat_template" not in options.given:
        tokenizer = load_job_tokenizer(options)
        changes["apply_chat_template"] = tokenizer.chat_template is not None and options.input_template is None
    if options.episode_max_len is None:
        changes["episode_max_len"] = context_of(policy_skeleton(options))
        if changes["episode_max_len"] is None:
            raise UserError(
                f"--pretrain {options.pretrain} does not say how long its context is; give --episode_max_len"
            )
    return dataclasses.replace(options, **changes)


def context_of(model: PackedModel) -> int | None:
    return generated_context(model.config)


def load_stores(
    options: RLOptions, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, PromptStore], dict[str, Any]]:
    """The prompts to train on and, if there are any, to measure with: given, or the environment's own."""
    if options.prompt_data is not None:
        return load_prompt_stores(options, tokenizer)
    count, held_out = min(options.env_rows, options.max_samples), options.env_eval_rows
    rows = rows_of_environment(options, count, options.seed, to_measure=held_out, instead="--prompt_data")
    return build_prompt_stores(rows, tokenizer, dataclasses.replace(options, **columns_of(rows["train"])))


def contents_of_environment(options: RLOptions) -> dict[str, str]:
    """For the manifest: what its file holds, which may change while its path does not."""
    if not options.agent_func_path:
        return {}
    file = Path(options.agent_func_path[: options.agent_func_path.rfind(".py") + 3]).expanduser()
    return {"environment": hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()}
