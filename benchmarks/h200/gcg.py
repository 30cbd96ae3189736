"""Seconds of a GCG step against nanogcg, in one run: 135M, 512 candidates, a suffix of 20 tokens, a target of 32.

Both search from the same suffix with the same settings (256 promising tokens, 1 replaced, ids filtered through text).
nanogcg hands its kept keys and values over in a form that transformers 5 no longer takes, so it searches without them
(use_prefix_cache=False); of 8 goal tokens that is a tenth of its work. Each side is timed by the difference between
searches of two lengths, so that what a search begins with is left out.

    python benchmarks/h200/gcg.py
"""

import argparse

from limits import forward_products
from runs import Bench, median, timed
from shapes import make_texts

GOAL, SUFFIX, TARGET = 8, 20, 32


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="135M")
    parser.add_argument("--width", type=int, default=512)


def searches_of_ours(bench: Bench, goal: str, suffix: str, wanted: str, width: int):
    from trimtab.data.tokenizer import load_tokenizer
    from trimtab.evaluate.gcg_attack import AttackPrompts, Search, SearchSettings, SuffixLoss, Target, Vocabulary
    from trimtab.models.policy import Policy
    from trimtab.models.selfcheck import choose_path

    tokenizer = load_tokenizer(str(bench.model(bench.arguments.shape)))
    policy = Policy(model_of(bench))
    choose_path(policy)
    prompts = AttackPrompts(tokenizer)
    loss = SuffixLoss(policy, prompts.around(Target(goal + " ", " " + wanted)))
    vocabulary = Vocabulary(tokenizer, bench.shape(bench.arguments.shape).vocab_size)

    def search(steps: int) -> list[float]:
        work = Search(loss, vocabulary, SearchSettings(steps=steps, width=width))
        state = work.begin(prompts.encode(suffix))
        while not work.done(state):
            work.advance(state)
        return state.losses

    return search


def searches_of_nanogcg(bench: Bench, goal: str, suffix: str, wanted: str, width: int):
    import nanogcg
    from transformers import PreTrainedTokenizerFast

    tokenizer, model = PreTrainedTokenizerFast.from_pretrained(bench.model(bench.arguments.shape)), model_of(bench)

    def search(steps: int) -> list[float]:
        settings = nanogcg.GCGConfig(
            num_steps=steps, optim_str_init=suffix, search_width=width, use_prefix_cache=False, seed=0,
            verbosity="ERROR", add_space_before_target=True,
        )  # fmt: skip
        return nanogcg.run(model, tokenizer, goal + " ", wanted, settings).losses

    return search


def model_of(bench: Bench):
    import torch
    from transformers import LlamaForCausalLM

    kind = torch.float32 if bench.tiny else torch.bfloat16
    return LlamaForCausalLM.from_pretrained(bench.model(bench.arguments.shape), dtype=kind).to(bench.device).eval()


def step_seconds(search, bench: Bench) -> tuple[float, list[float]]:
    few, many = (1, 3) if bench.tiny else (1, 7)
    search(few)
    taken = []
    for _ in range(2):
        short = timed(lambda: search(few), bench.device)[1]
        losses, long = timed(lambda: search(many), bench.device)
        taken.append((long - short) / (many - few))
    return median(taken), losses


def main(argv: list[str] | None = None) -> None:
    bench = Bench(__doc__, argv, options=options)
    name, width = bench.arguments.shape, 8 if bench.tiny else bench.arguments.width
    shape = bench.shape(name)
    goal, suffix, wanted = (make_texts(1, n, shape, seed)[0] for seed, n in enumerate((GOAL, SUFFIX, TARGET)))
    candidates = forward_products(shape, [SUFFIX + TARGET] * width, width * TARGET)
    gradient = 3 * forward_products(shape, [GOAL + SUFFIX + TARGET], TARGET)
    least, found = (candidates + gradient) / bench.rates.products, {}
    for who, searches in (("trimtab", searches_of_ours), ("nanogcg", searches_of_nanogcg)):
        if (bench.with_us, bench.with_peer)[who == "nanogcg"]:
            with bench.attempt(who):
                found[who], losses = step_seconds(searches(bench, goal, suffix, wanted, width), bench)
                bench.say(f"{who}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
                bench.row(f"GCG {name}, {width} candidates", who=who, seconds=found[who], share=least / found[who])
    if len(found) == 2:
        bench.say(f"{found['nanogcg'] / found['trimtab']:.2f} times as fast as nanogcg")


if __name__ == "__main__":
    main()
