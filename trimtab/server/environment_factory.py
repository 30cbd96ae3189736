"""Episode engines for the environment that options name: an environment, or agents.

Training, evaluation and the API open environments here. An environment responds to the engine's turns; an agent calls
the run's policy server (agents.py), which is imported only then, because it needs a server's packages.
"""

from collections.abc import Callable
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trimtab.config.data_options import EnvironmentOptions
from trimtab.data.sources import own_rows
from trimtab.envs.chat_tokens import ChatTokens, ObservationError
from trimtab.envs.environment_engine import EnvironmentEngine, first_tokens
from trimtab.envs.environment_pool import (
    EnvironmentPool,
    FailureReply,
    LocalEnvironmentPool,
    Reply,
    ResetReply,
    SandboxLimits,
)
from trimtab.envs.types import EpisodeSettings, Task
from trimtab.errors import UserError
from trimtab.rollout.engine import Engine

PROMPT, LABEL = "prompt", "label"  # columns of an environment's own rows
EVALUATION = 1_000_003  # added to the seed of evaluation rows


def never() -> bool:
    return False


def open_pool(options: EnvironmentOptions, stopped: Callable[[], bool] = never) -> EnvironmentPool:
    """Start the environment that options name."""
    assert options.environment_source is not None, "there is one"
    limits = SandboxLimits(options.env_timeout, options.env_workers, options.env_threads, options.env_memory)
    return EnvironmentPool(options.environment_source, limits, stopped)


def episode_settings(options: EnvironmentOptions, *, plain: bool) -> EpisodeSettings:
    """`plain`: prompts have no chat template."""
    return EpisodeSettings(
        max_turns=options.max_turns,
        episode_max_len=options.episode_max_len,
        observation_max_len=options.observation_max_len,
        retries=options.env_retries,
        history="template" if options.agent_history == "template" else "append",
        plain=plain,
    )


def make_environment_engine(
    engine: Engine,
    pool: EnvironmentPool | LocalEnvironmentPool,
    tokenizer: PreTrainedTokenizerBase,
    settings: EpisodeSettings | None = None,
) -> Engine:
    """An episode engine around `engine`. It closes the pool when it is closed, or at once on an error."""
    try:
        if pool.info.kind != "agent":
            return EnvironmentEngine(engine, pool, tokenizer, settings)
        from trimtab.server.agents import AgentServerEngine

        return AgentServerEngine(engine, pool, tokenizer, settings)
    except BaseException:
        pool.close()
        raise


# ---- rows provided by an environment


def environment_rows(
    options: EnvironmentOptions, count: int, seed: int, *, eval_count: int = 0, instead: str
) -> dict[str, Dataset]:
    """`count` rows of the environment ("train"), and `eval_count` others ("evaluation"). `instead`: the option for
    prompts from files."""
    pool = open_pool(options)
    try:
        if not pool.info.offers_rows:
            raise UserError(f"{options.environment_flag} has no prompts of its own: give {instead}")
        if eval_count and pool.info.fixed:
            found = _held_out(pool.rows(count + eval_count, seed), eval_count, options)
        else:
            found = {"train": pool.rows(count, seed)}
            if eval_count:
                found["evaluation"] = pool.rows(eval_count, seed + EVALUATION)
    finally:
        pool.close()
    source, flag = str(options.environment_source), options.environment_flag
    return {what: own_rows(rows, source, flag) for what, rows in found.items()}


def _held_out(
    rows: list[dict[str, Any]], eval_count: int, options: EnvironmentOptions
) -> dict[str, list[dict[str, Any]]]:
    """Hold out the last rows: of a fixed set, another seed would return training rows."""
    if len(rows) <= eval_count:
        raise UserError(
            f"--env_eval_rows {eval_count}: {options.environment_flag} has {len(rows)} rows, and none would be left to "
            "learn from; lower it"
        )
    return {"train": rows[:-eval_count], "evaluation": rows[-eval_count:]}


def environment_columns(rows: Dataset) -> dict[str, str | None]:
    """The column options for rows provided by an environment."""
    return {"input_key": PROMPT, "label_key": LABEL if LABEL in rows.column_names else None}


# ---- preflight check


def check_environment(
    options: EnvironmentOptions, task: Task, prompt_ids: list[int], tokenizer: PreTrainedTokenizerBase, *, plain: bool
) -> list[str]:
    """Open one episode and tokenize its first observation; returns lines for the user. `prompt_ids`: of the task's
    row; `plain`: prompts have no chat template."""
    settings = episode_settings(options, plain=plain)
    pool = open_pool(options)
    try:
        about = pool.info
        line = f"{about.kind}: {about.name}, {about.shape}"
        if about.kind == "agent":
            return [line]
        ChatTokens(tokenizer, about.tools, (), settings)
        pool.reset(0, task)
        replies: list[Reply] = []
        while not replies:
            replies = pool.poll(1.0)
    finally:
        pool.close()
    (reply,) = replies
    if isinstance(reply, FailureReply):
        raise UserError(f"{options.environment_flag} was tried and failed: {reply.words}")
    assert isinstance(reply, ResetReply)
    try:
        first_tokens(ChatTokens(tokenizer, reply.tools, (), settings), reply, task, prompt_ids)
    except ObservationError as error:
        raise UserError(f"{options.environment_flag} was tried and failed: {error}") from error
    tools = ", ".join(tool["function"]["name"] for tool in reply.tools)
    return [f"{line}; it opens with {_first_observation(reply)}{f'; tools: {tools}' if tools else ''}"]


def _first_observation(reply: ResetReply) -> str:
    if reply.messages is None:
        return "the prompt"
    content = str(reply.messages[-1].get("content"))
    return content.replace("\\", "\\\\").replace("\n", "\\n")
