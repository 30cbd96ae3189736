"""The reward that a server's options name: reward models, a process reward model, or verifiers."""

from typing import Any

from trimtab.config.jobs import ServeRMOptions
from trimtab.rewards.types import Reward
from trimtab.rewards.verify import make_verifier
from trimtab.rewards.weighing import Weighted


def served_reward(options: ServeRMOptions) -> Reward:
    if options.reward_verifier:
        return make_verifier(options.reward_verifier)
    # Verifiers are served without torch.
    from trimtab.distributed.device import find_device
    from trimtab.rewards.model import ModelReward
    from trimtab.rewards.process import ProcessReward

    device = find_device()
    limits: dict[str, Any] = {"max_len": options.max_len, "max_samples": options.batch_size}
    assert options.reward_pretrain is not None, "one or the other is given"
    if options.placeholder_token is not None:
        place, separator = options.step_reward, options.step_separator
        return ProcessReward(options.reward_pretrain, options, device, place=place, separator=separator, **limits)
    names = [name.strip() for name in options.reward_pretrain.split(",") if name.strip()]
    normalize = options.normalize_reward
    models = [ModelReward(name, options, device, normalize=normalize, **limits) for name in names]
    return models[0] if len(models) == 1 else Weighted([(model, 1.0) for model in models])
