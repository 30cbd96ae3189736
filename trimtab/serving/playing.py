"""The one place that chooses what is around an engine: environments that it answers, or agents that ask it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from trimtab.agents.engine import AgentEngine
from trimtab.agents.led_pool import LedPool
from trimtab.agents.settings import PlaySettings
from trimtab.config.agents import EnvironmentOptions
from trimtab.errors import UserError
from trimtab.rollout.engine import Engine

if TYPE_CHECKING:
    from trimtab.envs.pool import Pool


def never() -> bool:
    return False


def open_pool(options: EnvironmentOptions, stopped: Callable[[], bool] = never) -> "Pool":
    """The environment that options name."""
    from trimtab.envs.pool import EnvLimits, Pool

    assert options.environment_source is not None, "there is one"
    limits = EnvLimits(options.env_timeout, options.env_workers, options.env_threads, options.env_memory)
    return Pool(options.environment_source, limits, stopped)


def settings_of(options: EnvironmentOptions, *, plain: bool) -> PlaySettings:
    """`plain`: prompts are in no chat template."""
    return PlaySettings(
        max_turns=options.max_turns,
        episode_max_len=options.episode_max_len,
        observation_max_len=options.observation_max_len,
        retries=options.env_retries,
        history="template" if options.agent_history == "template" else "append",
        plain=plain,
    )


def playing_engine(
    engine: Engine, pool: "Pool | LedPool", tokenizer: PreTrainedTokenizerBase, settings: PlaySettings | None = None
) -> Engine:
    """`pool`: of a policy whose layers are cut over processes, a LedPool in each of these."""
    if pool.about.kind != "agent":
        return AgentEngine(engine, pool, tokenizer, settings)
    if isinstance(pool, LedPool):
        raise UserError("an agent that asks for its turns: not with a policy cut over processes; use --zero_stage 3")
    try:
        from trimtab.serving.agent_engine import ServedAgents
    except ImportError as error:
        raise UserError(
            f"an agent needs a server, and that the package {error.name}: pip install 'trimtab[serve]'"
        ) from error
    return ServedAgents(engine, pool, tokenizer, settings)
