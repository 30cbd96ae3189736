"""What Python costs in a GRPO step of 2,048 answers of 1,024 tokens: every part of it, without the passes of a model.

    python benchmarks/host_cost.py [--answers 2048 --tokens 1024 --prompt 128 --group 8 --against FOLDER]

The engine's graphs draw nothing and its prompts are read by nobody: what is left is what the host does, from sessions
and their bookkeeping to micro-batches ready for attention, the figures of an iteration and the answers that are kept.
CPU seconds of each part, the best of some rounds, and microseconds a drawn token. `--against` runs the same parts of
another checkout right before. `--device`: where micro-batches go.

The goal is 2 % of a step: a model of 360 million parameters needs about 26 s on one H200, so 0.25 microseconds a token.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trimtab.config.rl_jobs import GRPOOptions
from trimtab.data.batches import TokenBatch, pack
from trimtab.data.dataset import TokenDataset
from trimtab.distributed.launcher import InProcessGroup
from trimtab.models.attention import PackedRow
from trimtab.models.policy import Policy
from trimtab.rewards.requests import PromptBatch
from trimtab.rewards.types import RewardResult
from trimtab.rollout.builtin import engine as builtin_engine
from trimtab.rollout.builtin.cuda_graphs import DecodeGraphs
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.builtin.model_runner import ModelRunner
from trimtab.rollout.builtin.sampler import Sampler, SamplerOutput
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.rl import rollout_files
from trimtab.train.rl.async_worker import GroupScorer
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.micro_batches import MicroBatcher, batches_of, mini_batches, totals_of, with_advantage
from trimtab.train.rl.rollout_files import Spans
from trimtab.train.rl.rollout_worker import RewardClock, SampleScorer
from trimtab.train.rl.state import Counters, Iteration, row_of
from trimtab.train.rl.token_advantages import compute_advantages

VOCABULARY = 32_000
PASS_TOKENS = 32_768
SIZES = {"answers": 2048, "tokens": 1024, "prompt": 128, "group": 8}
COLUMNS = ("advantages_N", "sampled_N", "old_N")


class Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began


# ---- an engine that draws nothing


class NoGraph:
    def pool(self) -> None: ...

    def replay(self) -> None: ...


class MadeUpGraphs(DecodeGraphs):
    def _capture(self, *arguments: object) -> NoGraph:
        return NoGraph()


class NothingRead:
    def prefill(self, runner: object, prompts: list) -> torch.Tensor:
        return torch.zeros(len(prompts), 8)


class Captured:
    """In the place of captured graphs; the tokens that their steps leave behind were drawn before."""

    possible, prefills, state_bytes = True, NothingRead(), 0

    def __init__(self, policy: Policy, max_num_seqs: int, *, possible: bool, recurrent: bool):
        self.policy, self.max_num_seqs = policy, max_num_seqs
        self.decodes: DecodeGraphs | None = None

    def follow(self, cache: object, *, fused: bool, state_rows: int) -> None: ...

    def state_rows(self, samples: int) -> int:
        return 0

    def state_sequences(self, samples: int) -> int:
        return 0

    def decode_graphs(self, cache, sampling: SamplingParams, longest: int) -> DecodeGraphs:
        if self.decodes is None:
            self.decodes = MadeUpGraphs(
                Sampler(sampling, VOCABULARY, torch.device("cpu")), cache, self.max_num_seqs, longest
            )
            self.decodes.tokens.random_(1000, VOCABULARY)
            self.decodes.log_probs.uniform_(-3, 0)
        return self.decodes


def no_logits(runner: ModelRunner, hidden_ND: torch.Tensor) -> torch.Tensor:
    return hidden_ND


def first_token(sampler: Sampler, logits_BV, seeds_B, drawn_B, seen_BV) -> SamplerOutput:
    return SamplerOutput(torch.full_like(seeds_B, 1000), torch.full(seeds_B.shape, -1.0), None)


@contextmanager
def nothing_computed() -> Iterator[None]:
    with (
        mock.patch.object(builtin_engine, "GraphCache", Captured),
        mock.patch.object(Sampler, "draw", first_token),
        mock.patch.object(ModelRunner, "logits", no_logits),
    ):
        yield


def make_engine(slots: int, longest: int) -> BuiltinEngine:
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=VOCABULARY, max_position_embeddings=longest))
    return BuiltinEngine(Policy(model), max_num_seqs=slots)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words of the length that BPE has, decoded as bytes, as most tokenizers do."""
    words = [f"\u0120{number:05d}"[: 2 + number % 5] + f"{number:x}" for number in range(VOCABULARY)]
    core = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


# ---- roles that learn nothing


class Listener:
    def __init__(self, device: torch.device, clock: Clock):
        self.device, self.clock = device, clock

    def take(self, slices, **settings: object) -> list[torch.Tensor]:
        found = []
        for batch in batches_of(slices):
            moved = batch.to(self.device)
            prepared(moved)
            found.append(torch.zeros(moved.trained_tokens))
        return found


def prepared(batch: TokenBatch) -> None:
    """What a forward pass asks of a batch before the model runs, where attention is of sequences of any length."""
    PackedRow.of(batch.spans, batch.ids_T.device)


