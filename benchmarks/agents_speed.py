"""Seconds of a GRPO step with an environment of several turns against TRL, in one run on this machine's CPU.

The model is that of sft_speed.py in size: a Llama of 4 layers, 256 wide, random fp32 weights, with a tokenizer whose
single tokens are whole tool calls and an output layer that draws one of them at every sixth place and ends a turn at
every sixteenth, so that without any training an episode has a few turns. A number is to be guessed by a tool; the
environment is one class in TRL's shape, given to both. 4 prompts of 8 episodes, at most 6 turns, one update a step, no
KL, temperature 1, fused AdamW. Both draw episodes of their own, so seconds are also told by drawn token. `--wait`: how
long a call of the tool takes. TRL is tried at several micro-batches, with its own generation; its best counts. Of its
time the first step is left out, as of ours.

    python benchmarks/agents_speed.py
    python benchmarks/agents_speed.py --wait 0.05
"""

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from sft_speed import StepClock
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

PROMPTS, EPISODES, TURNS, TURN_TOKENS, TOKENS = 4, 8, 6, 64, 448
NUMBERS = 24
END, START = "<|im_end|>", "<|im_start|>"
QUESTION = f"Find my number from 1 to {NUMBERS}."
ENVIRONMENT = '''
import time


class Guess:
    def reset(self, **row):
        self.number, self.found = int(row["label"]), False

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: From 1 to {numbers}.
        """
        time.sleep({wait})
        self.found = self.found or number == self.number
        return "found" if number == self.number else "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        return float(self.found)
'''


def template() -> str:
    """One of TRL's own: its trainer parses the tool calls of those that it knows."""
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()


def write_model(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [template(), ENVIRONMENT, QUESTION], trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet)
    )
    calls = [
        f'<tool_call>\n{{"name": "guess", "arguments": {{"number": {number}}}}}\n</tool_call>'
        for number in range(1, NUMBERS + 1)
    ]
    tokenizer.add_special_tokens([START, END, "<|endoftext|>"])
    tokenizer.add_tokens([AddedToken(call, normalized=False) for call in calls])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token="<|endoftext|>", chat_template=template()
    )
    made.save_pretrained(folder)
    end, size = made.convert_tokens_to_ids(END), len(made)
    config = LlamaConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1024,
        vocab_size=size, max_position_embeddings=1024, pad_token_id=made.pad_token_id, bos_token_id=None,
        eos_token_id=end,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    shares = torch.full((size,), (1 - 1 / 16 - 1 / 6) / (size - NUMBERS - 3))
    shares[[made.convert_tokens_to_ids(call) for call in calls]] = 1 / 6 / NUMBERS
    shares[end] = 1 / 16
    shares[[made.convert_tokens_to_ids(START), made.pad_token_id]] = 1e-9
    with torch.no_grad():  # one direction of the stream is the same for all tokens, and carries what is drawn how often
        model.model.embed_tokens.weight[:, 0] = 1.0
        common = model.model(torch.randint(size, (1, 256))).last_hidden_state[..., 0].mean()
        model.lm_head.weight[:, 0] = shares.log() / common
    model.save_pretrained(folder)


def make_rows(steps: int) -> list[dict]:
    rng = np.random.default_rng(0)
    question = [{"role": "user", "content": QUESTION}]
    return [{"prompt": question, "label": str(n)} for n in rng.integers(1, NUMBERS + 1, steps * PROMPTS)]


def time_trimtab(folder: Path, rows: list[dict]) -> tuple[float, float]:
    """Seconds of a step, and of a drawn token."""
    from trimtab.cli.train_grpo import main
    from trimtab.train.metrics import read_rows

    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = Path(tempfile.mkdtemp(dir=folder))
    words = (
        f"--pretrain {folder} --prompt_data {folder}/rows.jsonl --input_key prompt --label_key label "
        f"--agent_func_path {folder}/environment.py:Guess --max_turns {TURNS} --generate_max_len {TURN_TOKENS} "
        f"--prompt_max_len 512 --rollout_batch_size {PROMPTS} --n_samples_per_prompt {EPISODES} "
        f"--train_batch_size {PROMPTS * EPISODES} --use_dynamic_batch --init_kl_coef 0 --actor_learning_rate 1e-6 "
        f"--save_path {out} --ckpt_path {out}/ck"
    )
    assert main(words.split()) == 0
    found = read_rows(out / "metrics.jsonl")[1:]
    seconds, drawn = (float(np.mean([row[name] for row in found])) for name in ("seconds", "length"))
    for phase in ("rollout", "update"):
        print(f"    {phase:10s}{np.mean([row[f'seconds_{phase}'] for row in found]):8.2f} s")
    print(f"    turns     {np.mean([row['turns'] for row in found]):8.2f}")
    print(f"    drawn     {drawn:8.1f} tokens an episode", flush=True)
    return seconds, seconds / (drawn * PROMPTS * EPISODES)


def time_trl(folder: Path, rows: list[dict], per_device: int) -> tuple[float, float]:
    """The same; what was drawn is counted where the trainer makes its mask of it."""
    from trl import GRPOConfig, GRPOTrainer

    clock, drawn = StepClock(), []

    class Counting(GRPOTrainer):
        def _generate(self, *given, **more):
            found = super()._generate(*given, **more)
            masks = next(part for part in found if part and isinstance(part[0], list) and set(part[0]) <= {0, 1})
            drawn.append(sum(map(sum, masks)))
            return found

    arguments = GRPOConfig(
        tempfile.mkdtemp(dir=folder), per_device_train_batch_size=per_device, num_generations=EPISODES,
        gradient_accumulation_steps=PROMPTS * EPISODES // per_device, max_completion_length=TOKENS,
        max_tool_calling_iterations=TURNS - 1, num_train_epochs=1, learning_rate=1e-6, beta=0.0, temperature=1.0,
        top_k=0, loss_type="bnpo", optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_steps=100,
        shuffle_dataset=False, gradient_checkpointing=False, use_cpu=True, bf16=False, disable_tqdm=True,
    )  # fmt: skip
    specification = importlib.util.spec_from_file_location("environment", folder / "environment.py")
    environment = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(environment)
    trainer = Counting(
        LlamaForCausalLM.from_pretrained(folder),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
        environment_factory=environment.Guess,
        callbacks=[clock],
    )
    trainer.train()
    seconds = (clock.times[-1] - clock.times[0]) / (len(clock.times) - 1)
    return seconds, seconds / np.mean(drawn[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--wait", type=float, default=0.0, help="seconds that a call of the tool takes")
    parser.add_argument("--micro_batches", type=int, nargs="+", default=[8, 32])
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    folder, rows = Path(tempfile.mkdtemp()), make_rows(options.steps)
    write_model(folder)
    (folder / "environment.py").write_text(
        ENVIRONMENT.replace("{wait}", str(options.wait)).replace("{numbers}", str(NUMBERS))
    )
    found = {}
    for per_device in options.micro_batches:
        found[per_device] = time_trl(folder, rows, per_device)
        print(f"TRL, micro-batch {per_device:<8d}{told(found[per_device])}", flush=True)
    ours = time_trimtab(folder, rows)
    print(f"trimtab                  {told(ours)}", flush=True)
    best = min(found.values(), key=lambda times: times[1])
    print(f"ratio: {best[0] / ours[0]:.2f} of a step, {best[1] / ours[1]:.2f} of a drawn token (TRL's best over ours)")


def told(times: tuple[float, float]) -> str:
    return f"{times[0]:8.2f} s a step {times[1] * 1e3:8.2f} ms a drawn token"


if __name__ == "__main__":
    main()
