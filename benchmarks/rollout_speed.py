"""Rollout tokens per second of the built-in engine against Hugging Face's generate, in one run on one accelerator.

Two Llama shapes with random bf16 weights (SmolLM2-360M's and SmolLM2-1.7B's), 128-token prompts, 512 new tokens with
log-probs: 64 prompts x 8 samples and 32 prompts x 8. Then 2,048 prompts whose answers' lengths are drawn uniformly from
32 to 512, through 512 slots; Hugging Face gets them in batches of 512, each as long as its longest answer. Timed end to
end, prompts and scheduling included; first calls, which compile and record, are timed apart. Also measured: the
sampled log-probs against the trainer's own packed forward pass, and how often an answer differs between alone and in
the batch (bf16: the random numbers are the same, rounding is not).

    python benchmarks/rollout_speed.py [--quick]
"""

import argparse
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from trimtab.data.batches import TokenBatch
from trimtab.distributed.device import find_device
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory

SHAPES = {
    "360M": ({"hidden_size": 960, "num_hidden_layers": 32, "num_attention_heads": 15, "num_key_value_heads": 5,
              "intermediate_size": 2560}, 64),
    "1.7B": ({"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 32,
              "intermediate_size": 8192}, 32),
}  # fmt: skip
VOCABULARY, PROMPT, ANSWER, SAMPLES = 49_152, 128, 512, 8
LIMITS = (32, 512)
HEADER = ["shape", "run", "engine", "tokens/s", "of generate"]


def make_policy(shape: dict, device: torch.device) -> Policy:
    torch.manual_seed(0)
    config = LlamaConfig(**shape, vocab_size=VOCABULARY, max_position_embeddings=2048, tie_word_embeddings=True)
    with device:
        model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    policy = Policy(model)
    choose_path(policy)
    return policy


