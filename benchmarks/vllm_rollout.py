"""vLLM beside the built-in engine, on one accelerator and in one run: a Llama of SmolLM2-360M's shape, random weights.

engines   both in this process: tokens per second with log-probs, seconds to hand over new weights, the gap to the
          trainer's log-probs before and after, memory asleep and awake
grpo      a few steps of `trimtab grpo` with each engine: seconds of every phase, the gap in every step
shared    an engine in a process of its own on the same accelerator, which sees the sender's bucket (CUDA IPC)

python benchmarks/vllm_rollout.py [engines] [grpo] [shared]
"""

import json
import multiprocessing
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from trimtab.data.batches import TokenBatch
from trimtab.distributed.device import find_device
from trimtab.distributed.weight_transfer import BUCKET_BYTES, TransferSender, plan_transfer
from trimtab.embedded.sort_task import make_prompts, make_tokenizer
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.models.weight_export import WeightExport
from trimtab.rollout.factory import build_engine, build_vllm_engine
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory

SHAPE = {"hidden_size": 960, "num_hidden_layers": 32, "num_attention_heads": 15, "num_key_value_heads": 5,
         "intermediate_size": 2560}  # fmt: skip
TINY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 256}  # fmt: skip
VOCABULARY = 49_152
DEVICE = find_device()
LARGE = DEVICE.is_accelerator  # else a rehearsal
PROMPTS, SAMPLES, ANSWER = (64, 8, 512) if LARGE else (4, 2, 16)
SETTINGS = {"bf16": LARGE, "longest": 1024, "max_num_seqs": PROMPTS * SAMPLES, "memory_share": 0.3, "sleeps": LARGE}
SETTINGS |= {"prefix_caching": True, "eager": not LARGE}


def main() -> None:
    if find_spec("vllm") is None:
        return print("vLLM is not installed: nothing is measured")
    parts = sys.argv[1:] or ["engines", "grpo", "shared"]
    with tempfile.TemporaryDirectory() as folder:
        policy = make_model(Path(folder))
        for part in parts:
            print(f"== {part}", flush=True)
            {"engines": engines, "grpo": grpo, "shared": shared}[part](Path(folder), policy)


def make_model(folder: Path) -> Policy:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **(SHAPE if LARGE else TINY), vocab_size=VOCABULARY, max_position_embeddings=2048, tie_word_embeddings=True,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.to(torch.bfloat16 if LARGE else torch.float32)
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    lines = [json.dumps(row) + "\n" for row in make_prompts(256, 1)]
    (folder / "prompts.jsonl").write_text("".join(lines))
    policy = Policy(model.to(DEVICE.torch))
    choose_path(policy)
    return policy


# ---- figures


def timed(work):
    if LARGE:
        torch.accelerator.synchronize()
    begin = time.perf_counter()
    result = work()
    if LARGE:
        torch.accelerator.synchronize()
    return result, time.perf_counter() - begin


def used_gib() -> float:
    if not LARGE:
        return 0.0
    free, total = torch.accelerator.get_memory_info() if hasattr(torch.accelerator, "get_memory_info") else (
        torch.cuda.mem_get_info()
    )  # fmt: skip
    return (total - free) / 2**30


@torch.no_grad()
def gap(policy: Policy, rollouts: list[Trajectory]) -> str:
    """The sampled log-probs against the trainer's packed forward pass."""
    differences = []
    for begin in range(0, len(rollouts), 16):
        part = rollouts[begin : begin + 16]
        whole = [np.array(r.prompt_ids + r.ids) for r in part]
        batch = TokenBatch.of([(ids, np.arange(len(ids)) >= len(r.prompt_ids)) for ids, r in zip(whole, part)])
        trained = policy(batch.to(policy.device)).log_probs_N.float().cpu().numpy()
        differences.append(trained - np.concatenate([r.log_probs for r in part]))
    found = np.abs(np.concatenate(differences))
    return f"mean {found.mean():.2e}, largest {found.max():.2e} of {len(found):,} tokens"


def prompts(count: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(3, VOCABULARY, (count, 128)).tolist()


@torch.no_grad()
def move(policy: Policy) -> None:
    """As an update would, but so far that it shows."""
    for parameter in policy.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2 * parameter.std())


def speed(engine, ids: list[list[int]]) -> tuple[float, list[Trajectory]]:
    sampling = SamplingParams(max_new_tokens=ANSWER, n=SAMPLES)
    engine.generate(ids, sampling, seeds=range(len(ids)))  # what is compiled and recorded on the way
    rollouts, seconds = timed(lambda: engine.generate(ids, sampling, seeds=range(len(ids))))
    return sum(len(r.ids) for r in rollouts) / seconds, rollouts


# ---- parts


