"""What a reward is asked of answers to prompts of a store."""

from collections.abc import Sequence

from trimtab.data.prompts import PromptStore
from trimtab.rewards.types import RewardRequest


def request_of(
    store: PromptStore,
    rows: Sequence[int],
    responses: Sequence[str],
    prompt_ids: Sequence[list[int]],
    response_ids: Sequence[list[int]],
) -> RewardRequest:
    """One answer a row, with everything that the row has beside its prompt."""
    prompts, given = [store.text(row) for row in rows], [store.prompt(row) for row in rows]
    conversations = [prompt for prompt in given if isinstance(prompt, list)]
    columns = [store.columns(row) for row in rows]
    names = dict.fromkeys(name for row in columns for name in row)
    return RewardRequest(
        queries=[prompt + response for prompt, response in zip(prompts, responses)],
        prompts=prompts,
        responses=list(responses),
        labels=[store.label(row) for row in rows],
        columns={name: [row.get(name) for row in columns] for name in names} | {store.input_key: given},
        prompt_ids=list(prompt_ids),
        response_ids=list(response_ids),
        conversations=conversations if len(conversations) == len(given) else [],
    )
