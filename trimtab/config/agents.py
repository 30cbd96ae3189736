"""Groups of options of environments, which answer the policy turn by turn. Like groups.py."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.config.option import Options, option
from trimtab.config.rewards import check_function
from trimtab.errors import UserError

SOURCES = ("gem", "rg", "verifiers", "trimtab")
"""What an --environment may begin with."""
NEEDED = "without --agent_func_path or --environment"
FROM_DATA = ("prompt_data", "dataset")
"""Options of jobs that an environment's own rows can stand in for."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentOptions(Options):
    """Environments"""

    agent_func_path: str | None = None
    """Python file of an environment that answers the policy turn by turn, as FILE.py or FILE.py:NAME; the shapes of
    OpenRLHF, TRL, Gymnasium, GEM and SkyRL are known."""
    environment: str | None = None
    """An environment of a library: gem:NAME, rg:NAME (reasoning-gym), verifiers:MODULE, or trimtab:NAME for an embedded
    one."""
    env_rows: int = option(10_000, at_least=1)
    """Rows that an environment is asked for where no prompts are given; one that has a data set gives at most that."""
    max_turns: int = option(16, at_least=1)
    """Turns of the policy in an episode."""
    episode_max_len: int | None = option(None, at_least=1)
    """Tokens of an episode, from the prompt to its end; unset: the model's context."""
    observation_max_len: int | None = option(None, at_least=1)
    """Tokens of what an environment says at a time; of longer ones the middle is cut out; unset: no limit."""
    agent_history: str = option("append", choices=("append", "template"))
    """append: what was said stays as it was, and only what is new is added. template: the chat template renders the
    conversation anew for every turn; where it leaves out earlier words, an episode falls into several sequences."""
    env_timeout: float = option(60.0, above=0)
    """Seconds that a reset, a step or a tool call may take."""
    env_workers: int | None = option(None, at_least=1)
    """Processes that environments run in; unset: one for each core, and at most 8."""
    env_threads: int = option(16, at_least=1)
    """Threads in each of them for methods that are not async: so many may work at once."""
    env_memory: float = option(8.0, above=0)
    """GiB that each of them may take."""
    env_retries: int = option(2, at_least=0)
    """How often an episode is begun anew whose environment raised, hung or died."""

    @property
    def plays(self) -> bool:
        """Whether answers are episodes of an environment."""
        return self.environment_source is not None

    @property
    def environment_source(self) -> str | None:
        return self.agent_func_path or self.environment

    @property
    def environment_flag(self) -> str:
        """The option that names it, as messages begin."""
        return f"--{'agent_func_path' if self.agent_func_path else 'environment'} {self.environment_source}"

    def may_lack(self, name: str) -> bool:
        return (name in FROM_DATA and self.plays) or super().may_lack(name)

    def check(self) -> Iterable[str]:
        if self.agent_func_path and self.environment:
            raise UserError("--agent_func_path and --environment: an episode has one environment; give one of them")
        if self.agent_func_path:
            check_function(self.agent_func_path, "--agent_func_path", "is not")
        if self.environment:
            _check_source(self.environment)
        if not self.plays:
            given = [
                name for name in EnvironmentOptions.__annotations__ if name not in ("agent_func_path", "environment")
            ]
            return self.idle(given, NEEDED)
        if any(getattr(self, name, None) for name in FROM_DATA):
            return self.idle(["env_rows"], "where prompts are given")
        return ()


@dataclass(frozen=True, kw_only=True)
class AgentTrainingOptions(EnvironmentOptions):
    """Environments"""

    env_max_failed: float = option(0.1, at_least=0, at_most=1)
    """Share of an iteration's groups that may be left out before the run stops, with a checkpoint; of few, one.
    A group is left out where an episode of it fails, retries and all; the next prompt is taken for it."""
    env_eval_rows: int = option(0, at_least=0)
    """Rows of the environment to evaluate on, of another seed than those that are learnt from or, where it has a data
    set, held out of that; 0: none."""
    turn_reward: str = option("sum", choices=("sum", "returns"))
    """sum: the rewards of all turns are the episode's. returns: a turn is judged by what comes from it on, less what
    episodes of its group got as wholes."""
    mask_truncated: bool = False
    """Learn nothing from answers and episodes that were cut off: at a limit of tokens or turns, or by the environment.
    Others are still compared with them."""

    def check(self) -> Iterable[str]:
        if self.plays:
            return ()
        own = [name for name in AgentTrainingOptions.__annotations__ if name != "mask_truncated"]
        return self.idle(own, NEEDED)


@dataclass(frozen=True, kw_only=True)
class LookingOptions(Options):
    """Episodes"""

    episodes: int = option(1, at_least=1)
    """Episodes to play, one after another."""
    row: int = option(0, at_least=0)
    """Row of the data, or of the environment's own, that the first one is about."""
    by_hand: bool = False
    """Play yourself, with the tokens of --pretrain. Without a model that is always so."""
    tokens: bool = False
    """List every token: its id, whether it was drawn, its log-prob."""


def _check_source(text: str) -> None:
    kind, _, name = text.partition(":")
    if kind not in SOURCES or not name:
        forms = ", ".join(f"{known}:NAME" for known in SOURCES)
        instead = "; a file is given by --agent_func_path" if os.path.exists(text.partition(".py")[0] + ".py") else ""
        raise UserError(f"--environment {text!r} is none that is known: give one of {forms}{instead}")
