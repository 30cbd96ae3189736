"""The RL jobs: PPO, REINFORCE++, RLOO, GRPO and their relatives, one loop for all of them (loop.py)."""

from trimtab.train.rl.launch import dry_run_rl, train_rl

__all__ = ["dry_run_rl", "train_rl"]
