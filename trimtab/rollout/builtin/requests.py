"""What a request must be for the engine to answer it."""

from trimtab.errors import UserError


def check_request(vocabulary: int, most: int | None, number: int, prompt_ids: list[int], limit: int) -> None:
    """`most`: places that the model has for tokens."""
    if not prompt_ids:
        raise UserError(f"prompt {number} is empty; at least one token is needed")
    if max(prompt_ids) >= vocabulary or min(prompt_ids) < 0:
        raise UserError(f"prompt {number} has a token outside the model's vocabulary of {vocabulary}")
    if limit < 1:
        raise UserError(f"the limit of prompt {number} is {limit}; at least 1 new token is needed")
    if most is not None and len(prompt_ids) + limit > most:
        raise UserError(
            f"prompt {number} has {len(prompt_ids)} tokens and {limit} may follow, but the model's "
            f"context is {most}; shorten the prompt or lower max_new_tokens"
        )