class Reward:
    name, concurrent = "reward", True

    def __call__(self, request) -> RewardResult:
        return RewardResult(np.random.default_rng(len(request)).random(len(request)).tolist())

    def close(self) -> None: ...


# ---- the parts of a step


def measure(options: argparse.Namespace) -> dict[str, float]:
    clock, device, groups = Clock(), torch.device(options.device), options.answers // options.group
    settings = GRPOOptions(
        rollout_batch_size=groups, n_samples_per_prompt=options.group, train_batch_size=options.answers,
        generate_max_len=options.tokens, prompt_max_len=options.prompt, use_dynamic_batch=True,
        train_max_tokens_per_gpu=PASS_TOKENS,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    ids = rng.integers(1000, VOCABULARY, (groups, options.prompt)).tolist()
    texts = [""] * groups
    questions = PromptBatch(list(range(groups)), list(range(groups)), ids, "input", texts, texts, texts, [{}] * groups)
    tokenizer, engine = make_tokenizer(), make_engine(options.answers, options.prompt + options.tokens)
    sampling = SamplingParams(max_new_tokens=options.tokens, n=options.group)
    list(engine.stream(ids, sampling))  # takes its memory
    with clock.part("engine"):
        rollouts = list(engine.stream(ids, sampling, seeds=questions.seeds))
    rollouts.sort(key=lambda rollout: (rollout.prompt, rollout.sample))
    several = SampleScorer([(Reward(), 1.0)], questions, tokenizer, RewardClock())
    several(rollouts[:1])  # learns the tokenizer's words, once in a run
    with clock.part("texts for a reward"):
        several(rollouts)
    with clock.part("one experience of all"):
        experience = Experience.of([r.prompt for r in rollouts], rollouts)
        experience = Experience.joined([experience])
        experience = experience.take(experience.samples_of(range(groups)))
        experience.reward(RewardResult(rng.random(options.answers).tolist()))
    passes, actor = MicroBatcher(settings), InProcessGroup("actor", Listener(device, clock), SimpleNamespace())
    with clock.part("scoring, one column"):
        passes.fill(experience, "old_N", actor, "take")
    with clock.part("advantages"):
        figures = compute_advantages(experience, settings, 0.0)
        learnt = with_advantage(experience, mini_batches(experience, groups, (0, 0, 0))[0])
        totals_of(experience, learnt)
    with clock.part("an update's passes"):
        passes.send(actor, "take", passes.parts(actor, experience, learnt, *COLUMNS))
    with clock.part("figures and answers kept"):
        row_of(Iteration(experience, groups, figures), Counters(0.0))
        rollout_files.best_and_worst(experience, 8)
        rollout_files.whole_groups(experience, 1, 1)
    with clock.part("one experience a group (async)"):
        one_by_one(rollouts, questions, options.group, tokenizer)
    with clock.part("SFT, as many tokens packed"):
        supervised(experience, device)
    return clock.seconds


def one_by_one(rollouts: list[Trajectory], questions: PromptBatch, size: int, tokenizer) -> None:
    judging, kept = GroupScorer([], tokenizer, Spans(), RewardClock()), []
    for place in range(len(questions.rows)):
        own = rollouts[place * size : (place + 1) * size]
        alone = [dataclasses.replace(rollout, prompt=0) for rollout in own]
        judging.submit(place, questions.take(place), alone)
        kept += judging.take()[0]
    Experience.joined([finished.experience for finished in kept])
    judging.close()


def supervised(experience: Experience, device: torch.device) -> None:
    offsets = np.concatenate([[0], experience.sequence_lengths_S.cumsum(0).numpy()])
    store = TokenDataset(experience.ids_T.numpy(), experience.drawn_T.numpy(), offsets, fingerprint="none")
    for part in pack(store.lengths.tolist(), PASS_TOKENS):
        prepared(TokenBatch.of([store.example(i) for i in part]).to(device))


# ---- a table


def best(options: argparse.Namespace) -> dict[str, float]:
    with nothing_computed():
        found = [measure(options) for _ in range(options.rounds)]
    return {name: min(round_[name] for round_ in found) for name in found[0]}


def elsewhere(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    sizes = [word for name in (*SIZES, "device", "rounds") for word in (f"--{name}", str(getattr(options, name)))]
    command = [sys.executable, str(Path(__file__).resolve()), *sizes, "--json"]
    known = [str(folder.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(known)}
    found = subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(found.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--json", action="store_true", help="nothing but the seconds")
    options = parser.parse_args(arguments)
    before = {} if options.against is None else elsewhere(options.against, options)
    found = best(options)
    if options.json:
        print(json.dumps(found))
        return
    tokens = options.answers * options.tokens
    print(f"{options.answers:,} answers of {options.tokens:,} tokens, passes of {PASS_TOKENS:,} tokens")
    print("| part | " + ("before, s | " if before else "") + "s | microseconds a token |")
    print("|---|" + "---|" * (3 if before else 2))
    for name, spent in found.items():
        earlier = f"{before[name]:.3f} | " if before else ""
        print(f"| {name} | {earlier}{spent:.3f} | {spent / tokens * 1e6:.3f} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
