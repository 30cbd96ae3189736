"""A source that was loaded: what the run is told of it, and how its episodes are made."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from trimtab.envs.shapes.adapted import Adapted, Later
from trimtab.envs.types import Task


@dataclass(frozen=True)
class About:
    name: str
    shape: str  # in words
    kind: Literal["environment", "agent"] = "environment"
    tools: list[dict[str, Any]] = field(default_factory=list)  # schemas that are known before a reset
    offers_rows: bool = False
    fixed: bool = False  # its rows are a data set's, whatever the seed


class Run(Protocol):
    """An episode that an agent plays at an endpoint: its reward, and figures."""

    def __call__(
        self, task: Task, *, base_url: str, api_key: str, model: str
    ) -> Later[tuple[float, dict[str, float]]]: ...


@dataclass(frozen=True)
class Loaded:
    about: About
    make: Callable[[], Adapted] | None = None  # of an environment
    run: Run | None = None  # of an agent
    rows: Callable[[int, int], list[dict[str, Any]]] | None = None
    """At most so many rows (prompt, label and further columns) by a seed, where the source has prompts itself."""