def engines(folder: Path, policy: Policy) -> None:
    ids = prompts(PROMPTS)
    print(f"memory with the policy: {used_gib():.2f} GiB")
    ours = build_engine(policy, max_num_seqs=PROMPTS * SAMPLES)
    own, rollouts = speed(ours, ids)
    print(f"built-in: {own:,.0f} tokens/s; gap {gap(policy, rollouts[::8])}", flush=True)
    ours.sleep()
    DEVICE.release_memory()
    del ours, rollouts
    before = used_gib()
    engine, seconds = timed(
        lambda: build_vllm_engine(str(folder / "model"), None, WeightExport(policy, bf16=LARGE), **SETTINGS)
    )
    print(f"vLLM: started in {seconds:.1f} s; memory {before:.2f} -> {used_gib():.2f} GiB", flush=True)
    theirs, rollouts = speed(engine, ids)
    print(f"vLLM: {theirs:,.0f} tokens/s, {theirs / own:.2f} of the built-in engine; gap {gap(policy, rollouts[::8])}")
    awake = used_gib()
    _, slept = timed(engine.sleep)
    asleep = used_gib()
    _, woke = timed(engine.wake)
    print(
        f"vLLM: awake {awake:.2f} GiB, asleep {asleep:.2f} GiB ({slept:.2f} s), awake again {used_gib():.2f} GiB "
        f"({woke:.2f} s)",
        flush=True,
    )
    move(policy)
    stale = engine.generate(ids[:16], SamplingParams(max_new_tokens=min(32, ANSWER)))
    _, first = timed(lambda: engine.weights_changed(1))
    _, again = timed(lambda: engine.weights_changed(2))
    fresh = engine.generate(ids[:16], SamplingParams(max_new_tokens=min(32, ANSWER)))
    print(f"vLLM: new weights in {first:.2f} s, again in {again:.2f} s; gap before: {gap(policy, stale)}")
    print(f"vLLM: gap after: {gap(policy, fresh)}", flush=True)
    engine.close()


def grpo(folder: Path, policy: Policy) -> None:
    """The command itself, in a process of its own for each engine."""
    del policy
    import subprocess

    batch, answer = (32, 256) if LARGE else (4, 8)
    for engine in ("builtin", "vllm"):
        out = folder / engine
        words = (
            f"grpo --pretrain {folder}/model --prompt_data {folder}/prompts.jsonl --label_key label "
            f"--apply_chat_template --reward_verifier length(0-{answer // 2}) --prompt_max_len 64 "
            f"--generate_max_len {answer} --rollout_batch_size {batch} --n_samples_per_prompt 8 --max_steps 4 "
            f"--train_batch_size {batch * 8} --micro_train_batch_size 8 --actor_learning_rate 1e-5 --save_path {out} "
            f"--rollout_engine {engine} --rollout_slots {batch * 8} --vllm_gpu_memory_utilization 0.3 "
            f"--vllm_enable_sleep --enable_prefix_caching {'--bf16' if LARGE else ''}"
        )
        subprocess.run([sys.executable, "-m", "trimtab.cli.main", *words.split()], check=True, stdout=sys.stderr)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            phases = {name: value for name, value in row.items() if name.startswith("seconds")}
            told = ", ".join(f"{name.removeprefix('seconds_')} {value:.2f} s" for name, value in phases.items())
            print(f"{engine}, step {row['step']}: {told}; gap {row['log_prob_gap']:.2e}", flush=True)


def shared(folder: Path, policy: Policy) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, str(folder / "model")))
    process.start()
    handover, outgoing = WeightExport(policy, bf16=LARGE), TransferSender(DEVICE.torch)
    told = {"backend": "gloo", "tensors": handover.described(), "about": {}, "patience": 300.0}
    plan = plan_transfer([outgoing.offer()], ours.recv(), **told)
    ours.send(plan)
    outgoing.open(plan)
    print(f"joined: {plan[0]['way']}, buckets of {BUCKET_BYTES / 2**20:.0f} MiB", flush=True)
    ours.recv()
    for version in (1, 2):
        move(policy)
        ours.send(version)
        _, seconds = timed(lambda: outgoing.send(handover.tensors()))
        rollouts = ours.recv()
        print(f"sent in {seconds:.2f} s; gap {gap(policy, rollouts)}", flush=True)
    ours.send(None)
    process.join(60)
    outgoing.close()


def serve(pipe, model: str) -> None:
    engine = build_vllm_engine(model, None, **SETTINGS)
    pipe.send(engine.receivers())
    engine.connect(pipe.recv())
    pipe.send("joined")
    while (version := pipe.recv()) is not None:
        engine.receive_weights(version)
        pipe.send(engine.generate(prompts(16), SamplingParams(max_new_tokens=min(32, ANSWER))))
    engine.close()


if __name__ == "__main__":
    main()
