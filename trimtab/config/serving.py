"""Groups of options of servers. Like groups.py."""

import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from trimtab.config.objectives import StepRewardOptions
from trimtab.config.option import Options, option, secret
from trimtab.config.rewards import RewardScaleOptions
from trimtab.errors import UserError

TOKEN_VARIABLE = "TRIMTAB_BEARER_TOKEN"
"""Environment variable of the token that a server asks for and its clients send."""
NO_TOKEN = "none"


@dataclass(frozen=True, kw_only=True)
class StepScoreOptions(StepRewardOptions):
    """Step rewards"""

    step_reward: str = option("min", choices=("min", "last", "steps"), needs="placeholder_token")
    """Which of a response's step scores is its reward: min or last; in RL also steps, each score at its own step."""
    step_separator: str | None = option(None, needs="placeholder_token")
    """Text that ends a step, before which the placeholder is put; unset: responses have the placeholder already."""

    def check(self) -> Iterable[str]:
        if self.placeholder_token is None:
            return ()
        if not self.reward_tokens:
            raise UserError("--placeholder_token: a process reward model needs --reward_tokens too, as in its training")
        if isinstance(self, RewardScaleOptions) and self.normalize_reward:
            raise UserError("--normalize_reward: the scores of a process reward model are probabilities; leave it out")
        return ()


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Options):
    """Server"""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 is every one of this machine, for anybody who can reach it."""
    port: int = option(5000, at_least=0, at_most=65535)
    """Port to listen at; 0: any that is free."""
    max_request_mib: float = option(64.0, above=0)
    """Larger requests are refused."""
    drain_seconds: float = option(30.0, at_least=0)
    """On Ctrl-C or SIGTERM, what has been accepted is still answered for so long; new requests get a 503."""
    bearer_token: str | None = secret(None)
    """Refuse requests without this token; unset: what the environment variable TRIMTAB_BEARER_TOKEN holds, else a
    policy server makes one and shows it, and a reward server asks for none; none: ask for none."""

    makes_token: ClassVar[bool] = False

    @property
    def token(self) -> str | None:
        """What was given; NO_TOKEN: nobody is asked for one."""
        return self.bearer_token or os.environ.get(TOKEN_VARIABLE) or (None if self.makes_token else NO_TOKEN)

    def check(self) -> Iterable[str]:
        if _is_loopback(self.host) or self.token != NO_TOKEN:
            return ()
        return [f"--host {self.host}: anybody who reaches this machine can use the server; give a --bearer_token"]


@dataclass(frozen=True, kw_only=True)
class RewardServerOptions(ServerOptions):
    """Server"""

    batch_size: int | None = option(None, at_least=1)
    """At most this many samples in one pass, whoever sent them; unset: as many as wait, by tokens."""


@dataclass(frozen=True, kw_only=True)
class PolicyServerOptions(ServerOptions):
    """Server"""

    makes_token: ClassVar[bool] = True

    served_model_name: str | None = None
    """What clients call the model; unset: what --pretrain says."""
    max_model_len: int | None = option(None, at_least=2)
    """At most this many tokens of a prompt and its answer; unset: the model's context."""
    max_requests: int = option(256, at_least=1)
    """Answers that are written at once; others wait."""
    max_waiting: int = option(1024, at_least=1)
    """Requests at once, at work or waiting; beyond them a request gets a 503 and may try again."""
    private_sessions: bool = False
    """Sessions have names that the server makes (POST /sessions) and nobody guesses; without such a name a session is
    neither gone on with nor traced. Unset: whoever has the key may name any session, and read its trace."""
    http_processes: int | None = option(None, at_least=0, at_most=64)
    """Processes that read requests and write replies beside the engine's; 0: its own does; unset: on an accelerator
    half as many as there are cores, at most 8, and 0 on a CPU, whose cores the engine needs."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
