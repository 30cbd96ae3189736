"""Where an answer ends."""

from typing import Any

from trimtab.models.policy import Policy


def stop_tokens(policy: Policy, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: the tokenizer's end token and those the model's generation config names."""
    configured = getattr(policy.inner.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    return tuple(dict.fromkeys(t for t in [tokenizer.eos_token_id, *listed] if t is not None))
