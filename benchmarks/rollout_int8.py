"""Decoding with int8 weights against the plain ones, in one run on one accelerator.

Shapes of SmolLM2-360M, SmolLM2-1.7B and Llama-3.1-8B with random bf16 weights; 128-token prompts; 1, 8, 64 and 256 rows
inside captured graphs. Tokens per second are those between the 64th and the last new token, so that neither reading the
prompts nor making the copies is in them; what a call costs besides (reading, and for int8 the copies) is told apart.

Then log-probs: those sampled with int8 against the plain weights' (what sampling with other weights does), against
those of the int8 weights unpacked for a pass of many rows (the same weights by other kernels: rounding), and, to
measure rounding by, the plain engine's against the plain weights'.

    python benchmarks/rollout_int8.py [--shapes 1.7B 8B] [--rows 1 8 64 256]
"""

import argparse
import gc

import numpy as np
import torch
from rollout_speed import PROMPT, against_trainer, timed
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from trimtab.distributed.device import find_device
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.builtin.linear import Int8Layers
from trimtab.rollout.sampling import SamplingParams

SHAPES = {
    "360M": {"hidden_size": 960, "num_hidden_layers": 32, "num_attention_heads": 15, "num_key_value_heads": 5,
             "intermediate_size": 2560, "vocab_size": 49_152, "tie_word_embeddings": True},
    "1.7B": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 32,
             "intermediate_size": 8192, "vocab_size": 49_152, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "intermediate_size": 14_336, "vocab_size": 128_256, "tie_word_embeddings": False},
}  # fmt: skip
SHORT, LONG, REPEATS = 64, 256, 2
HEADER = ["shape", "rows", "plain, tokens/s", "int8, tokens/s", "int8 / plain", "a call besides, plain", "int8"]


def make_policy(shape: dict, device: torch.device) -> Policy:
    torch.manual_seed(0)
    config = LlamaConfig(**shape, max_position_embeddings=2048, dtype=torch.bfloat16)
    with device:
        model = LlamaForCausalLM._from_config(config).eval()
    for layer in model.model.layers:  # as trained ones are: no layer drowns the others, and rounding stays small
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.weight.data /= (2 * config.num_hidden_layers) ** 0.5
    policy = Policy(model)
    choose_path(policy)
    return policy


def prompts(rows: int, vocabulary: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(3, vocabulary, (rows, PROMPT)).tolist()


def speed(engine: BuiltinEngine, ids: list[list[int]], device: torch.device) -> tuple[float, float]:
    """Tokens per second of decoding, and the seconds of a call besides."""
    answers = lambda length: engine.generate(ids, SamplingParams(max_new_tokens=LONG), limits=[length] * len(ids))  # noqa: E731
    answers(LONG)
    seconds = [min(timed(lambda: answers(length), device)[1] for _ in range(REPEATS)) for length in (SHORT, LONG)]  # noqa: B023
    step = (seconds[1] - seconds[0]) / (LONG - SHORT)
    return len(ids) / step, seconds[0] - SHORT * step


def gaps(policy: Policy, plain: BuiltinEngine, rounded: BuiltinEngine, vocabulary: int) -> list[str]:
    sampling = SamplingParams(max_new_tokens=LONG, n=4)
    by_plain, by_int8 = (engine.generate(prompts(8, vocabulary), sampling) for engine in (plain, rounded))
    notes = [
        "sampled with int8, plain weights: " + against_trainer(policy, by_int8),
        "sampled plain, plain weights: " + against_trainer(policy, by_plain),
    ]
    with Int8Layers(policy):
        notes.append("sampled with int8, the same int8 weights unpacked: " + against_trainer(policy, by_int8))
    return notes


def measure(name: str, rows: list[int], device: torch.device) -> tuple[list[list[str]], list[str]]:
    policy, vocabulary = make_policy(SHAPES[name], device), SHAPES[name]["vocab_size"]
    engines = [BuiltinEngine(policy, max_num_seqs=max(rows), weight_only_int8=int8) for int8 in (False, True)]
    fused = "fused layers" if engines[0].fused else "the model's own modules"
    table = []
    for count in rows:
        (plain, besides), (int8, more) = (speed(engine, prompts(count, vocabulary), device) for engine in engines)
        table.append(
            [
                name,
                str(count),
                f"{plain:,.0f}",
                f"{int8:,.0f}",
                f"{int8 / plain:.2f}",
                f"{besides:.3f} s",
                f"{more:.3f} s",
            ]
        )
        print(table[-1], flush=True)
    return table, [f"{name} ({fused}): {note}" for note in gaps(policy, *engines, vocabulary)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 64, 256])
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    device = find_device()
    assert device.is_accelerator, "this benchmark needs an accelerator"
    rows, notes = [], []
    for name in arguments.shapes:
        more_rows, more_notes = measure(name, arguments.rows, device.torch)
        rows, notes = rows + more_rows, notes + more_notes
        gc.collect()
    print("\n".join(notes))
    print(f"\n{device.name}, torch {torch.__version__}\n")
    for cells in (HEADER, ["---"] * len(HEADER), *rows):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
