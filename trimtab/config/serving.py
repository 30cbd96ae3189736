"""Groups of options of a reward server. Like groups.py."""

from dataclasses import dataclass

from trimtab.config.groups import secret
from trimtab.config.objectives import StepRewardOptions

TOKEN_VARIABLE = "TRIMTAB_BEARER_TOKEN"
"""Environment variable of the token that a reward server asks for and its clients send."""


@dataclass(frozen=True, kw_only=True)
class StepScoreOptions(StepRewardOptions):
    """Step rewards"""

    step_reward: str = "min"
    """Which of a response's step scores is its reward: min or last; in RL also steps, each score at its own step."""
    step_separator: str | None = None
    """Text that ends a step, before which the placeholder is put; unset: responses have the placeholder already."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Server"""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 is every one of this machine, for anybody who can reach it."""
    port: int = 5000
    """Port to listen at; 0: any that is free."""
    batch_size: int | None = None
    """At most this many samples in one pass, whoever sent them; unset: as many as wait, by tokens."""
    max_request_mib: float = 64.0
    """Larger requests are refused."""
    bearer_token: str | None = secret(None)
    """Refuse requests without this token; unset: what the environment variable TRIMTAB_BEARER_TOKEN holds, if it is
    set."""
