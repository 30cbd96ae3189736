"""Rollout tokens a second of the built-in engine, with log-probs, against vLLM in this process where it is installed.

A case is SHAPE:ROWSxNEW: rows of 8 answers to a 128-token prompt, so many new tokens each, all of them drawn. Prompts
and scheduling are in the time, the first call (which compiles and records) is told apart. `--lora 16` adds adapters
whose B is not zero and measures both, without and with them. vLLM has its own compilation and graphs, and prefix
caching, so that it reads a group's prompt once as we do.

    python benchmarks/h200/rollouts.py 360M:64x512,512x512 1.7B:32x512,256x512 8B:64x512,256x512 [--lora 16]
"""

import argparse
import gc
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runs import Bench, median, timed
from shapes import Shape, make_model, write_model

from trimtab.errors import UserError
from trimtab.models.compile import fuse_layers
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams

PROMPT, SAMPLES = 128, 8
LONG = 1024  # more new tokens than this are drawn once
WARM = 2.5  # seconds of the same work before it is timed: before, the device's clocks are lower


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cases", nargs="*", default=["360M:64x512,512x512"])
    parser.add_argument("--repeats", type=int, default=3, help="timed calls, after the first")
    parser.add_argument("--exact", action="store_true", help="as in a run with --exact on")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters")


class Case:
    def __init__(self, words: str, tiny: bool):
        self.name, self.tiny = words, tiny
        self.rows, self.new = (8, 12) if tiny else map(int, words.split("x"))
        self.prompt = 8 if tiny else PROMPT

    def prompts(self, shape: Shape) -> list[list[int]]:
        count = self.rows // SAMPLES
        return np.random.default_rng(0).integers(3, shape.vocab_size, (count, self.prompt)).tolist()

    @property
    def tokens(self) -> int:
        return self.rows * self.new


def policy_of(model: torch.nn.Module, bench: Bench, lora: int) -> Policy:
    if bench.tiny:
        model.float()
    if lora:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(task_type="CAUSAL_LM", r=lora, target_modules="all-linear")
        model = get_peft_model(model, config, autocast_adapter_dtype=False).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    weight.data = weight.data.to(torch.float32 if bench.tiny else torch.bfloat16)
                if "lora_B" in name:
                    weight.normal_(0, 1e-3)
    policy = Policy(model)
    choose_path(policy)
    if bench.arguments.exact and not bench.tiny and (problem := fuse_layers(policy, bench.device, bf16=True)):
        raise UserError(problem)
    return policy


def time_ours(bench: Bench, name: str, model: torch.nn.Module, cases: list[Case], lora: int = 0) -> dict[str, float]:
    shape, found = bench.shape(name), {}
    policy = policy_of(model, bench, lora)
    room = max(case.rows * (case.prompt + case.new + 32) for case in cases)
    engine, built = timed(
        lambda: BuiltinEngine(policy, max_num_seqs=max(case.rows for case in cases), kv_tokens=room), bench.device
    )
    bench.say(f"{name}{f' with LoRA {lora}' * bool(lora)}: engine {built:.1f} s, fused layers: {bool(engine.fused)}")
    for case in cases:
        ids, sampling = case.prompts(shape), SamplingParams(max_new_tokens=case.new, n=SAMPLES)
        answer = lambda: engine.generate(ids, sampling, seeds=range(len(ids)))  # noqa: B023, E731
        first = warm = timed(answer, bench.device)[1] if case.new <= LONG else 0.0
        while case.new <= LONG and warm < WARM and not bench.tiny:
            warm += timed(answer, bench.device)[1]
        taken = []
        for _ in range(bench.arguments.repeats if case.new <= LONG else 1):
            rollouts, seconds = timed(answer, bench.device)
            taken.append(seconds)
        assert sum(len(r.ids) for r in rollouts) == case.tokens
        seconds = median(taken)
        found[case.name] = case.tokens / seconds
        bench.row(
            f"rollout {name} {case.name}", who=f"trimtab, LoRA {lora}" if lora else "trimtab", seconds=seconds,
            tokens_per_second=found[case.name], milliseconds_a_step=1000 * seconds / case.new, first_call=first,
            engine=built, share=bench.rates.decoding(shape, case.rows, case.prompt, case.new) / seconds,
        )  # fmt: skip
    return found


