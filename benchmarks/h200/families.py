"""Two GRPO iterations, rollout speed, and memory by length, of today's families in bf16 on one accelerator.

A case is the model type of a family in shapes.FAMILIES. GRPO: 16 prompts of 128 tokens, 8 answers each of up to 128,
all weights are trained. Rollouts: 64 answers of 128 tokens, and what the engine keeps for a sequence beside its KV
cache. Errors: of log-probs against fp32, which say whether a gap between engine and trainer is rounding. With
--lengths, peak memory of an update with one packed row of so many tokens, whose samples have 2,048 each.

    python benchmarks/h200/families.py qwen3_5_text gpt_oss qwen3_moe deepseek_v2 [--lengths 8192,16384,32768]
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grpo import REWARD
from rollouts import start_vllm
from runs import Bench, median, timed
from shapes import FAMILIES, make_family, write_rows, write_tokenizer
from transformers import AutoConfig

from trimtab.data.batches import TokenBatch
from trimtab.models.packed import scoring
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams

TINY = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
        "vocab_size": 512,
        "intermediate_size": 96, "moe_intermediate_size": 32, "num_local_experts": 8, "num_experts": 8,
        "n_routed_experts": 8, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 16}  # fmt: skip
SAMPLE = 2048


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cases", nargs="*", default=list(FAMILIES))
    parser.add_argument("--lengths", default="", help="tokens of a packed row, by commas")
    parser.add_argument("--layers", type=int, help="others than the table's")
    parser.add_argument(
        "--only", default="grpo,rollouts,errors", help="what is measured, by commas; also vllm, alone: it keeps memory"
    )


def model_of(bench: Bench, name: str) -> torch.nn.Module:
    other = TINY if bench.tiny else {}
    if bench.arguments.layers:
        other = other | {"num_hidden_layers": bench.arguments.layers}
    model = make_family(name, bench.device, **other)
    return model.float() if bench.tiny else model


def measure_grpo(bench: Bench, name: str) -> None:
    from trimtab.cli.train_grpo import main

    folder = Path(bench.folder, name)
    folder.mkdir(parents=True, exist_ok=True)
    model = model_of(bench, name)
    vocabulary, weights = model.config.vocab_size, sum(weight.numel() for weight in model.parameters())
    write_tokenizer(folder, vocabulary)
    model.save_pretrained(folder)
    del model
    bench.release()
    prompts, longest = (4, 8) if bench.tiny else (16, 128)
    drawn = np.random.default_rng(0).integers(3, vocabulary, (2 * prompts, longest))
    write_rows(folder / "prompts.jsonl", [{"input": " ".join(f"w{i}" for i in row)} for row in drawn])
    (folder / "reward.py").write_text(REWARD)
    rows = bench.command(
        main,
        f"--pretrain {folder} --prompt_data {folder}/prompts.jsonl --remote_rm_url {folder}/reward.py --prompt_max_len "
        f"{longest} --generate_max_len {longest} --rollout_batch_size {prompts} --n_samples_per_prompt 8 "
        f"--train_batch_size {8 * prompts} --use_dynamic_batch --train_max_tokens_per_gpu 8192 --init_kl_coef 0 "
        f"--actor_learning_rate 1e-6 --max_samples {2 * prompts} --save_steps -1 --logging_steps 1",
        (bench.arguments.ours or [""])[0],  # as users run it: with --exact where that is supported
    )
    figures = {key: rows[1].get(key, 0.0) for key in ("seconds_rollout", "seconds_update", "log_prob_gap", "length")}
    bench.row(
        f"GRPO {name}", who="trimtab", weights=weights, first=rows[0]["seconds"], seconds=rows[1]["seconds"],
        memory_gib=rows[1].get("memory_gib", 0.0), **figures,
    )  # fmt: skip


def measure_rollouts(bench: Bench, name: str) -> None:
    policy = Policy(model_of(bench, name)).eval()
    path = choose_path(policy)
    count, prompt, new = (2, 8, 12) if bench.tiny else (8, 128, 128)
    ids = np.random.default_rng(0).integers(3, policy.head.out_features, (count, prompt)).tolist()
    engine = BuiltinEngine(policy, max_num_seqs=8 * count, kv_tokens=8 * count * (prompt + new + 32))
    sampling = SamplingParams(max_new_tokens=new, n=8)
    _, first = timed(lambda: engine.generate(ids, sampling, seeds=range(count)), bench.device)
    taken = [timed(lambda: engine.generate(ids, sampling, seeds=range(count)), bench.device)[1] for _ in range(2)]
    bench.row(
        f"rollout {name} {8 * count}x{new}", who="trimtab", path=path.path, first_call=first,
        tokens_per_second=8 * count * new / median(taken), state_bytes=engine.memory.shape.state_bytes,
    )  # fmt: skip


def measure_vllm(bench: Bench, name: str) -> None:
    """As many answers of random weights by vLLM."""
    from vllm import SamplingParams as Asked

    folder, prompts, new = bench.folder / f"vllm-{name}", 8, 128
    count, prompt = 8 * prompts, 128
    other = {"num_hidden_layers": bench.arguments.layers} if bench.arguments.layers else {}
    model, more = make_family(name, torch.device("meta"), **other), dict[str, Any]()
    config, kind = model.config, type(model).__name__
    ids = np.random.default_rng(0).integers(3, config.vocab_size, (prompts, prompt)).tolist()
    if name == "qwen3_5_text":  # vLLM 0.24 knows it with a vision model alone
        config, kind = AutoConfig.for_model("qwen3_5", text_config=config.to_dict()), "Qwen3_5ForConditionalGeneration"
        more["limit_mm_per_prompt"] = {"image": 0, "video": 0}
        more["gdn_prefill_backend"] = "triton"  # by default it is FlashInfer's there, which may be missing
    config.architectures = [kind]
    config.save_pretrained(folder)
    bench.release()
    engine, built = start_vllm(bench, folder, [count], load_format="dummy", **more)
    asked = Asked(n=8, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False)
    requests: list[Any] = [{"prompt_token_ids": own} for own in ids]
    taken = [timed(lambda: engine.generate(requests, asked, use_tqdm=False), bench.device)[1] for _ in range(3)]
    bench.row(
        f"rollout {name} {count}x{new}", who="vLLM", first_call=taken[0], engine=built,
        tokens_per_second=count * new / median(taken[1:]),
    )  # fmt: skip


def measure_errors(bench: Bench, name: str) -> None:
    """Of log-probs in bf16 against fp32: ours in a packed row, the engine's, and transformers' eager attention."""
    model = model_of(bench, name)
    wide, plain = copy.deepcopy(model).float(), copy.deepcopy(model)
    policy = Policy(model).eval()
    choose_path(policy)
    count, prompt, new = (2, 8, 12) if bench.tiny else (4, 200, 100)
    ids = np.random.default_rng(0).integers(3, policy.head.out_features, (count, prompt)).tolist()
    engine = BuiltinEngine(policy, max_num_seqs=count, kv_tokens=count * (prompt + new + 32))
    rollouts = engine.generate(ids, SamplingParams(max_new_tokens=new), seeds=range(count))
    trained = np.repeat([False, True], [prompt, new])
    whole = [np.array([*r.prompt_ids, *r.ids]) for r in rollouts]
    batch = TokenBatch.of([(own, trained[: len(own)]) for own in whole]).to(bench.device)
    found = {"engine": torch.cat([torch.tensor(r.log_probs) for r in rollouts])}
    with scoring(policy):
        found["trainer"] = policy(batch).log_probs_N.float().cpu()
    for kind, other in {"fp32": wide, "eager": plain}.items():
        other.set_attn_implementation("eager")
        with torch.no_grad():
            logits = [other(input_ids=torch.tensor(own[None], device=bench.device)).logits[0] for own in whole]
        rows = [row[prompt - 1 : -1].float().log_softmax(-1).cpu() for row in logits]
        drawn = [torch.from_numpy(own[prompt:, None]) for own in whole]
        found[kind] = torch.cat([row.gather(-1, own)[:, 0] for row, own in zip(rows, drawn)])
    errors = {kind: float((found[kind] - found["fp32"]).abs().mean()) for kind in ("engine", "trainer", "eager")}
    bench.row(f"errors {name}", who="trimtab", **errors, gap=float((found["engine"] - found["trainer"]).abs().mean()))


def measure_lengths(bench: Bench, name: str, lengths: list[int]) -> None:
    policy = Policy(model_of(bench, name)).train()
    choose_path(policy)
    policy.inner.gradient_checkpointing_enable({"use_reentrant": False})
    peaks = []
    for length in lengths:
        ids = np.random.default_rng(0).integers(3, policy.head.out_features, length)
        parts = np.split(ids, range(SAMPLE, length, SAMPLE))
        batch = TokenBatch.of([(own, np.arange(len(own)) > 0) for own in parts]).to(bench.device)
        bench.release()
        held = torch.accelerator.memory_allocated() if not bench.tiny else 0
        if not bench.tiny:
            torch.accelerator.reset_peak_memory_stats()
        _, seconds = timed(lambda: (-policy(batch).log_probs_N.mean()).backward(), bench.device)  # noqa: B023
        policy.zero_grad(set_to_none=True)
        peaks.append((torch.accelerator.max_memory_allocated() - held) / 2**30 if not bench.tiny else 0.0)
        bench.row(f"row of {length} {name}", who="trimtab", seconds=seconds, gib_beside_weights=peaks[-1])


MEASURED = {"grpo": measure_grpo, "rollouts": measure_rollouts, "errors": measure_errors, "vllm": measure_vllm}


def main(argv: list[str] | None = None) -> None:
    bench = Bench(__doc__, argv, options=options)
    for name in bench.arguments.cases:
        for kind, measure in MEASURED.items():
            if kind in bench.arguments.only.split(","):
                with bench.attempt(f"{kind} {name}"):
                    measure(bench, name)
        if bench.arguments.lengths:
            with bench.attempt(f"lengths {name}"):
                measure_lengths(bench, name, json.loads(f"[{bench.arguments.lengths}]"))


if __name__ == "__main__":
    main()
