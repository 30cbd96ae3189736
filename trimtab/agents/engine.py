"""An environment around an engine: prompts become episodes, which come out as rollouts.

It is an engine itself, so that whatever asks one for answers can have episodes in their place.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from trimtab.agents.around import AroundEngine, Instances
from trimtab.agents.language import Language
from trimtab.agents.play import Play
from trimtab.agents.session import AgentSession
from trimtab.agents.settings import PlaySettings
from trimtab.envs.adapter import EnvironmentInfo
from trimtab.envs.types import Task, Turn
from trimtab.rollout.engine import Engine
from trimtab.rollout.sampling import Sampling

MOST_LANGUAGES = 64


class World(Instances, Protocol):
    """Environments."""

    @property
    def about(self) -> EnvironmentInfo: ...

    def reset(self, episode: int, task: Task) -> None: ...

    def step(self, episode: int, turn: Turn) -> None: ...

    def end(self, episode: int) -> None: ...


class AgentEngine(AroundEngine[Play]):
    def __init__(
        self,
        engine: Engine,
        pool: World,
        tokenizer: PreTrainedTokenizerBase,
        settings: PlaySettings | None = None,
    ):
        assert pool.about.kind == "environment", "an agent asks for its turns itself"
        super().__init__(engine, pool, settings)
        self.pool, self.tokenizer = pool, tokenizer
        self._languages: dict[str, Language] = {}
        self.language(pool.about.tools, ())  # a chat template that cannot serve them is refused now

    def open_session(self, sampling: Sampling) -> AgentSession:
        return AgentSession(self, sampling)

    def language(self, tools: Sequence[dict[str, Any]], stops: Collection[int]) -> Language:
        key = json.dumps([list(tools), sorted(stops)], sort_keys=True)
        if key not in self._languages:
            self._languages[key] = Language(self.tokenizer, tools, stops, self.settings)
            if len(self._languages) > MOST_LANGUAGES:  # tools may differ by episode
                del self._languages[next(iter(self._languages))]
        return self._languages[key]
