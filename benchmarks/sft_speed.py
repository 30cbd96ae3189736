"""SFT tokens per second against TRL, in one run on this machine's CPU.

Model: Llama, hidden 256, 4 layers, vocabulary 8k. Samples of 32 to 512 tokens, the second half of each trained, 64 a
step, fp32, fused AdamW. TRL is tried at several settings and its best counts; each side is timed on the same steps
after a warm-up step, counting real tokens only. Prints one line a setting and the ratio.

    python benchmarks/sft_speed.py
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from datasets import Dataset, disable_progress_bars
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.utils import logging

VOCABULARY, BATCH = 8192, 64


def make_samples(steps: int) -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(steps * BATCH):
        length = int(rng.integers(32, 513))
        ids = rng.integers(3, VOCABULARY, length)
        samples.append((ids[: length // 2].tolist(), ids[length // 2 :].tolist()))
    return samples


def write_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1024,
        vocab_size=VOCABULARY, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def time_trimtab(folder: Path, samples: list, words: str) -> float:
    from trimtab.cli.train_sft import main
    from trimtab.train.metrics import read_rows

    rows = [{"input": _text(p) + " ", "output": _text(c)} for p, c in samples]
    (folder / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    out = Path(tempfile.mkdtemp(dir=folder))
    code = main(
        f"--pretrain {folder} --dataset {folder}/train.jsonl --output_key output --input_template None --max_epochs 1 "
        f"--train_batch_size {BATCH} --max_len 520 --learning_rate 1e-4 --save_path {out} --ckpt_path {out}/ck {words}"
        .split()
    )  # fmt: skip
    assert code == 0
    timed = read_rows(out / "metrics.jsonl")[1:]
    return sum(r["tokens"] for r in timed) / sum(r["seconds"] for r in timed)


class StepClock(TrainerCallback):
    def __init__(self):
        self.times = []

    def on_step_end(self, *_, **__):
        self.times.append(time.monotonic())


def time_trl(folder: Path, samples: list, per_device: int, **settings) -> float:
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list(
        [{"input_ids": p + c + [2], "completion_mask": [0] * len(p) + [1] * (len(c) + 1)} for p, c in samples]
    )
    clock = StepClock()
    arguments = SFTConfig(
        tempfile.mkdtemp(dir=folder), per_device_train_batch_size=per_device, max_length=520,
        gradient_accumulation_steps=BATCH // per_device, num_train_epochs=1, learning_rate=1e-4,
        completion_only_loss=True, optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_steps=100,
        gradient_checkpointing=False, use_cpu=True, bf16=False, disable_tqdm=True, **settings,
    )  # fmt: skip
    model = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[clock])
    trainer.train()
    steps = len(samples) // BATCH
    tokens = sum(len(p) + len(c) + 1 for p, c in samples) * (len(clock.times) - 1) / steps
    return tokens / (clock.times[-1] - clock.times[0])


def _text(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    folder = Path(tempfile.mkdtemp())
    write_model(folder)
    samples = make_samples(steps)
    trl = {}
    for per_device, sampling in ((8, "random"), (2, "group_by_length"), (4, "group_by_length"), (8, "group_by_length")):
        name = f"TRL, micro-batch {per_device}, {sampling}"
        trl[name] = time_trl(folder, samples, per_device, train_sampling_strategy=sampling)
        print(f"{name:50s} {trl[name]:10,.0f} tokens/s", flush=True)
    ours = {}
    for budget in (1040, 2080, 4160):
        words = f"--packing_samples --train_max_tokens_per_gpu {budget}"
        ours[words] = time_trimtab(folder, samples, words)
        print(f"trimtab {words:42s} {ours[words]:10,.0f} tokens/s", flush=True)
    best = max(trl, key=trl.get)
    again = time_trl(folder, samples, int(best.split()[2].rstrip(",")), train_sampling_strategy=best.split()[-1])
    print(f"{best + ', again':50s} {again:10,.0f} tokens/s")
    peer = max(*trl.values(), again)
    print(f"ratio: {max(ours.values()) / peer:.2f} (best against best)")


if __name__ == "__main__":
    main()
