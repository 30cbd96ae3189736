"""What a pass over one packed row keeps for its backward pass, its peak and its time, for every way to keep less.

A Llama of random weights in bf16, the rows' sequences of equal length. On an accelerator the allocator is asked; on a
CPU living storages are counted (and nothing is offloaded, for everything is in main memory there).

    python benchmarks/activations.py --width 2048 --layers 16 --tokens 32768 --length 4096
"""

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trimtab.config.jobs import SFTOptions
from trimtab.data.batches import TokenBatch
from trimtab.distributed.device import find_device
from trimtab.models.load import prepare_training
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.plan.fake_model import LiveBytes
from trimtab.plan.workload import RowShape

CHECKPOINTING = {"gradient_checkpointing": True}


def ways(layers: int) -> dict[str, dict]:
    return {
        "no checkpointing": {},
        "--gradient_checkpointing_keep products": CHECKPOINTING | {"gradient_checkpointing_keep": "products"},
        f"--gradient_checkpointing_layers {layers // 2}": CHECKPOINTING
        | {"gradient_checkpointing_layers": layers // 2},
        "--gradient_checkpointing_keep attention": CHECKPOINTING | {"gradient_checkpointing_keep": "attention"},
        "--gradient_checkpointing": CHECKPOINTING,
        "--gradient_checkpointing --offload_activations": CHECKPOINTING | {"offload_activations": True},
    }


def measure(config: LlamaConfig, batch: TokenBatch, changes: dict) -> tuple[int, int, float]:
    device = find_device()
    with device.torch:
        policy = Policy(LlamaForCausalLM(config).to(torch.bfloat16))
    choose_path(policy)
    prepare_training(policy, SFTOptions(bf16=True, **changes), device)
    batch = batch.to(device.torch)
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [*policy.parameters(), *policy.buffers(), *(p.grad for p in policy.parameters())]
    if not device.is_accelerator:
        with LiveBytes(known) as live:
            loss = policy(batch).log_probs_N.sum()
            kept = live.now
            began = time.monotonic()
            loss.backward()
        return kept, live.peak, time.monotonic() - began
    seconds = []
    for _ in range(4):
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before, began = torch.accelerator.memory_allocated(), time.monotonic()
        loss = policy(batch).log_probs_N.sum()
        torch.accelerator.synchronize()
        kept = torch.accelerator.memory_allocated() - before
        loss.backward()
        torch.accelerator.synchronize()
        seconds.append(time.monotonic() - began)
    return kept, torch.accelerator.max_memory_allocated() - before, min(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"width": 512, "layers": 8, "heads": 8, "tokens": 2048, "length": 512}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    config = LlamaConfig(
        hidden_size=asked.width,
        intermediate_size=asked.width * 11 // 4,
        num_hidden_layers=asked.layers,
        num_attention_heads=asked.heads,
        num_key_value_heads=max(1, asked.heads // 4),
        vocab_size=32000,
        max_position_embeddings=asked.length,
    )
    batch = TokenBatch.of(*RowShape(0, asked.length).examples(asked.tokens))
    print(f"{'':50s} {'kept':>9s} {'peak':>9s} {'seconds':>8s}")
    for name, changes in ways(asked.layers).items():
        kept, peak, seconds = measure(config, batch, changes)
        print(f"{name:50s} {kept / 2**30:7.2f} G {peak / 2**30:7.2f} G {seconds:8.2f}", flush=True)


if __name__ == "__main__":
    main()
