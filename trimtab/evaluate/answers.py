"""What a model answers to a few prompts, greedily, by Hugging Face's own `generate`.

Made for looking at a model before and after training, not for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trimtab.data.time_limit import template_time

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_new_tokens: int,
    batch_size: int = 64,
) -> list[str]:
    """One greedy answer per prompt (each prompt is one user turn), in order, without special tokens."""
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    with template_time():
        texts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return continue_tokens(model, tokenizer, tokens, max_new_tokens, batch_size)


def continue_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int = 64,
) -> list[str]:
    """The greedy continuation of each sequence of tokens, in order, without special tokens."""
    import torch

    assert tokenizer.pad_token_id is not None, "batched generation needs a padding token"
    was_training = model.training
    model.eval()
    answers: list[str] = []
    try:
        for start in range(0, len(prompts), batch_size):
            batch = tokenizer.pad(
                {"input_ids": [list(tokens) for tokens in prompts[start : start + batch_size]]},
                padding_side="left",
                return_tensors="pt",
            ).to(model.device)
            with torch.no_grad():
                sequences = model.generate(
                    **batch, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
                )
            generated = sequences[:, batch["input_ids"].shape[1] :]
            answers.extend(tokenizer.batch_decode(generated, skip_special_tokens=True))
    finally:
        model.train(was_training)
    return answers
