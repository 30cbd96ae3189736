"""A few prompts of a run's data, answered by the model it started from and by the model it saved.

Both models are loaded from disk after the run, one at a time, so that training pays nothing for it. The prompts are
cut out of the tokens that training reads: whatever the layout of the data, they are what the model was taught on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimtab.config.jobs import DPOOptions, KDOptions, KTOOptions, SFTOptions
from trimtab.config.rl_jobs import RLOptions
from trimtab.config.training_options import PrecisionOptions
from trimtab.data.labelled import build_labelled_store
from trimtab.data.pairs import build_pair_store
from trimtab.data.prompts import load_prompt_stores
from trimtab.data.sources import load_evaluation_rows, load_rows
from trimtab.data.tokenizer import load_tokenizer
from trimtab.data.tokens import build_sft_store
from trimtab.distributed.device import find_device
from trimtab.errors import UserError
from trimtab.evaluate.answers import continue_tokens
from trimtab.files import write_text
from trimtab.models.pretrained import from_pretrained, quiet_transformers

SAMPLES = "samples.json"
MOST_NEW_TOKENS = 256
SPARE_ROWS = 8  # looked at for each sample that is wanted: some rows are left out, or are no good answers

SupervisedSampled = SFTOptions | DPOOptions | KTOOptions | KDOptions
Example = tuple[np.ndarray, np.ndarray]  # ids, which of them are trained
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
    stores, _ = load_prompt_stores(options, tokenizer)
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
        pairs, _ = build_pair_store(rows, tokenizer, options, what="sample", workers=1)
        yield from (pairs.pair(index)[0] for index in range(len(pairs)))
    elif isinstance(options, KTOOptions):
        labelled, _ = build_labelled_store(rows, tokenizer, options, what="sample", workers=1)
        yield from (labelled.example(index) for index in range(len(labelled)) if labelled.labels[index])
    else:
        store, _ = build_sft_store(rows, tokenizer, options, what="sample", workers=1)
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
