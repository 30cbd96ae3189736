"""Sampled tokens whose log-prob differs in any bit from the trainer's forward pass, in bf16 with --exact.

A case is SHAPE:ROWS:TOKENS: answers of mixed lengths to prompts of mixed lengths, eight a prompt, at most ROWS at once,
until there are TOKENS; SHAPE is one of ours (360M, 1.7B, 8B), qwen2, qwen3 or qwen3_moe. Every second round is a second
turn, which continues from cached prefixes, and the KV cache is so small that sequences are preempted. The trainer reads
all of them in two packings, in order with shared prompts, and shuffled in rows of another size; with --packings, the
first round's in more. The gap of the model's own modules is what training has without --exact.

A case gradients:SHAPE gives the relative error of gradients in bf16 against fp32, by kind of weights, of fused layers
and of the model's own modules.

A case vllm:SHAPE:ROWS lets vLLM sample with the same weights, and compares its log-probs with the trainer's.

    python benchmarks/h200/exact.py 360M:512:1000000 1.7B:256:1000000 qwen3:256:1000000 [--lora 16]
"""

import argparse
import contextlib
import copy

import numpy as np
import torch
from rollouts import policy_of, start_vllm
from runs import Bench
from shapes import FAMILIES, make_family, make_model

from trimtab.data.batches import TokenBatch
from trimtab.models.compile import fuse_layers
from trimtab.models.packed import scoring
from trimtab.models.policy import Policy
from trimtab.models.routing import recorded_routes, replayed_routes, routers_of
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory

SAMPLES, LONGEST_PROMPT, LONGEST_ANSWER = 8, 400, 512


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cases", nargs="*", default=["360M:512:1000000"])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--packings", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0, help="of prompts and answers: counts of several add up")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters")
    parser.set_defaults(exact=True)


def model_of(name: str, bench: Bench) -> torch.nn.Module:
    model = make_family(name, bench.device) if name in FAMILIES else make_model(bench.shape(name), bench.device)
    with torch.no_grad():
        for weight in model.parameters():  # sharper than at initialisation
            weight.mul_(1.5) if weight.ndim > 1 else weight.add_(0.1 * torch.randn_like(weight))
    return model


def log_probs(policy: Policy, rollouts: list[Trajectory], order: list[int], rows: int, heat: float, shared: bool):
    """Of all sampled tokens, from packed rows of `rows` sequences."""
    found: dict[int, torch.Tensor] = {}
    for first in range(0, len(order), rows):
        part = [rollouts[i] for i in order[first : first + rows]]
        examples = [
            (np.array([*r.prompt_ids, *r.ids]), np.repeat([False, True], [len(r.prompt_ids), len(r.ids)])) for r in part
        ]
        borrowed = [
            len(own.prompt_ids) if shared and before is not None and before.prompt == own.prompt else 0
            for before, own in zip([None, *part], part)
        ]
        with scoring(policy):
            batch = TokenBatch.of(examples, borrowed if shared else None).to(policy.device)
            values = policy(batch, temperature=heat).log_probs_N.cpu()
        found |= dict(zip(order[first:], values.split([len(r.ids) for r in part])))
    return torch.cat([found[i] for i in range(len(rollouts))])