def start_vllm(bench: Bench, folder: Path, rows: list[int], share: float = 0.85, **more: object) -> tuple[Any, float]:
    """vLLM in this process, and the seconds it took to start."""
    from vllm import LLM

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as it is in training
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sizes = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, *rows]}}
    return timed(
        lambda: LLM(
            model=str(folder), skip_tokenizer_init=True, dtype="float32" if bench.tiny else "bfloat16",
            max_model_len=1024, max_num_seqs=max(rows), gpu_memory_utilization=share, seed=0,
            **({"enforce_eager": True} if bench.tiny else sizes), **more,
        ),
        bench.device,
    )  # fmt: skip


def vllm_is_there(bench: Bench) -> bool:
    return bench.with_peer and find_spec("vllm") is not None


def time_vllm(bench: Bench, name: str, cases: list[Case]) -> dict[str, float]:
    from vllm import SamplingParams

    shape, found = bench.shape(name), {}
    folder = bench.folder / name
    write_model(folder, shape, bench.device) if bench.tiny else shape.config(
        architectures=["LlamaForCausalLM"]
    ).save_pretrained(folder)
    bench.release()
    rows = sorted({case.rows for case in cases})
    engine, built = start_vllm(bench, folder, rows, load_format="dummy")
    bench.say(f"vLLM {name}: started in {built:.1f} s")
    for case in cases:
        asked = [{"prompt_token_ids": ids} for ids in case.prompts(shape)]
        sampling = SamplingParams(
            n=SAMPLES, temperature=1.0, max_tokens=case.new, ignore_eos=True, logprobs=0, detokenize=False
        )
        taken = []
        while sum(taken) < WARM or len(taken) < 3:
            answers, seconds = timed(lambda: engine.generate(asked, sampling, use_tqdm=False), bench.device)  # noqa: B023
            taken.append(seconds)
        assert sum(len(out.token_ids) for answer in answers for out in answer.outputs) == case.tokens
        seconds = median(taken[1:])
        found[case.name] = case.tokens / seconds
        bench.row(
            f"rollout {name} {case.name}", who="vLLM", seconds=seconds, tokens_per_second=found[case.name],
            first_call=taken[0], engine=built,
            share=bench.rates.decoding(shape, case.rows, case.prompt, case.new) / seconds,
        )  # fmt: skip
    return found


def main(argv: list[str] | None = None) -> None:
    bench = Bench(__doc__, argv, options=options)
    for words in bench.arguments.cases:
        name, _, cases = words.partition(":")
        work = [Case(case, bench.tiny) for case in cases.split(",")]
        found = {}
        model = make_model(bench.shape(name), bench.device) if bench.with_us else None
        for lora in dict.fromkeys((0, bench.arguments.lora)) if model is not None else ():
            with bench.attempt(f"{name}, LoRA {lora}"):
                found["LoRA" if lora else "trimtab"] = time_ours(bench, name, model, work, lora)
        del model
        bench.release()
        if vllm_is_there(bench) and not bench.tiny:
            with bench.attempt("vLLM"):
                found["vLLM"] = time_vllm(bench, name, [case for case in work if case.new <= LONG])
        gc.collect()
        for who, speeds in found.items():
            ratio = {case: speed / found.get("trimtab", speeds)[case] for case, speed in speeds.items()}
            bench.say(
                f"{name}, {who}: " + ", ".join(f"{c} {s:,.0f}/s ({ratio[c]:.2f} of ours)" for c, s in speeds.items())
            )


if __name__ == "__main__":
    main()
