"""What checks.py says of the options in serving.py."""

import ipaddress
import os
from collections.abc import Iterable

from trimtab.config.bounds import above_zero, at_least, one_of, place_exists
from trimtab.config.jobs import RLOptions, ServeRMOptions
from trimtab.config.serving import TOKEN_VARIABLE, ServerOptions, StepScoreOptions
from trimtab.errors import UserError


def _examine_server(options: ServerOptions) -> Iterable[str]:
    if not 0 <= options.port <= 65535:
        raise UserError(f"--port is {options.port}: it must be from 0 to 65535")
    if options.batch_size is not None:
        at_least(options, 1, "batch_size")
    above_zero(options, "max_request_mib")
    if not _is_loopback(options.host) and not (options.bearer_token or os.environ.get(TOKEN_VARIABLE)):
        return [f"--host {options.host}: anybody who reaches this machine can use the server; give a --bearer_token"]
    return []


def _examine_step_scores(options: StepScoreOptions) -> Iterable[str]:
    one_of(options, "step_reward", "min", "last", *(["steps"] if isinstance(options, RLOptions) else []))
    if options.placeholder_token is None:
        return []
    if not options.reward_tokens:
        raise UserError("--placeholder_token: a process reward model needs --reward_tokens too, as in its training")
    if options.normalize_reward:
        raise UserError("--normalize_reward: the scores of a process reward model are probabilities; leave it out")
    return []


def _examine_serving(options: ServeRMOptions) -> Iterable[str]:
    if bool(options.reward_pretrain) == bool(options.reward_verifier):
        raise UserError("give one of --reward_pretrain (a model folder) and --reward_verifier (for example gsm8k)")
    names = [name.strip() for name in (options.reward_pretrain or "").split(",") if name.strip()]
    for name in names:
        place_exists(name, "--reward_pretrain")
    if options.placeholder_token is not None and len(names) != 1:
        raise UserError("--placeholder_token: give one process reward model as --reward_pretrain")
    return []


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


EXAMINERS = (
    (ServerOptions, _examine_server),
    (StepScoreOptions, _examine_step_scores),
    (ServeRMOptions, _examine_serving),
)
