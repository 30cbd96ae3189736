"""The name of a tail run, from which its metric files and checkpoints have theirs. The grammar is RePULSe's own, so
that files of both can lie side by side."""

import re
from dataclasses import dataclass


def abbreviated(place: str) -> str:
    """`owner/SmolLM-135M-Instruct` as Sm13In: the first two characters of each word of the last part of a path."""
    last = place.rstrip("/").rsplit("/", 1)[-1]
    return "".join(piece[:2] for piece in re.split("[-_]", last))


@dataclass(frozen=True, kw_only=True)
class RunName:
    """What a run is told apart by. None: not part of this run's name."""

    rm_type: str
    pretrain: str
    reward_pretrain: str
    prompt_data: str
    generate_max_len: int
    init_kl_coef: float
    target_dist_beta: float | int
    """PPO has none of its own: 1 / init_kl_coef in three decimals, or the integer 10000."""
    parameterization: str
    actor_loss_type: str
    max_epochs: int
    episodes: int
    lr_scheduler: str
    actor_learning_rate: float
    seed: int
    base_as_proposal: bool = False
    start_beta: float | None = None
    uniform_reweight: bool = False
    reweighting_beta: float | None = None
    push_down_loss: str | None = None
    """--harmlessness_training_loss_type"""
    start_alpha: float | None = None
    alpha: float | None = None
    transform: tuple[float, float] | None = None
    """a and b of the reward transform."""
    only_evaluated: bool = False
    critic_learning_rate: float | None = None
    base_actor_learning_rate: float | None = None
    critic_loss_type: str | None = None

    def __str__(self) -> str:
        models = (abbreviated(place) for place in (self.pretrain, self.reward_pretrain, self.prompt_data))
        parts = [self.rm_type]
        parts += ["baseprop"] if self.base_as_proposal else []
        parts += [*models, f"len{self.generate_max_len}", f"kl{float(self.init_kl_coef)}"]
        parts += [] if self.start_beta is None else [f"start{float(self.start_beta)}"]
        parts += [f"beta{self.target_dist_beta}"]
        parts += ["uniwgt"] if self.uniform_reweight else []
        parts += [] if self.reweighting_beta is None else [f"sepb{float(self.reweighting_beta)}"]
        if self.push_down_loss is not None:
            parts += ["harml", self.push_down_loss]
            parts += [] if self.start_alpha is None else [f"start{float(self.start_alpha)}"]
            assert self.alpha is not None, "what pushes down has a weight"
            parts += [f"a{float(self.alpha)}"]
        if self.transform is not None:
            a, b = map(float, self.transform)
            parts[-1] += f"rta{a}"
            parts += [f"b{b}"]
        parts += [self.parameterization, self.actor_loss_type, f"epo{self.max_epochs}", f"epi{self.episodes}"]
        parts += ["eval"] if self.only_evaluated else []
        parts += [f"sch{self.lr_scheduler}", f"alr{float(self.actor_learning_rate)}"]
        parts += [] if self.critic_learning_rate is None else [f"clr{float(self.critic_learning_rate)}"]
        parts += [] if self.base_actor_learning_rate is None else [f"blr{float(self.base_actor_learning_rate)}"]
        parts += [] if self.critic_loss_type is None else [f"closs{self.critic_loss_type}"]
        return "_".join([*parts, self.parameterization, f"s{self.seed}"])
