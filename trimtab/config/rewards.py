"""Groups of options that say what scores answers. Like groups.py."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.config.option import Options, option
from trimtab.config.sources import listed
from trimtab.errors import UserError

GIVEN = "given:"
"""Before the name of a function that the process was given in Python: it has no file."""


@dataclass(frozen=True, kw_only=True)
class TeacherRewardOptions(Options):
    """Rewards"""

    teacher_model: str | None = option(None, place="model")
    """Model to learn from on the policy's own answers (on-policy distillation): each token's reward is how much more
    likely the teacher finds it."""
    teacher_coef: float = option(1.0, needs="teacher_model")
    """Weight of that reward."""


@dataclass(frozen=True, kw_only=True)
class JudgeOptions(Options):
    """Rewards"""

    reward_pretrain: str | None = option(None, place="model")
    """Reward models, separated by commas: ours, or any sequence classifiers with one score. Their rewards are added
    up."""
    reward_verifier: str | None = None
    """Built-in rewards with their weights, for example gsm8k:1.0,format:0.2."""


@dataclass(frozen=True, kw_only=True)
class RewardSourceOptions(JudgeOptions):
    """Rewards"""

    remote_rm_url: str | None = option(None, addresses=True)
    """Python files with reward_func(queries, prompts, labels), or addresses of reward servers, which share the
    samples; separated by commas. Servers are sent the token in TRIMTAB_BEARER_TOKEN."""
    reward_func: str | None = None
    """Reward functions as FILE.py or FILE.py:FUNCTION, separated by commas; OpenRLHF's, TRL's and verl's signatures are
    known."""
    reward_weights: tuple[float, ...] | None = None
    """Weights of the models, then of the functions, the files and, together, the servers; unset: 1 each."""
    reward_timeout: float | None = option(None, above=0)
    """Seconds that a call of a reward function, or a whole request to a server, may take; unset: 60 for functions, 180
    for servers."""

    def check(self) -> Iterable[str]:
        models, places = listed(self.reward_pretrain), listed(self.remote_rm_url)
        functions = listed(self.reward_func)
        for place in functions:
            if place.startswith(GIVEN):
                continue
            check_function(place, "--reward_func", "is not")
        files = [place for place in places if _is_file_of_a_reward(place)]
        count = len(models) + len(functions) + len(files) + (len(files) < len(places))  # all servers are one reward
        weights = self.reward_weights
        if weights is not None and len(weights) != count:
            raise UserError(
                f"--reward_weights has {len(weights)} numbers for {count} rewards: give one for each model, each "
                "function, each file and, together, the servers"
            )
        return ()


def _is_file_of_a_reward(place: str) -> bool:
    if place.startswith(("http://", "https://")):
        return False
    check_function(place, "--remote_rm_url", "is neither an address (http://...) nor")
    return True


def check_function(place: str, flag: str, otherwise: str) -> None:
    """Refuse what is no FILE.py or FILE.py:NAME, or is not there."""
    file = place[: place.rfind(".py") + 3]  # a function's name may follow
    if not file.endswith(".py"):
        raise UserError(f"{flag} {place} {otherwise} a Python file")
    if not os.path.isfile(os.path.expanduser(file)):
        raise UserError(f"{flag}: {file} does not exist; check the path")


@dataclass(frozen=True, kw_only=True)
class RewardScaleOptions(Options):
    """Rewards"""

    normalize_reward: bool = False
    """Subtract the mean and divide by the deviation that the reward model's config.json holds."""


@dataclass(frozen=True, kw_only=True)
class RewardOptions(RewardSourceOptions, RewardScaleOptions):
    """Rewards"""

    reward_clip_range: tuple[float, float] = (-10.0, 10.0)
    """The reward of an answer, after shaping, is kept between these two."""
    running_reward_norm: bool = False
    """Subtract the mean of all rewards of the run so far, and divide by their deviation, before anything else is made
    of them."""
    overlong_buffer_len: float | None = option(None, above=0)
    """Tokens before --generate_max_len in which an answer's length is penalised, the longer the more; of an episode
    those before --episode_max_len; unset: none."""
    overlong_penalty_factor: float = option(1.0, at_least=0, needs="overlong_buffer_len")
    """The penalty at full length."""

    def check(self) -> Iterable[str]:
        low, high = self.reward_clip_range
        if low >= high:
            raise UserError(f"--reward_clip_range {low:g} {high:g}: the first must be below the second")
        return () if self.reward_pretrain else self.idle(["normalize_reward"], "without --reward_pretrain")
