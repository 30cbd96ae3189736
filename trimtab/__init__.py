"""Trimtab steers language models from feedback, on one CPU or several GPUs."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trimtab.api.functions import dapo as dapo
    from trimtab.api.functions import dpo as dpo
    from trimtab.api.functions import generate as generate
    from trimtab.api.functions import grpo as grpo
    from trimtab.api.functions import kd as kd
    from trimtab.api.functions import kto as kto
    from trimtab.api.functions import options as options
    from trimtab.api.functions import ppo as ppo
    from trimtab.api.functions import prm as prm
    from trimtab.api.functions import reinforce as reinforce
    from trimtab.api.functions import rl as rl
    from trimtab.api.functions import rloo as rloo
    from trimtab.api.functions import rm as rm
    from trimtab.api.functions import sft as sft
    from trimtab.api.functions import tail as tail
    from trimtab.api.learner import Learner as Learner
    from trimtab.api.learner_losses import Loss as Loss
    from trimtab.api.learner_losses import LossInputs as LossInputs
    from trimtab.api.learner_losses import advantages as advantages
    from trimtab.api.run import Run as Run
    from trimtab.api.run import open as open
    from trimtab.api.samples import Episode as Episode
    from trimtab.api.samples import Sample as Sample
    from trimtab.envs.types import Step as Step
    from trimtab.envs.types import Task as Task
    from trimtab.envs.types import Turn as Turn
    from trimtab.errors import Error as Error
    from trimtab.errors import Interrupted as Interrupted
    from trimtab.errors import RunFailed as RunFailed
    from trimtab.errors import UserError as UserError

# Where each name is defined. It is imported when it is first asked for: `import trimtab` loads no torch.
_PLACES = {
    **dict.fromkeys(("dapo", "dpo", "generate", "grpo", "kd", "kto", "options", "ppo"), "trimtab.api.functions"),
    **dict.fromkeys(("prm", "reinforce", "rl", "rloo", "rm", "sft", "tail"), "trimtab.api.functions"),
    **dict.fromkeys(("Run", "open"), "trimtab.api.run"),
    **dict.fromkeys(("Error", "Interrupted", "RunFailed", "UserError"), "trimtab.errors"),
    **dict.fromkeys(("Loss", "LossInputs"), "trimtab.api.learner_losses"),
    **dict.fromkeys(("Episode", "Sample"), "trimtab.api.samples"),
    **dict.fromkeys(("Step", "Task", "Turn"), "trimtab.envs.types"),
    "Learner": "trimtab.api.learner",
    "advantages": "trimtab.api.learner_losses",
}

# Written out, so that type checkers can read it. A star must not put another `open` over Python's.
__all__ = [
    "Episode",
    "Error",
    "Interrupted",
    "Learner",
    "Loss",
    "LossInputs",
    "Run",
    "RunFailed",
    "Sample",
    "Step",
    "Task",
    "Turn",
    "UserError",
    "__version__",
    "advantages",
    "dapo",
    "dpo",
    "generate",
    "grpo",
    "kd",
    "kto",
    "options",
    "ppo",
    "prm",
    "reinforce",
    "rl",
    "rloo",
    "rm",
    "sft",
    "tail",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
