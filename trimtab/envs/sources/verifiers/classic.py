"""verifiers up to 0.1: `load_environment(**options)` of the module gives one, with a dataset, a loop of its own and a
rubric. Its client is OpenAI's, at the endpoint that the run offers."""

from typing import Any

from trimtab.envs.loaded import About, Loaded
from trimtab.envs.shapes.adapted import figures, number
from trimtab.envs.types import Task
from trimtab.errors import UserError

WORDS = "verifiers' (load_environment)"
RETRIES = 5  # of requests that a busy server sends away
NOTHING_SAID = "EmptyModelResponseError"  # the policy's business: the episode ends, and the rubric has judged it


def load(module: str, options: dict[str, Any], source: str) -> Loaded:
    import verifiers

    try:
        environment = verifiers.load_environment(module, **options)
    except (AttributeError, ImportError, ValueError) as error:
        raise UserError(f"--environment {source}: {' '.join(str(error).split())}") from error

    def rows(count: int, seed: int) -> list[dict[str, Any]]:
        found = environment.get_dataset(n=count, seed=seed).to_list()
        return [{**row, "label": row.get("answer")} for row in found]

    async def run(task: Task, *, base_url: str, api_key: str, model: str) -> tuple[float, dict[str, float]]:
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=RETRIES, timeout=None) as client:
            row = {"example_id": task.row, "answer": task.label, **task.columns, "prompt": task.prompt}
            found = await environment.run_rollout(row, OpenAIChatCompletionsClient(client), model, {})
        error = found.get("error")
        if error is not None and NOTHING_SAID not in str(error):
            raise RuntimeError(f"verifiers: {error}")
        return number(found["reward"], "the reward"), figures(found.get("metrics"))

    return Loaded(About(module, WORDS, "agent", offers_rows=True, fixed=True), run=run, rows=rows)
