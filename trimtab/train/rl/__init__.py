"""The RL jobs: PPO, REINFORCE++, RLOO, GRPO and their relatives, one loop for all of them (loop.py)."""

from trimtab.config.rl_jobs import RLOptions
from trimtab.train.rl.launch import Controller, dry_run_rl, train_locally
from trimtab.train.rl.roles import with_environment_defaults, with_routing_replay
from trimtab.train.rl.source import with_recorded_options

__all__ = ["dry_run_rl", "train_rl"]


def train_rl(options: RLOptions, kind: type[Controller] = Controller) -> None:
    options = with_routing_replay(with_environment_defaults(with_recorded_options(options)))
    if options.ray:
        from trimtab.train.rl.ray_run import train_on_cluster  # Ray is imported only where it is asked for

        return train_on_cluster(options, kind)
    train_locally(options, kind)
