"""A reward of one's own, for --remote_rm_url examples/reward_func.py: does the answer end in the label?

The file is run in a process of its own, on as many samples at a time as finish together. It may return a list or a
tensor of rewards, or a dict: `rewards` are trained on, `scores` decide in dynamic filtering, `extra_logs` are logged.
"""


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict:
    """`queries` are prompts and responses together; `labels` come from the column that --label_key names."""
    responses = [query.removeprefix(prompt).strip() for query, prompt in zip(queries, prompts)]
    right = [float(response.endswith(label)) for response, label in zip(responses, labels)]
    # A right answer gets a little more for being brief; a wrong one must not, or saying nothing is learnt first.
    brief = [max(0.0, 1 - len(response) / 1000) for response in responses]
    return {
        "rewards": [a * (1 + 0.1 * b) for a, b in zip(right, brief)],
        "scores": right,
        "extra_logs": {"brief": brief},
    }
