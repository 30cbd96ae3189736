"""The tail job: methods that make rare bad answers rarer, on the loop of the RL jobs (rl/loop.py)."""

from trimtab.train.tail.tail_run import dry_run_tail, train_tail

__all__ = ["dry_run_tail", "train_tail"]
