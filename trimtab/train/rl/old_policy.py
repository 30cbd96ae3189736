"""When a loop asks the policy for its log-probs before it is updated: what the options say of it. A plan asks too."""

from trimtab.config.jobs import RLOptions
from trimtab.train.rl.cut import updates_per_iteration


def scores_old_policy(options: RLOptions, *, reference: bool, teacher: bool, leaves_kl: bool) -> bool:
    """Whether something must be compared with its log-probs before the update, or after the first. In an only update
    they are the update's own. `reference`, `teacher`: whether there is one."""
    return updates_per_iteration(options) > 1 or teacher or (reference and not leaves_kl)


def leaves_kl_to_update(options: RLOptions, *, accelerator: bool) -> bool:
    """Whether the KL to the reference can be had there: as a loss, or where advantages are sums of rewards, of which it
    is one term. Dropout would be in it. A CPU gains little, and would round otherwise than before."""
    if options.keep_dropout or options.lora_dropout > 0 or not accelerator:
        return False
    summed = not (options.estimator.critic or options.estimator.whitened)
    return options.use_kl_loss or summed
