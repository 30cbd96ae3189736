"""An environment of verifiers (0.1): words are to be said backwards, with a second try after a wrong answer."""

import random

import verifiers as vf
from datasets import Dataset

WORDS = ["river", "stone", "cloud", "apple", "engine", "silver", "garden", "window", "paper", "bridge"]


class SecondTry(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "No. Letter by letter, from the last to the first: try once more."}]


def backwards(completion, answer, **kwargs) -> float:
    """1 at once, a half at the second try."""
    said = [message["content"].strip().lower() for message in completion if message["role"] == "assistant"]
    return next((1.0 / (1 + turn) for turn, text in enumerate(said) if text == answer), 0.0)


def load_environment(count: int = 1000, seed: int = 0, **kwargs) -> vf.Environment:
    numbers = random.Random(seed)
    words = [numbers.choice(WORDS) + numbers.choice(WORDS) for _ in range(count)]
    asked = [{"question": f"Write {word} backwards, and nothing else.", "answer": word[::-1]} for word in words]
    return SecondTry(dataset=Dataset.from_list(asked), rubric=vf.Rubric(funcs=[backwards]), max_turns=2, **kwargs)