def measure(bench: Bench, words: str) -> None:
    name, rows, wanted = words.split(":")
    heat, rng = bench.arguments.temperature, np.random.default_rng(bench.arguments.seed)
    policy = policy_of(model_of(name, bench), bench, bench.arguments.lora).eval()
    room = int(rows) * (LONGEST_PROMPT + LONGEST_ANSWER) // 3
    engine = BuiltinEngine(policy, max_num_seqs=int(rows), kv_tokens=room, prefix_caching=True)
    prompts = max(1, int(rows) // SAMPLES)
    columns = "tokens differ_in_order differ_shuffled differ_in_packings differ_of_modules prompt_tokens"
    counts = dict.fromkeys(columns.split(), 0)
    gap, rollouts = 0.0, []
    while counts["tokens"] < int(wanted):
        lengths, limits = (rng.integers(1, most + 1, prompts).tolist() for most in (LONGEST_PROMPT, LONGEST_ANSWER))
        ids = [rng.integers(3, policy.head.out_features, length).tolist() for length in lengths]
        if second := bool(rollouts):
            ids = [[*r.prompt_ids, *r.ids, *new[:50]] for r, new in zip(rollouts[::SAMPLES], ids, strict=True)]
        cut = bench.arguments.top_p
        sampling = SamplingParams(max_new_tokens=LONGEST_ANSWER, n=SAMPLES, temperature=heat, top_p=cut)
        seeds = (rng.integers(0, 2**31, prompts)).tolist()
        rollouts = engine.generate(ids, sampling, seeds=seeds, limits=limits)
        sampled = torch.cat([torch.tensor(r.log_probs) for r in rollouts])
        together = list(range(len(rollouts)))
        shuffled = rng.permutation(len(rollouts)).tolist()
        for column, order, size, shared in (
            ("differ_in_order", together, 48, True),
            ("differ_shuffled", shuffled, int(rng.integers(1, 40)), False),
        ):
            found = log_probs(policy, rollouts, order, size, heat, shared)
            counts[column] += int((found != sampled).sum())
        if not counts["tokens"]:
            for packing in range(bench.arguments.packings):
                order, size = rng.permutation(len(rollouts)).tolist(), int(rng.integers(1, 64))
                order = sorted(order) if packing % 2 else order
                found = log_probs(policy, rollouts, order, size, heat, bool(packing % 2))
                counts["differ_in_packings"] += int((found != sampled).sum())
            policy.attention.compiled = False
            found = log_probs(policy, rollouts, together, 48, heat, True)
            policy.attention.compiled = True
            counts["differ_of_modules"], gap = int((found != sampled).sum()), float((found - sampled).abs().mean())
        counts["tokens"] += len(sampled)
        counts["prompt_tokens"] += sum(map(len, ids))
        bench.say(", ".join(f"{column} {count:,}" for column, count in counts.items()))
        rollouts = [] if second else rollouts
    prefilled = engine.prefilled_tokens  # less by cached prefixes, more by preempted sequences
    bench.row(work=f"exact {words}", who="trimtab", **counts, prefilled=prefilled, gap_of_modules=gap)


def measure_vllm(bench: Bench, words: str) -> None:
    """The gap of vLLM's log-probs to those of the trainer's fused layers and of the model's own modules."""
    from vllm import SamplingParams as Asked

    name, rows = words.split(":")
    rng, folder, model = (
        np.random.default_rng(bench.arguments.seed),
        bench.folder / "vllm",
        model_of(name, bench),
    )
    most = (LONGEST_PROMPT, LONGEST_ANSWER) if not bench.tiny else (20, 10)
    lengths = rng.integers(1, most[0] + 1, max(1, int(rows) // SAMPLES)).tolist()
    prompts = [rng.integers(3, model.config.vocab_size, length).tolist() for length in lengths]
    (model.float() if bench.tiny else model).save_pretrained(folder)
    engine, _ = start_vllm(bench, folder, [int(rows)], share=0.4, logprobs_mode="processed_logprobs")
    how = {"ignore_eos": True, "logprobs": 0, "detokenize": False, "temperature": bench.arguments.temperature}
    asked = Asked(n=SAMPLES, max_tokens=most[1], seed=0, **how)
    answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
    rollouts, sampled = [], []
    for number, answer in enumerate(answers):
        for sample, out in enumerate(answer.outputs):
            own = [found[token].logprob for found, token in zip(out.logprobs, out.token_ids)]
            rollouts.append(Trajectory(number, sample, prompts[number], list(out.token_ids), own, "length"))
            sampled += own
    del engine
    bench.release()
    policy = policy_of(model, bench, 0).eval()
    figures = {}
    for kind, compiled in (("trainer", policy.attention.compiled), ("modules", False)):
        policy.attention.compiled = compiled
        gap = log_probs(policy, rollouts, list(range(len(rollouts))), 48, asked.temperature, True) - torch.tensor(
            sampled
        )
        figures |= {f"gap_to_{kind}": float(gap.abs().mean()), f"differ_from_{kind}": int((gap != 0).sum())}
    bench.row(work=f"exact vllm {words}", who="vLLM", tokens=len(sampled), **figures)


def measure_gradients(bench: Bench, name: str) -> None:
    rng, found, chosen = np.random.default_rng(0), {}, []
    model = model_of(name, bench)
    ids = [rng.integers(3, model.config.vocab_size, length) for length in (900, 700, 400, 48)]
    batch = TokenBatch.of([(own, np.arange(len(own)) > 8) for own in ids]).to(bench.device)
    for kind in ("fp32", "modules", "fused"):
        own = copy.deepcopy(model).to(torch.float32 if kind == "fp32" else torch.bfloat16)
        policy = Policy(own)
        choose_path(policy)
        if kind == "fused" and (problem := fuse_layers(policy, bench.device, bf16=True)):
            bench.say(f"{name}: {problem}")
        # All take the experts of fp32: a token that is routed elsewhere would hide what rounding does.
        replayed = replayed_routes(dict(zip(routers_of(own), chosen)))
        with recorded_routes(own) as routes, replayed if chosen else contextlib.nullcontext():
            (-policy(batch).log_probs_N.mean()).backward()
        chosen = chosen or list(routes.values())
        found[kind] = {key: weight.grad for key, weight in own.named_parameters()}
    squares: dict[str, list[float]] = {}
    for key, true in found["fp32"].items():
        sums = squares.setdefault(".".join(key.split(".")[-2:]), [0.0] * 3)
        for index, other in enumerate((torch.zeros_like(true), found["modules"][key], found["fused"][key])):
            sums[index] += float((other.double() - true.double()).square().sum())
    for group, (whole, modules, fused) in squares.items():
        errors = {"of_modules": (modules / whole) ** 0.5, "of_fused_layers": (fused / whole) ** 0.5}
        bench.row(work=f"gradients {name} {group}", who="trimtab", **errors)


def main(argv: list[str] | None = None) -> None:
    bench = Bench(__doc__, argv, options=options)
    for words in bench.arguments.cases:
        with bench.attempt(words):
            kind, _, rest = words.partition(":")
            if kind in ("gradients", "vllm"):
                (measure_gradients if kind == "gradients" else measure_vllm)(bench, rest)
            else:
                measure(bench, words)


if __name__ == "__main__":
    main()
