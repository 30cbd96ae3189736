"""A few prompts of a run's data, answered by the model it started from and by the model it saved.

Both models are loaded from disk after the run, one at a time, so that training pays nothing for it. The prompts are
cut out of the tokens that training reads: whatever the layout of the data, they are what the model was taught on.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trimtab.config.jobs import DPOOptions, KDOptions, KTOOptions, SFTOptions
from trimtab.config.rl_jobs import RLOptions
from trimtab.config.training_options import PrecisionOptions
from trimtab.data.batches import Example
from trimtab.data.chat_template import template_time
from trimtab.data.examples import build_labelled_dataset, build_pair_dataset, build_sft_dataset
from trimtab.data.prompts import load_prompt_datasets
from trimtab.data.sources import load_evaluation_rows, load_rows
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import find_device
from trimtab.errors import UserError
from trimtab.files import write_text
from trimtab.models.pretrained import from_pretrained, quiet_transformers

SAMPLES = "samples.json"
MOST_NEW_TOKENS = 256
SPARE_ROWS = 8  # looked at for each sample that is wanted: some rows are left out, or are no good answers

SupervisedSampled = SFTOptions | DPOOptions | KTOOptions | KDOptions

Asked = tuple[list[list[int]], list[str], int]  # prompts, what a right answer is, how long an answer may be


def write_samples(options: SupervisedSampled | RLOptions) -> Path:
    """Ask both models `options.report_samples` prompts and write their answers into `options.save_path`."""
    quiet_transformers()
    tokenizer = load_tokenizer(
        options.pretrain, disable_fast=options.disable_fast_tokenizer, chat_template=options.tokenizer_chat_template
    )
    if isinstance(options, RLOptions):
        prompts, references, length = _labelled_prompts(options, tokenizer)
    else:
        prompts, references, length = _taught_answers(options, tokenizer)
    before = _answers(options, options.pretrain, tokenizer, prompts, length)
    after = _answers(options, options.save_path, tokenizer, prompts, length)
    shown = tokenizer.batch_decode(prompts, skip_special_tokens=True)
    samples = [
        {"prompt": prompt, "before": old, "after": new, "reference": reference}
        for prompt, old, new, reference in zip(shown, before, after, references)
    ]
    path = Path(options.save_path) / SAMPLES
    write_text(path, json.dumps(samples, indent=1, ensure_ascii=False) + "\n")
    return path


def _labelled_prompts(options: RLOptions, tokenizer: Any) -> Asked:
    """Prompts of the evaluation data, or without any of the training data, and their labels."""
    stores, _ = load_prompt_datasets(options, tokenizer)
    store = stores.get("evaluation", stores["train"])
    rows = range(min(options.report_samples, len(store)))
    labels = [store.label(row) for row in rows]
    references = ["" if label is None else str(label) for label in labels]
    return [store.ids(row) for row in rows], references, min(MOST_NEW_TOKENS, options.generate_max_len)


def _taught_answers(options: SupervisedSampled, tokenizer: Any) -> Asked:
    examples = _examples(options, tokenizer)
    if not examples:
        raise UserError("--report_samples: the data hold no answer worth asking for")
    parts = [prompt_and_answer(*example) for example in examples]
    references = [reference for _, reference in parts]
    length = min(MOST_NEW_TOKENS, 2 * max(map(len, references)) + 8)
    return [prompt for prompt, _ in parts], tokenizer.batch_decode(references, skip_special_tokens=True), length


def prompt_and_answer(ids: np.ndarray, trained: np.ndarray) -> tuple[list[int], list[int]]:
    """A sequence cut before its last answer; a text without a prompt is cut in the middle."""
    places = np.flatnonzero(trained)
    end = int(places[-1]) + 1
    gaps = np.flatnonzero(~trained[:end])
    start = int(gaps[-1]) + 1
    if start < 2 and end > 2:
        start = end // 2
    return ids[:start].tolist(), ids[start:end].tolist()


def _examples(options: SupervisedSampled, tokenizer: Any) -> list[Example]:
    """Of the evaluation data, or without any of the training data; only answers worth giving."""
    rows = load_evaluation_rows(options)
    if rows is None:
        rows = load_rows(
            options.dataset,
            probabilities=options.dataset_probs,
            split=options.dataset_split,
            max_samples=options.max_samples,
            seed=options.seed,
        )
    rows = rows.select(range(min(len(rows), SPARE_ROWS * options.report_samples)))
    found = _good_answers(options, rows, tokenizer)
    return [example for _, example in zip(range(options.report_samples), found)]


def _good_answers(options: SupervisedSampled, rows: Any, tokenizer: Any) -> Iterator[Example]:
    if isinstance(options, DPOOptions):
        pairs, _ = build_pair_dataset(rows, tokenizer, options, what="sample", workers=1)
        yield from (pairs.pair(index)[0] for index in range(len(pairs)))
    elif isinstance(options, KTOOptions):
        labelled, _ = build_labelled_dataset(rows, tokenizer, options, what="sample", workers=1)
        yield from (labelled.example(index) for index in range(len(labelled)) if labelled.labels[index])
    else:
        store, _ = build_sft_dataset(rows, tokenizer, options, what="sample", workers=1)
        yield from (store.example(index) for index in range(len(store)))


def _answers(options: PrecisionOptions, place: str, tokenizer: Any, prompts: list[list[int]], length: int) -> list[str]:
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if options.bf16 else torch.float32
    model = from_pretrained(AutoModelForCausalLM, place, dtype=dtype).to(find_device().torch)
    # The model's own wishes (sampling, penalties) are for conversation; here it is asked for its likeliest answer.
    model.generation_config = type(model.generation_config)(
        eos_token_id=model.generation_config.eos_token_id or tokenizer.eos_token_id
    )
    return continue_tokens(model, tokenizer, prompts, length, batch_size=8)


# ---- What a model answers to a few prompts, greedily, by Hugging Face's own `generate`
#
# Made for looking at a model before and after training, not for speed.


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
