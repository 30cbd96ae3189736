"""An agent: `run(task, *, base_url, api_key, model)` plays a whole episode itself, with any client of OpenAI's API, and
gives its reward, or a dict with it and figures."""

from collections.abc import Callable, Mapping
from typing import Any

from trimtab.envs.shapes.adapted import Later, accepted, figures, named, number, parameters, then
from trimtab.envs.types import Task

WORDS = "run(task, *, base_url, api_key, model) (an agent)"


def fits(function: Any) -> bool:
    return callable(function) and "base_url" in parameters(function)


def run(
    function: Callable[..., Any], task: Task, *, base_url: str, api_key: str, model: str
) -> Later[tuple[float, dict[str, float]]]:
    """The reward and figures."""
    offered = {"base_url": base_url, "api_key": api_key, "model": model}
    return then(function(task, **accepted(function, offered)), _outcome)


def _outcome(found: object) -> tuple[float, dict[str, float]]:
    if found is None:
        raise TypeError("run gave nothing: its reward is needed, 0.0 where others judge")
    if not isinstance(found, Mapping):
        return number(found, "what run gave"), {}
    if "reward" not in found:
        raise TypeError(f"run gave {named(found)}: a number, or a dict with reward, is needed")
    logs = figures({name: value for name, value in found.items() if name != "reward"})
    return number(found["reward"], "the reward that run gave"), logs
