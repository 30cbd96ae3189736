"""What an update of packed rows takes beside its matrix products alone: share of the measured matrix rate.

One pass forward and backward with every token trained, sequences of 640 tokens in a row; layers as they are and
compiled, in one process. The optimiser's step is left out (once a step, not a pass).

    python benchmarks/h200/update.py [--shape 360M] [--tokens 65536]
"""

import argparse

import numpy as np
import torch
from runs import Bench, median, timed
from shapes import Shape, make_model

from trimtab.data.batches import TokenBatch
from trimtab.models.compile import compile_layers, disable_compile
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="360M")
    parser.add_argument("--tokens", type=int, nargs="*", default=[65_280])
    parser.add_argument("--length", type=int, default=640)


def main(argv: list[str] | None = None) -> None:
    bench = Bench(__doc__, argv, options=options)
    arguments, shape = bench.arguments, bench.shape(bench.arguments.shape)
    model = make_model(shape, bench.device).train()
    policy = Policy(model.float() if bench.tiny else model)
    choose_path(policy)
    for tokens in [96] if bench.tiny else arguments.tokens:
        length = 32 if bench.tiny else arguments.length
        lengths = [length] * (tokens // length)
        with bench.attempt(f"{tokens} tokens"):
            disable_compile(policy)
            measure(bench, policy, shape, lengths, "plain layers")
            if bench.device.type != "cpu":
                trial = compile_layers(policy, gradients=lambda: gradients_of(policy))
                bench.say(f"compiled in {trial.seconds:.1f} s {trial.problem}")
                if not trial.problem:
                    measure(bench, policy, shape, lengths, "compiled layers")


def gradients_of(policy: Policy) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    policy.zero_grad(set_to_none=True)
    return found


def measure(bench: Bench, policy: Policy, shape: Shape, lengths: list[int], layers: str) -> None:
    draw = np.random.default_rng(0)
    rows = [(draw.integers(3, shape.vocab_size, n), np.arange(n) >= 1) for n in lengths]
    batch = TokenBatch.of(rows).to(bench.device)

    def work() -> None:
        policy.zero_grad(set_to_none=True)
        (-policy(batch).log_probs_N.mean()).backward()

    first = timed(work, bench.device)[1]
    seconds = median([timed(work, bench.device)[1] for _ in range(1 if bench.tiny else 5)])
    with torch.no_grad():
        forward = median([timed(lambda: policy(batch), bench.device)[1] for _ in range(1 if bench.tiny else 5)])
    least = bench.rates.update(shape, lengths, sum(lengths))
    bench.row(
        f"update {bench.arguments.shape}, {sum(lengths):,} tokens", who=f"trimtab, {layers}", seconds=seconds,
        share=least / seconds, first=first, forward=forward, forward_share=least / 3 / forward,
    )  # fmt: skip


if __name__ == "__main__":
    main()
