"""The advantage estimators: one entry each, and everything that asks what an estimator does reads it here.

The mathematics is in algos/. An entry says which of its parts an estimator is made of;
train/rl/token_advantages.py puts them together.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Estimator:
    name: str
    """The value of --advantage_estimator."""
    called: str
    """What people call the method, in help and reports."""
    group: str = "unchanged"
    """How an answer's reward is seen against the others of its prompt: a word of SHAPED_BY in
    algos/group_rewards.py."""
    steps: bool = True
    """Whether algos/group_rewards.py says the same of the steps of answers; else --step_reward steps is refused."""
    critic: bool = False
    """Advantages are GAE's, from a critic's values; else sums of the rewards to come."""
    whitened: bool = False
    """Advantages are brought to mean 0 and deviation 1 over the iteration."""
    variant_of: str | None = None
    """The estimator of whose verb this is another form: a config of the one may be given to the verb of the other."""

    @property
    def grouped(self) -> bool:
        """Whether the answers to one prompt are compared with each other."""
        return self.group != "unchanged"

    @property
    def discounted(self) -> bool:
        """Whether --gamma has a meaning: rewards that were compared as wholes are summed as they are."""
        return not self.grouped


ESTIMATORS = {
    estimator.name: estimator
    for estimator in (
        Estimator(name="gae", called="PPO", critic=True, whitened=True),
        Estimator(name="reinforce", called="REINFORCE++", whitened=True),
        Estimator(
            name="reinforce_baseline",
            called="REINFORCE++ with a baseline",
            group="minus_mean",
            whitened=True,
            variant_of="reinforce",
        ),
        Estimator(name="rloo", called="RLOO", group="leave_one_out"),
        Estimator(name="group_norm", called="GRPO", group="standardised"),
        Estimator(name="dr_grpo", called="Dr. GRPO", group="minus_mean", variant_of="group_norm"),
    )
}
CALLED = {name: estimator.called for name, estimator in ESTIMATORS.items()}