def prompts(count: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(3, VOCABULARY, (count, PROMPT)).tolist()


def timed(work, device: torch.device):
    torch.accelerator.synchronize(device)
    begin = time.perf_counter()
    result = work()
    torch.accelerator.synchronize(device)
    return result, time.perf_counter() - begin


@torch.no_grad()
def hugging_face(policy: Policy, ids: list[list[int]], samples: int, length: int) -> None:
    policy.inner.set_attn_implementation("sdpa")
    policy.inner.generation_config.eos_token_id = None
    # Without a mask, which nothing here needs: with one it takes three times as long.
    policy.inner.generate(
        torch.tensor(ids, device=policy.device), max_new_tokens=length, do_sample=True, num_return_sequences=samples,
        pad_token_id=0, top_k=0,
    )  # fmt: skip


@torch.no_grad()
def against_trainer(policy: Policy, rollouts: list[Trajectory]) -> str:
    """The sampled log-probs against the packed forward pass of training."""
    differences = []
    for begin in range(0, len(rollouts), 16):
        part = rollouts[begin : begin + 16]
        whole = [np.array(r.prompt_ids + r.ids) for r in part]
        batch = TokenBatch.of([(ids, np.arange(len(ids)) >= len(r.prompt_ids)) for ids, r in zip(whole, part)])
        trained = policy(batch.to(policy.device)).log_probs_N.float().cpu().numpy()
        differences.append(trained - np.concatenate([r.log_probs for r in part]))
    d = np.concatenate(differences).astype(np.float64)
    return (
        f"log-probs against the trainer's, {len(d):,} tokens: mean |difference| {np.abs(d).mean():.2e}, largest "
        f"{np.abs(d).max():.2e}, mean importance ratio {np.exp(d).mean():.6f}"
    )


def divergence(
    engine: BuiltinEngine, ids: list[list[int]], together: list[Trajectory], sampling: SamplingParams
) -> str:
    """A prompt's samples asked for again, without the rest of the batch."""
    seeds = list(range(len(ids)))
    places = []
    for index in range(0, len(ids), max(1, len(ids) // 4)):
        alone = engine.generate([ids[index]], sampling, seeds=[seeds[index]])
        for mine, theirs in zip(alone, (r for r in together if r.prompt == index)):
            same = np.array(mine.ids) == np.array(theirs.ids)
            places.append(len(same) if same.all() else int(same.argmin()))
    changed = sum(place < ANSWER for place in places)
    return (
        f"alone and in the batch: {changed} of {len(places)} answers differ, "
        f"in the median at token {np.median(places):.0f} of {ANSWER}"
    )


def measure(name: str, device: torch.device, quick: bool) -> tuple[list[list[str]], list[str]]:
    shape, count = SHAPES[name]
    policy, ids, notes, rows = make_policy(shape, device), prompts(count), [], []
    slots = count * SAMPLES
    engine, built = timed(lambda: BuiltinEngine(policy, max_num_seqs=slots), device)
    sampling = SamplingParams(max_new_tokens=ANSWER, n=SAMPLES)
    _, first = timed(lambda: engine.generate(ids, sampling), device)
    seconds = []
    for _ in range(1 if quick else 3):
        rollouts, taken = timed(lambda: engine.generate(ids, sampling, seeds=range(count)), device)
        seconds.append(taken)
    new = sum(len(r.ids) for r in rollouts)
    ours = new / sorted(seconds)[len(seconds) // 2]
    notes.append(f"{name}: start-up {built + first - min(seconds):.1f} s (engine {built:.1f} s, then the first call)")
    notes.append(f"{name}: runs of {', '.join(f'{new / s:,.0f}' for s in seconds)} tokens/s")
    notes.append(f"{name}: " + against_trainer(policy, rollouts[:: len(rollouts) // 64]))
    notes.append(f"{name}: " + divergence(engine, ids, rollouts, sampling))
    hugging_face(policy, ids, SAMPLES, 8)
    _, taken = timed(lambda: hugging_face(policy, ids, SAMPLES, ANSWER), device)
    theirs = new / taken
    title = f"{count} x {SAMPLES}, {ANSWER} new tokens"
    rows += [
        [name, title, "generate", f"{theirs:,.0f}", "1.0"],
        [name, title, "trimtab", f"{ours:,.0f}", f"{ours / theirs:.1f}"],
    ]
    if name == "360M":
        rows += uneven(policy, engine, name, slots, ours, notes, device)
    return rows, notes


def uneven(policy, engine, name, slots, even, notes, device) -> list[list[str]]:
    count = 4 * slots
    ids, limits = prompts(count), np.random.default_rng(1).integers(LIMITS[0], LIMITS[1] + 1, count).tolist()
    sampling = SamplingParams(max_new_tokens=LIMITS[1])
    _, first = timed(lambda: engine.generate(ids, sampling, limits=limits), device)
    rollouts, taken = timed(lambda: engine.generate(ids, sampling, limits=limits), device)
    assert [len(r.ids) for r in rollouts] == limits
    ours = sum(limits) / taken
    notes.append(f"{name}: the first uneven call, which records more sizes, takes {first - taken:.1f} s longer")
    # One of its four batches; the others take as long.
    _, taken = timed(lambda: hugging_face(policy, ids[:slots], 1, max(limits[:slots])), device)
    theirs = sum(limits[:slots]) / taken
    notes.append(f"{name}: answers of uneven length keep {ours / even:.0%} of the tokens per second")
    title = f"{count}, {LIMITS[0]} to {LIMITS[1]} new tokens"
    return [
        [name, title, "generate", f"{theirs:,.0f}", "1.0"],
        [name, title, "trimtab", f"{ours:,.0f}", f"{ours / theirs:.1f}"],
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one timed run of each")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    device = find_device()
    assert device.is_accelerator, "this benchmark needs an accelerator; rollout_speed_cpu.py does not"
    rows, notes = [], []
    for name in arguments.shapes:
        more_rows, more_notes = measure(name, device.torch, arguments.quick)
        rows, notes = rows + more_rows, notes + more_notes
        for note in more_notes:
            print(note, flush=True)
    print(f"\n{device.name}, torch {torch.__version__}\n")
    for cells in (HEADER, ["---"] * len(HEADER), *rows):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
