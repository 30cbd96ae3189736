"""The one place that chooses what is around an engine: environments that it answers, or agents that ask it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trimtab.config.agents import EnvironmentOptions
from trimtab.data.sources import own_rows
from trimtab.envs.episode_session import EnvironmentEngine
from trimtab.envs.types import EpisodeSettings
from trimtab.errors import UserError
from trimtab.rollout.engine import Engine

if TYPE_CHECKING:
    from trimtab.envs.pool import EnvironmentsHere, Pool
    from trimtab.server.agents import AgentServerEngine
from trimtab.envs.chat_tokens import ChatTokens, ObservationError
from trimtab.envs.episode_session import first_tokens
from trimtab.envs.pool import Broken, Opened, Reply
from trimtab.envs.types import Task

PROMPT, LABEL = "prompt", "label"
"""Columns of an environment's own rows."""
EVALUATION = 1_000_003
"""What is added to the seed of rows to measure with."""


def never() -> bool:
    return False


def open_pool(options: EnvironmentOptions, stopped: Callable[[], bool] = never) -> "Pool":
    """The environment that options name."""
    from trimtab.envs.pool import EnvLimits, Pool

    assert options.environment_source is not None, "there is one"
    limits = EnvLimits(options.env_timeout, options.env_workers, options.env_threads, options.env_memory)
    return Pool(options.environment_source, limits, stopped)


def settings_of(options: EnvironmentOptions, *, plain: bool) -> EpisodeSettings:
    """`plain`: prompts are in no chat template."""
    return EpisodeSettings(
        max_turns=options.max_turns,
        episode_max_len=options.episode_max_len,
        observation_max_len=options.observation_max_len,
        retries=options.env_retries,
        history="template" if options.agent_history == "template" else "append",
        plain=plain,
    )


def playing_engine(
    engine: Engine,
    pool: "Pool | EnvironmentsHere",
    tokenizer: PreTrainedTokenizerBase,
    settings: EpisodeSettings | None = None,
) -> Engine:
    """The pool is closed with what comes back, and at once where nothing does."""
    try:
        if pool.about.kind != "agent":
            return EnvironmentEngine(engine, pool, tokenizer, settings)
        return _served(engine, pool, tokenizer, settings)
    except BaseException:
        pool.close()
        raise


def _served(
    engine: Engine,
    pool: "Pool | EnvironmentsHere",
    tokenizer: PreTrainedTokenizerBase,
    settings: EpisodeSettings | None,
) -> "AgentServerEngine":
    try:
        from trimtab.server.agents import AgentServerEngine
    except ImportError as error:
        raise UserError(
            f"an agent needs a server, and that the package {error.name}: pip install 'trimtab[serve]'"
        ) from error
    return AgentServerEngine(engine, pool, tokenizer, settings)


# ---- rows that an environment brings


def rows_of_environment(
    options: EnvironmentOptions, count: int, seed: int, *, to_measure: int = 0, instead: str
) -> dict[str, Dataset]:
    """So many to work with ("train") and, where some are wanted, others to measure with ("evaluation"). `instead`: the
    option that names prompts."""
    pool = open_pool(options)
    try:
        if not pool.about.offers_rows:
            raise UserError(f"{options.environment_flag} has no prompts of its own: give {instead}")
        if to_measure and pool.about.fixed:
            found = _held_out(pool.rows(count + to_measure, seed), to_measure, options)
        else:
            found = {"train": pool.rows(count, seed)}
            if to_measure:
                found["evaluation"] = pool.rows(to_measure, seed + EVALUATION)
    finally:
        pool.close()
    source, flag = str(options.environment_source), options.environment_flag
    return {what: own_rows(rows, source, flag) for what, rows in found.items()}


def _held_out(
    rows: list[dict[str, Any]], to_measure: int, options: EnvironmentOptions
) -> dict[str, list[dict[str, Any]]]:
    """The last ones: another seed would give rows that are learnt from."""
    if len(rows) <= to_measure:
        raise UserError(
            f"--env_eval_rows {to_measure}: {options.environment_flag} has {len(rows)} rows, and none would be left to "
            "learn from; lower it"
        )
    return {"train": rows[:-to_measure], "evaluation": rows[-to_measure:]}


def columns_of(rows: Dataset) -> dict[str, str | None]:
    """The options that say what is what in an environment's own rows."""
    return {"input_key": PROMPT, "label_key": LABEL if LABEL in rows.column_names else None}


# ---- Before a run: does the environment open an episode, and can the policy read what it says?


def try_environment(
    options: EnvironmentOptions, task: Task, prompt_ids: list[int], tokenizer: PreTrainedTokenizerBase, *, plain: bool
) -> list[str]:
    """What is told of it. `prompt_ids`: of the task's row; `plain`: prompts are in no chat template."""
    settings = settings_of(options, plain=plain)
    pool = open_pool(options)
    try:
        about = pool.about
        told = f"{about.kind}: {about.name}, {about.shape}"
        if about.kind == "agent":
            return [told]
        ChatTokens(tokenizer, about.tools, (), settings)
        pool.reset(0, task)
        replies: list[Reply] = []
        while not replies:
            replies = pool.finished(1.0)
    finally:
        pool.close()
    (reply,) = replies
    if isinstance(reply, Broken):
        raise UserError(f"{options.environment_flag} was tried and failed: {reply.words}")
    assert isinstance(reply, Opened)
    try:
        first_tokens(ChatTokens(tokenizer, reply.tools, (), settings), reply, task, prompt_ids)
    except ObservationError as error:
        raise UserError(f"{options.environment_flag} was tried and failed: {error}") from error
    tools = ", ".join(tool["function"]["name"] for tool in reply.tools)
    return [f"{told}; it opens with {_words(reply)}{f'; tools: {tools}' if tools else ''}"]


def _words(reply: Opened) -> str:
    if reply.messages is None:
        return "the prompt"
    said = str(reply.messages[-1].get("content"))
    return said.replace("\\", "\\\\").replace("\n", "\\n")
