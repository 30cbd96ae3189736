"""`trimtab VERB ...`: finds the module of the verb and hands it the rest."""

import difflib
import importlib
import sys
from collections.abc import Sequence

import trimtab
from trimtab.cli.run import guarded
from trimtab.config.aliases import VERBS as VERBS_OF_OTHERS

VERBS: dict[str, tuple[str, str]] = {
    "quickstart": ("trimtab.cli.quickstart", "train a tiny model on this machine and look at what it learnt"),
    "tour": ("trimtab.cli.tour", "the quickstart, then reward model, PPO, DPO and KTO on the same task, compared"),
    "sft": ("trimtab.cli.train_sft", "supervised fine-tuning"),
    "rm": ("trimtab.cli.train_rm", "reward model, from pairs of answers"),
    "prm": ("trimtab.cli.train_prm", "process reward model, from answers judged step by step"),
    "dpo": ("trimtab.cli.train_dpo", "preference optimisation from pairs: DPO, IPO, cDPO, ORPO, SimPO"),
    "kto": ("trimtab.cli.train_kto", "preference optimisation from single judged answers"),
    "kd": ("trimtab.cli.train_kd", "distillation from a teacher model"),
    "ppo": ("trimtab.cli.train_ppo", "RL with a critic (PPO)"),
    "grpo": ("trimtab.cli.train_grpo", "RL by comparing the answers to a prompt (GRPO)"),
    "dapo": ("trimtab.cli.train_dapo", "GRPO that clips higher and samples on past groups that teach nothing (DAPO)"),
    "reinforce": ("trimtab.cli.train_reinforce", "RL without a critic (REINFORCE++)"),
    "rloo": ("trimtab.cli.train_rloo", "RL against the mean of a prompt's other answers (RLOO)"),
    "rl": ("trimtab.cli.train_rl", "RL of any kind, as a config file says"),
    "tail": ("trimtab.cli.train_tail", "RL that makes rare bad answers rarer (RePULSe and its baselines)"),
    "generate": ("trimtab.cli.batch_inference", "answers to many prompts, and their scores"),
    "play": ("trimtab.cli.play", "an environment, played by you or by a model, as training sees it"),
    "chat": ("trimtab.cli.interactive_chat", "a conversation with a model"),
    "lora-combine": ("trimtab.cli.lora_combiner", "merge a LoRA adapter into its model"),
    "serve": ("trimtab.cli.serve", "a model as an HTTP server that other projects' clients accept"),
    "serve-rm": ("trimtab.cli.serve_rm", "a reward model, a process reward model or a verifier as an HTTP server"),
    "kk-data": ("trimtab.cli.kk_data", "knights-and-knaves puzzles as rows of PaddleNLP's recipe"),
    "attack": ("trimtab.cli.attack", "search for suffixes that make a model misbehave (GCG)"),
    "plot": ("trimtab.cli.plot", "draw curves and frontiers of several runs"),
    "plan": ("trimtab.cli.plan", "what memory and time a training job needs, on this device or another"),
    "jobs": ("trimtab.cli.jobs", "write Slurm or shell files for a command over seeds"),
    "report": ("trimtab.cli.report", "turn a run's metrics into a page to look at"),
    "watch": ("trimtab.cli.watch", "a run while it works, or after: in the terminal, or as a live page"),
    "compare": ("trimtab.cli.compare", "judge whether two runs are the same training on two devices"),
}


def main(argv: Sequence[str] | None = None) -> int:
    typed = list(sys.argv[1:] if argv is None else argv)
    if not typed or typed[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if typed[0] == "--version":
        print(f"trimtab {trimtab.__version__}")
        return 0
    verb = typed[0]
    if verb not in VERBS:
        print(f"trimtab: error: {_unknown(verb)}", file=sys.stderr)
        return 2
    return guarded(f"trimtab {verb}", lambda: importlib.import_module(VERBS[verb][0]).main(typed[1:]))


def _help() -> str:
    verbs = "\n".join(f"  {verb:<14}{line}" for verb, (_, line) in VERBS.items())
    return (
        f"{trimtab.__doc__}\n\nusage: trimtab VERB [option ...]\n       trimtab --version\n\n{verbs}\n\n"
        "trimtab VERB --help lists a verb's options most used, trimtab VERB --help all every one."
    )


def _unknown(verb: str) -> str:
    if verb in VERBS_OF_OTHERS:
        return f"unknown verb {verb!r}; {VERBS_OF_OTHERS[verb]} is what does this here"
    close = difflib.get_close_matches(verb.removeprefix("train_"), VERBS, n=1, cutoff=0.5)
    hint = f"did you mean trimtab {close[0]}?" if close else f"the verbs are {', '.join(VERBS)}"
    return f"unknown verb {verb!r}; {hint}"


if __name__ == "__main__":
    raise SystemExit(main())
