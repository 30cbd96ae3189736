"""What Ray costs: seconds of a GRPO iteration on Ray against the same processes under one launcher, in one run.

A controller without a model and two processes that train, on this machine's CPU, both ways one after the other and
again the other way round. The model is tiny, so that what is measured is the talk between the processes: calls, their
arguments and answers, waits. A launcher's processes talk over gloo, Ray's over its own calls. Start-up is not counted;
it is told beside it.

    python benchmarks/ray_cost.py
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sft_speed import VOCABULARY
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ITERATIONS, PROMPTS, SAMPLES, NEW_TOKENS = 12, 4, 4, 16
WAYS = {
    "one launcher": "--nproc 3 --controller_apart",
    "Ray": "--ray --actor_num_gpus_per_node 2",
}
PARTS = ("seconds", "seconds_rollout", "seconds_update")


def write_task(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    ).save_pretrained(folder)  # fmt: skip
    prompts = [{"input": " ".join(f"w{3 + (7 * n + k) % 90}" for k in range(8))} for n in range(ITERATIONS * PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


def time_way(folder: Path, flags: str) -> tuple[dict[str, float], float]:
    """Median seconds of an iteration and its parts, and of everything else."""
    from trimtab.train.metrics import read_rows

    out = Path(tempfile.mkdtemp(dir=folder))
    words = (
        f"grpo --pretrain {folder} --prompt_data {folder}/prompts.jsonl --reward_verifier length(0-8) "
        f"--prompt_max_len 16 --generate_max_len {NEW_TOKENS} --rollout_batch_size {PROMPTS} "
        f"--n_samples_per_prompt {SAMPLES} --train_batch_size {PROMPTS * SAMPLES} --init_kl_coef 0.01 "
        f"--actor_learning_rate 1e-6 --save_path {out} --ckpt_path {out}/ck {flags}"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "trimtab.cli.main", *words.split()],
        check=True,
        stdout=subprocess.DEVNULL,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    whole = time.monotonic() - began
    rows = read_rows(out / "metrics.jsonl")[1:]
    return {part: statistics.median(row[part] for row in rows) for part in PARTS}, whole - sum(
        row["seconds"] for row in rows
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_task(folder)
        taken: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for order in (list(WAYS), list(WAYS)[::-1]):
            for way in order:
                found, rest = time_way(folder, WAYS[way])
                taken[way].append(found)
                told = "  ".join(f"{part.removeprefix('seconds_')} {found[part]:.3f} s" for part in PARTS)
                print(f"{way:14s}{told}  start and end {rest:.1f} s", flush=True)
        # The quicker of two runs: another program on the machine can only make one slower.
        seconds = {way: min(found["seconds"] for found in runs) for way, runs in taken.items()}
        print(f"an iteration on Ray takes {seconds['Ray'] / seconds['one launcher']:.2f} of one launcher's time")


if __name__ == "__main__":
    main()
