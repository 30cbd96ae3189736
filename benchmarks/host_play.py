"""What the host does for an episode's turn: 1,024 episodes of an environment, without the passes of a model.

    python benchmarks/host_play.py [--environment FILE:CLASS --tokenizer FOLDER --episodes 1024 --turns 4 --tokens 32]

The engine's graphs draw tokens that were made up before, and its prompts are read by nobody (host_cost.py): what is
left is sessions, pages, texts, templates, and environments in processes of their own. Told for one round after another:
seconds by the clock, CPU seconds of this process and of its listening thread among them, seconds in which it had
nothing to do but wait for environments, and milliseconds of CPU an episode's turn, here and where environments run.
Without --environment a game is played that takes no time and lasts as many turns as it is told to.

The goal is 0.2 ms a turn: 1,024 episodes that a model of 135 million parameters plays on an H200 need some tenths of a
second a turn on the device.
"""

import argparse
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import host_cost
import numpy as np
import torch
from host_cost import Captured, MadeUpGraphs, NothingRead, make_engine, no_logits
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trimtab.envs.environment_engine import EnvironmentEngine
from trimtab.envs.environment_pool import EnvironmentPool, SandboxLimits
from trimtab.envs.types import EpisodeSettings, Task
from trimtab.evaluate.interactive import tokenizer_of_a_person
from trimtab.rollout.builtin import engine as builtin_engine
from trimtab.rollout.builtin.cuda_graphs import DecodeGraphs
from trimtab.rollout.builtin.engine import Prefill
from trimtab.rollout.builtin.model_runner import ModelRunner
from trimtab.rollout.builtin.sampler import Sampler, SamplerOutput
from trimtab.rollout.sampling import SamplingParams

GAME = Path(__file__).resolve().with_name("told_game.py")


class Read(NothingRead):
    """How much is asked for, too."""

    sizes: ClassVar[list[tuple[int, int]]] = []

    def prefill(self, runner: object, prompts: list) -> torch.Tensor:
        self.sizes.append((len(prompts), sum(len(ids) - done for ids, done, _ in prompts)))
        return super().prefill(runner, prompts)


def nothing_read_on(reader: Prefill, sequences: list[tuple[list[int], int, list[int]]]) -> torch.Tensor:
    Read.sizes.append((len(sequences), sum(len(ids) - done for ids, done, _ in sequences)))
    return torch.zeros(len(sequences), 8)


@contextmanager
def nothing_computed(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    words = np.array(tokenizer.encode("I guess that it is \\boxed{7} and so I will try 12 again. "))
    rng = np.random.default_rng(0)

    class Playing(Captured):
        prefills = Read()

        def decode_graphs(self, cache, sampling: SamplingParams, longest: int) -> DecodeGraphs:
            if self.decodes is None or not self.decodes.holds(longest):
                self.decodes = None  # its memory first
                sampler = Sampler(sampling, len(tokenizer), torch.device("cpu"))
                self.decodes = MadeUpGraphs(sampler, cache, self.max_num_seqs, longest)
                drawn = rng.choice(words, size=self.decodes.tokens.shape)
                drawn[rng.random(drawn.shape) < 1 / 16] = tokenizer.eos_token_id
                self.decodes.tokens.copy_(torch.from_numpy(drawn))
                self.decodes.log_probs.uniform_(-3, 0)
            return self.decodes

    def first_token(sampler: Sampler, logits_BV, seeds_B, drawn_B, seen_BV) -> SamplerOutput:
        return SamplerOutput(torch.full_like(seeds_B, int(words[0])), torch.full(seeds_B.shape, -1.0), None)

    with (
        mock.patch.object(host_cost, "VOCABULARY", len(tokenizer)),
        mock.patch.object(builtin_engine, "GraphCache", Playing),
        mock.patch.object(Sampler, "draw", first_token),
        mock.patch.object(ModelRunner, "logits", no_logits),
        mock.patch.object(Prefill, "_prefill_eager", nothing_read_on),
    ):
        yield


def spent_by(pool: EnvironmentPool) -> float:
    """CPU seconds of its processes."""
    ticks = 0
    for worker in pool._pool._workers:
        with open(f"/proc/{worker.process.pid}/stat") as stat:
            ticks += sum(int(field) for field in stat.read().rpartition(")")[2].split()[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def play(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> None:
    os.environ["TOLD_GAME_TURNS"] = str(options.turns)
    source = options.environment or f"{GAME}:Game"
    pool = EnvironmentPool(source, SandboxLimits(workers=options.workers))
    groups = options.episodes // options.group
    rows: list[dict[str, Any]] = pool.rows(groups, 0) if pool.info.offers_rows else [{}] * groups
    tasks = [Task(row, 0, row + 1, columns=columns) for row, columns in enumerate(rows)]
    engine = EnvironmentEngine(
        make_engine(options.slots, 4096),
        pool,
        tokenizer,
        EpisodeSettings(max_turns=options.turns, episode_max_len=None),
    )
    sampling = SamplingParams(max_new_tokens=options.tokens, n=options.group, stop_token_ids=(tokenizer.eos_token_id,))
    waited, poll = 0.0, pool.poll
    clock = time.pthread_getcpuclockid(pool._pool._listener.ident)

    def listened() -> float:
        return time.clock_gettime(clock)

    def timed(seconds: float):
        nonlocal waited
        began = time.perf_counter()
        found = poll(seconds)
        waited += time.perf_counter() - began if seconds else 0.0
        return found

    pool.poll = timed  # type: ignore[method-assign]
    for number in range(options.rounds):
        Read.sizes.clear()
        waited, began, cpu, theirs, heard = 0.0, time.perf_counter(), time.process_time(), spent_by(pool), listened()
        rollouts = list(engine.stream([[1]] * groups, sampling, tasks=tasks))
        wall, cpu, theirs = time.perf_counter() - began, time.process_time() - cpu, spent_by(pool) - theirs
        heard = listened() - heard
        assert not any(rollout.episode.problem for rollout in rollouts)
        turns = sum(rollout.episode.logs["turns"] for rollout in rollouts)
        read = sum(tokens for _, tokens in Read.sizes)
        print(
            f"round {number}: {len(rollouts)} episodes, {turns:.0f} turns in {wall:.2f} s: CPU {cpu:.2f} s (listening "
            f"{heard:.2f} s), waiting {waited:.2f} s; {1e3 * cpu / turns:.3f} ms a turn, and "
            f"{1e3 * theirs / turns:.3f} ms where environments run; {len(Read.sizes)} reads of {read:,} tokens",
            flush=True,
        )
    engine.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {"episodes": 1024, "group": 16, "slots": 256, "turns": 4, "tokens": 32, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--environment", help="anything that trimtab grpo takes")
    parser.add_argument("--tokenizer", help="of a chat model; unset: one of bytes")
    options = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer) if options.tokenizer else tokenizer_of_a_person()
    gc.freeze()  # as a job does with what it imports
    with nothing_computed(tokenizer):
        play(options, tokenizer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
