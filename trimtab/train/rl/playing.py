"""The environment of a run: the engine of its episodes, and its rows if no prompts are given.

Modules of environments are imported only if the options name one.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trimtab.config.jobs import RLOptions
from trimtab.data.prompts import PromptStore, build_prompt_stores, load_prompt_stores
from trimtab.distributed.process_group import Peers
from trimtab.errors import UserError
from trimtab.models.load import fake_policy
from trimtab.models.rotary import generated_context
from trimtab.rollout.engine import Engine
from trimtab.train.launch import load_job_tokenizer


def player_of(
    options: RLOptions,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    stopped: Callable[[], bool],
    tensor: Peers | None = None,
) -> Engine | None:
    """An engine of episodes around this one, if there is an environment. `tensor`: the tensor-parallel group, whose
    engines generate the same. `stopped`: ends waits of a single process, unless episodes outlive updates."""
    if not options.plays:
        return None
    from trimtab.envs.environment_engine import EnvironmentEngine
    from trimtab.envs.environment_pool import BroadcastPool
    from trimtab.server.environment_factory import episode_settings, make_environment_engine, never, open_pool

    settings = episode_settings(options, plain=not options.apply_chat_template)
    if tensor is None or tensor.size == 1:
        pool = open_pool(options, never if options.outlives_updates else stopped)
        return make_environment_engine(engine, pool, tokenizer, settings)
    shared = BroadcastPool(lambda: open_pool(options), tensor)
    try:
        if shared.info.kind == "agent":
            raise UserError(
                f"{options.environment_flag}: an agent asks for its turns itself, and not a policy cut over processes; "
                "use --zero_stage 3"
            )
        return EnvironmentEngine(engine, shared, tokenizer, settings)
    except BaseException:
        shared.close()
        raise


# ---- before the first episode


def as_played(options: RLOptions) -> RLOptions:
    """The options with defaults that depend on model and tokenizer: episodes are as long as the context, and prompts
    use the chat template if there is one. Called in every process of a run before they communicate."""
    if not options.plays:
        return options
    changes: dict[str, Any] = {}
    if "apply_chat_template" not in options.given:
        tokenizer = load_job_tokenizer(options)
        changes["apply_chat_template"] = tokenizer.chat_template is not None and options.input_template is None
    if options.episode_max_len is None:
        changes["episode_max_len"] = generated_context(fake_policy(options).config)
        if changes["episode_max_len"] is None:
            raise UserError(
                f"--pretrain {options.pretrain} does not say how long its context is; give --episode_max_len"
            )
    return dataclasses.replace(options, **changes)


def load_stores(
    options: RLOptions, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, PromptStore], dict[str, Any]]:
    """The prompts of training and, if there are any, of evaluation: from data, or the environment's own rows."""
    if options.prompt_data is not None:
        return load_prompt_stores(options, tokenizer)
    from trimtab.server.environment_factory import environment_columns, environment_rows

    count, held_out = min(options.env_rows, options.max_samples), options.env_eval_rows
    rows = environment_rows(options, count, options.seed, eval_count=held_out, instead="--prompt_data")
    return build_prompt_stores(rows, tokenizer, dataclasses.replace(options, **environment_columns(rows["train"])))


def contents_of_environment(options: RLOptions) -> dict[str, str]:
    """A hash of the environment's file for the manifest: it may change while its path does not."""
    if not options.agent_func_path:
        return {}
    file = Path(options.agent_func_path[: options.agent_func_path.rfind(".py") + 3]).expanduser()
    return {"environment": hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()}
