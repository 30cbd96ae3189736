"""How cost grows with work: a table of figures, and a picture of them.

update    a pass of 65,536 packed tokens forward and backward, sequences of 512 to 16,384 tokens: microseconds a token,
          beside what the products alone would take (attention's share grows with the length, the rest does not)
rows      rollouts of 32 to 2,048 rows, 128 + 256 tokens: seconds, and what bytes and products allow
samples   512 answers to prompts of 512 tokens, 1 to 32 a prompt: a prompt is read once for all its samples

    python benchmarks/h200/cost.py picture.png [--shape 360M]
"""

import argparse
from pathlib import Path

import numpy as np
from runs import Bench, median, timed
from shapes import make_model
from update import gradients_of

from trimtab.data.batches import TokenBatch
from trimtab.models.compile import compile_layers
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams

Points = list[tuple[int, float, float]]  # x, measured, least


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("picture", type=Path)
    parser.add_argument("--shape", default="360M")
    parser.add_argument("--repeats", type=int, default=3, help="of a point, after a first that is not counted")


class Cost:
    def __init__(self, bench: Bench):
        self.bench, self.shape = bench, bench.shape(bench.arguments.shape)
        model = make_model(self.shape, bench.device)
        self.policy = Policy(model.float() if bench.tiny else model)
        choose_path(self.policy)
        self.draw = np.random.default_rng(0)

    def seconds(self, work) -> float:
        work()
        return median([timed(work, self.bench.device)[1] for _ in range(self.bench.arguments.repeats)])

    def say(self, what: str, x: int, seconds: float, least: float) -> tuple[int, float, float]:
        self.bench.row(f"cost of {what}", x=x, seconds=seconds, least=least, share=least / seconds)
        return x, seconds, least

    def updates(self) -> Points:
        """Microseconds a token."""
        tokens, lengths = (128, (16, 64)) if self.bench.tiny else (65_536, (512, 1024, 2048, 4096, 8192, 16_384))
        self.policy.train()
        if self.bench.device.type != "cpu":
            compile_layers(self.policy, gradients=lambda: gradients_of(self.policy))
        points = []
        for length in lengths:
            rows = [self.draw.integers(3, self.shape.vocab_size, length) for _ in range(tokens // length)]
            batch = TokenBatch.of([(ids, np.arange(length) > 0) for ids in rows]).to(self.bench.device)

            def work() -> None:
                self.policy.zero_grad(set_to_none=True)
                (-self.policy(batch).log_probs_N.mean()).backward()  # noqa: B023

            least = self.bench.rates.update(self.shape, [length] * (tokens // length), tokens)
            each = 1e6 / tokens
            points.append(self.say("update", length, self.seconds(work) * each, least * each))
        self.policy.zero_grad(set_to_none=True)
        self.policy.eval()
        return points

    def rollouts(self, what: str, cases: list[tuple[int, int, int, int, int]]) -> Points:
        """Seconds; a case: where it stands, prompts, samples a prompt, their tokens, new tokens."""
        slots = max(prompts * samples for _, prompts, samples, _, _ in cases)
        engine, points = BuiltinEngine(self.policy, max_num_seqs=slots), []
        for x, prompts, samples, tokens, new in cases:
            ids = self.draw.integers(3, self.shape.vocab_size, (prompts, tokens)).tolist()
            sampling = SamplingParams(max_new_tokens=new, n=samples)
            seconds = self.seconds(lambda: engine.generate(ids, sampling, seeds=range(len(ids))))  # noqa: B023
            rates = self.bench.rates
            least = rates.decoding(self.shape, prompts * samples, tokens, new)
            least += rates.update(self.shape, [tokens] * prompts, 0, passes=1.0)
            points.append(self.say(what, x, seconds, least))
        engine.sleep()
        return points


def draw(picture: Path, panels: dict[str, tuple[str, str, Points]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.2))
    for axis, (title, (x, y, points)) in zip(axes, panels.items()):
        places = [p[0] for p in points]
        axis.plot(places, [p[1] for p in points], "o-", color="#4477aa", label="measured")
        axis.plot(places, [p[2] for p in points], "--", color="#999999", label="what products and bytes allow")
        axis.set(title=title, xlabel=x, ylabel=y, xscale="log", ylim=(0, None))
        axis.set_xscale("log", base=2)
        axis.set_xticks(places, [f"{place:,}" for place in places], fontsize=7)
        axis.legend(fontsize=7, frameon=False)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)


def main(argv: list[str] | None = None) -> None:
    bench = Bench(__doc__, argv, options=options)
    cost, tiny, panels = Cost(bench), bench.tiny, {}
    with bench.attempt("update"):
        panels["an update"] = ("tokens of a sequence", "microseconds a token", cost.updates())
    with bench.attempt("rows"):
        rows = (2, 4) if tiny else (32, 64, 128, 256, 512, 1024, 2048)
        cases = [
            (n, n // 2 if tiny else n // 8, 2 if tiny else 8, 8 if tiny else 128, 6 if tiny else 256) for n in rows
        ]
        panels["a rollout"] = ("rows", "seconds", cost.rollouts("rows", cases))
    with bench.attempt("samples"):
        counts, answers = ((1, 2), 4) if tiny else ((1, 2, 4, 8, 16, 32), 512)
        cases = [(n, answers // n, n, 8 if tiny else 512, 6 if tiny else 128) for n in counts]
        panels[f"{answers} answers"] = ("samples a prompt", "seconds", cost.rollouts("samples", cases))
    draw(bench.arguments.picture, panels)


if __name__ == "__main__":
    main()
