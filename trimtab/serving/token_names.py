"""What each token is called in replies, as text and as JSON: every log-prob that a client asks for has it beside it."""

import json
from collections.abc import Callable, Sequence


class TokenNames(dict[int, tuple[str, str]]):
    """By tokens: the name, and the same in JSON. One that is not known yet is asked for when it is needed."""

    def __init__(self, name: Callable[[int], str]):
        super().__init__()
        self._name = name

    def __missing__(self, token: int) -> tuple[str, str]:
        name = self._name(token)
        found = self[token] = name, json.dumps(name)
        return found

    def learn(self, names: Sequence[str]) -> None:
        """Of the first so many."""
        self.update(enumerate(zip(names, map(json.dumps, names))))
