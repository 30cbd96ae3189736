"""Rollout tokens per second of the built-in engine against Hugging Face's generate, in one run on this machine's CPU.

64 prompts of 16 to 64 tokens, sampled answers of 8 to 128 tokens, each request with a length of its own. fp32.
`generate` knows no length for each request: it gets all 64 at once, or batches of similar length (each as long as its
longest), and its best counts. Only tokens that were asked for count. The engine also returns log-probs; `generate`
does not.

    python benchmarks/rollout_speed_cpu.py
"""

import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams

REQUESTS, VOCABULARY, ROUNDS = 64, 8192, 3


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=VOCABULARY, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def make_requests() -> tuple[list[list[int]], list[int]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCABULARY, n).tolist() for n in rng.integers(16, 65, REQUESTS)]
    return prompts, rng.integers(8, 129, REQUESTS).tolist()


def generate(model, prompts: list[list[int]], limits: list[int], batch: int, **settings) -> None:
    """Requests of similar length together, padded on the left."""
    order = sorted(range(len(prompts)), key=lambda i: -limits[i])
    for begin in range(0, len(order), batch):
        group = order[begin : begin + batch]
        width = max(len(prompts[i]) for i in group)
        ids, mask = torch.zeros(2, len(group), width, dtype=torch.long)
        for row, i in enumerate(group):
            ids[row, width - len(prompts[i]) :] = torch.tensor(prompts[i])
            mask[row, width - len(prompts[i]) :] = 1
        longest = max(limits[i] for i in group)
        model.generate(
            ids, attention_mask=mask, max_new_tokens=longest, do_sample=True, top_k=0, pad_token_id=0, **settings
        )


def tokens_a_second(limits: list[int], job) -> float:
    """Best of a few rounds; the first one warms up."""
    job()
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - began)
    return sum(limits) / min(seconds)


def main() -> None:
    logging.set_verbosity_error()
    model, (prompts, limits) = make_model(), make_requests()
    print(f"{REQUESTS} requests, {sum(limits)} tokens asked for, {torch.get_num_threads()} threads")
    theirs = []
    for batch in (64, 32, 16, 8):
        theirs.append(tokens_a_second(limits, lambda: generate(model, prompts, limits, batch)))  # noqa: B023
        print(f"  generate, sorted by length, batches of {batch:<14d} {theirs[-1]:10,.0f} tokens/s", flush=True)
    policy = Policy(model)
    choose_path(policy)
    engine = BuiltinEngine(policy, max_num_seqs=REQUESTS)
    ours = tokens_a_second(limits, lambda: engine.generate(prompts, SamplingParams(), limits=limits))
    print(f"  trimtab {ours:53,.0f} tokens/s")
    print(f"  ratio: {ours / max(theirs):.2f} (against generate's best)")


if __name__ == "__main__":
    main()
