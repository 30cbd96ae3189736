"""A run with a function as a tool, beside a reward; where it was begun, it is resumed from the files of the run."""

import os

import trimtab


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one of them
        b: the other
    """
    return a + b


if os.path.exists("out/manifest.json"):
    trimtab.open("out").resume()
else:
    trimtab.grpo(
        "../../data/agent",
        ["What is 1 + 2?", "What is 3 + 4?"] * 4,
        "task.py:reward",
        tools=[add],
        save_path="out",
        generate_max_len=4,
        rollout_batch_size=4,
        n_samples_per_prompt=4,
        train_batch_size=8,
        micro_train_batch_size=4,
        actor_learning_rate=1e-3,
        lr_warmup_ratio=0,
        init_kl_coef=0,
        save_steps=1,
        env_workers=1,
    )
