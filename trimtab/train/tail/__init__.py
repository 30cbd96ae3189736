"""The tail job: methods that make rare bad answers rarer, on the loop of the RL jobs (rl/loop.py)."""

from trimtab.train.tail.launch import rehearse_tail, train_tail

__all__ = ["rehearse_tail", "train_tail"]
