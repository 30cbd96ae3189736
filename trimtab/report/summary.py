"""A run in words: which options were chosen, what was trained, and what it achieved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from trimtab.config import jobs
from trimtab.config.objective_options import CALLED
from trimtab.config.option import options_of
from trimtab.report.charts import PASS, best_of, is_binary
from trimtab.report.formatting import duration, percent, plain, plural, short_name, short_number, sparkline
from trimtab.report.run_data import Point, RunData, finite

PLACES = {"save_path", "ckpt_path", "wandb_run_name"}
"""Where a run puts things and what it is called: different in every run, and no reason for a different result."""


def defaults_of(job: str) -> dict[str, Any]:
    """The job's defaults, as options.yaml writes them; empty for a job that this version does not know."""
    for known in vars(jobs).values():
        if isinstance(known, type) and getattr(known, "verb", None) == job:
            described = options_of(known)
            return {name: _as_written(option.default) for name, option in described.items()}
    return {}


def chosen_options(run: RunData) -> dict[str, Any]:
    """The options that are not at the job's default, in their order; also those the job does not know."""
    defaults = defaults_of(run.job)
    return {
        name: value
        for name, value in run.options.items()
        if name not in PLACES and (name not in defaults or not _equal(defaults[name], value))
    }


def differing_options(runs: Sequence[RunData]) -> list[str]:
    """Names of the options in which the runs differ, in their order: options that all of them have, as presets of one
    job do, and of the others the ones that the user set."""
    chosen = {name for run in runs for name in chosen_options(run)}
    first, *others = [run for run in runs if run.options] or runs
    shared = set(first.options).intersection(*(other.options for other in others)) - PLACES
    return [
        name
        for name in dict.fromkeys(name for run in runs for name in run.options)
        if name in chosen | shared
        and any(not _equal(first.options.get(name), other.options.get(name)) for other in others)
    ]


def _as_written(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _equal(one: Any, other: Any) -> bool:
    # YAML reads 1 where 1.0 was meant, and 1 is not True.
    return one == other and isinstance(one, bool) == isinstance(other, bool)


# ---- What RL achieved.


SUCCESS = "eval_pass_1"


@dataclass(frozen=True)
class Success:
    """What the policy scores on prompts of an evaluation, from before training (step 0) to the end."""

    points: list[Point]
    is_share: bool = True
    """Every score was 0 or 1, so that their mean is a rate of success; others are just scores."""
    which: str = "held-out"
    bounds: tuple[float, float] | None = None
    """The 95 % interval of the last one."""

    @property
    def name(self) -> str:
        return f"{self.which} {'success' if self.is_share else 'score'}"

    @property
    def interval(self) -> str:
        return " to ".join(map(self.shown, self.bounds)) if self.bounds else ""

    @property
    def before(self) -> float:
        return self.points[0][1]

    @property
    def after(self) -> float:
        return self.points[-1][1]

    def shown(self, value: float) -> str:
        return percent(value) if self.is_share else short_number(value)

    def picture(self) -> str:
        """One line for a terminal: 27 % ▂▄▆▇ 94 %."""
        values = [value for _, value in self.points]
        low, high = (0.0, 1.0) if self.is_share else (min(values), max(values))
        curve = sparkline(values, low, high) if high > low else "…"
        return f"{self.shown(self.before)} {curve} {self.shown(self.after)}"


def success_of(run: RunData) -> Success | None:
    """None where nothing was evaluated."""
    points = run.series(SUCCESS)
    if not points:
        return None
    low, high = run.last(f"{SUCCESS}_low"), run.last(f"{SUCCESS}_high")
    return Success(points, is_binary(run), run.held_out, None if low is None or high is None else (low, high))


def summary(run: RunData) -> str:
    """One or two sentences: success, reward, how far from the reference, time."""
    success, reward = success_of(run), run.change("reward")
    if not run.steps:
        return f"Before training, {success.name} is {success.shown(success.before)}." if success else ""
    told = []
    if success is not None and len(success.points) > 1:
        change = in_words(success.shown(success.before), success.shown(success.after), success.after - success.before)
        told.append(f"{success.name} {change}{f' (95 % interval {success.interval})' if success.interval else ''}")
    elif success is not None:
        told.append(f"{success.name} is {success.shown(success.after)}")
    sampled, teacher = run.ends("teacher_kl"), run.ends("teacher_kl") or run.ends("distance")
    if teacher is not None:
        told.append(f"the {'KL' if sampled else 'distance'} to the teacher {change_in_words(short_number, *teacher)}")
    if reward is not None and not run.options.get("replay") and (teacher is None or any(reward)):
        window = run.tenth("reward")
        over = f" (mean of the last {window})" if window > 1 else ""
        told.append(f"the mean reward {change_in_words(short_number, *reward)}{over}")
    first = " and ".join(told) or "training went on"
    first = f"{first[0].upper()}{first[1:]} in {plural(run.steps, run.unit)}"
    seconds = run.total("seconds")
    typical = [value for _, value in run.series("seconds")]
    spent = f" and {duration(seconds)} ({duration(median(typical))} a typical {run.unit})" if seconds > 0 else ""
    kl = run.ends("kl")
    moved = f" At the end the policy is {short_number(kl[1])} nats a token from its reference." if kl else ""
    recorded = " Rewards and answers are the recording's, not this model's." if run.options.get("replay") else ""
    return f"{first}{spent}.{moved}{recorded}"


def achieved(run: RunData) -> list[tuple[str, str, str]]:
    """The figures one asks for first: name, value, and what it was at the beginning."""
    figures = []
    success, reward = success_of(run), run.change("reward")
    if success is not None:
        before = f"from {success.shown(success.before)}" if len(success.points) > 1 else ""
        interval = f"95 %: {success.interval}" if success.interval else ""
        figures.append((success.name, success.shown(success.after), "; ".join(filter(None, (before, interval)))))
    for name in run.metrics:
        match = PASS.fullmatch(name)
        if success is not None and match and match["source"] is None and int(match["samples"]) > 1:
            first, *later = [success.shown(value) for _, value in run.series(name)]
            figures.append(
                (best_of(int(match["samples"])), later[-1] if later else first, f"from {first}" if later else "")
            )
    if reward is not None:
        figures.append(("mean reward", short_number(reward[1]), f"from {short_number(reward[0])} at first"))
    ages = [value for _, value in run.series("age")]
    if ages:
        largest = max((value for _, value in run.series("age_max")), default=max(ages))
        figures.append(("mean age in updates", short_number(fmean(ages)), f"at most {largest:.0f}{_bound(run)}"))
    return figures


def _bound(run: RunData) -> str:
    bound = run.options.get("async_staleness")
    return f"; bound: {bound}" if isinstance(bound, int) else ""


def change_in_words(shown: Callable[[float], str], before: float, after: float) -> str:
    return in_words(shown(before), shown(after), after - before)


def in_words(before: str, after: str, change: float) -> str:
    if before == after:
        return f"stayed at {after}"
    return f"{'rose' if change > 0 else 'fell'} from {before} to {after}"


# ---- What was trained, from what, on what, towards what.


JOB_NAMES = {
    "sft": "Supervised fine-tuning",
    "rm": "Reward model",
    "prm": "Process reward model",
    "dpo": "Preference optimisation",
    "kto": "Preference optimisation from single answers",
    "kd": "Distillation",
}


TAIL_METHODS = {
    "ppo": "PPO",
    "reinforce": "REINFORCE",
    "reinforce_transform": "REINFORCE with a transformed reward",
    "base_proposal": "RePULSe without a proposal",
    "repulse": "RePULSe",
}


def job_name(run: RunData) -> str:
    if run.is_rl:
        return f"Reinforcement learning ({_method(run)})"
    return JOB_NAMES.get(run.job, run.job)


def _method(run: RunData) -> str:
    """What the estimator says, for the name of the job is only a preset; of a tail run its method."""
    if run.job == "tail" and "method" in run.options:
        method = run.options["method"]
        return TAIL_METHODS.get(str(method), plain(method))
    chosen = run.options.get("advantage_estimator")
    return CALLED.get(str(chosen), plain(chosen)) if chosen is not None else run.job.upper()


def subject(run: RunData) -> str:
    return f"{short_name(run.options.get('pretrain'), 'a model')} → {short_name(str(run.folder.resolve()), 'run')}"


def lead(run: RunData) -> str:
    """One line under the headline."""
    parts = [f"on {_rows(run, 'dataset')}"]
    if run.rows:
        epochs = run.last("epoch")
        parts.append(plural(run.steps, run.unit) + (f", epoch {epochs:.3g}" if epochs is not None else ""))
    if "device" in run.manifest:
        dtype = run.manifest.get("dtype")
        parts.append(f"{plain(run.manifest['device'])}{f', {plain(dtype)}' if dtype is not None else ''}")
    return " · ".join(parts)


TAUGHT_BY = ("teacher_model", "teacher_prompt_key", "teacher_prompt_func")


def facts(run: RunData) -> list[tuple[str, str]]:
    """Name and value of each fact that is known."""
    options = run.options
    described = [
        ("from", options.get("pretrain")),
        ("on", _rows(run, "dataset") if options.get("dataset") or options.get("prompt_data") else None),
        ("environment", _environment(run)),
        ("evaluated on", _rows(run, "evaluation") if isinstance(run.data.get("evaluation"), dict) else None),
        ("learns", _objective(run)),
        ("teacher", options.get("teacher_model")),
        ("reward", _reward(run)),
        ("reference", _reference(run)),
        ("trained", _parameters(run)),
        ("exact", _exact(run)),
        (run.unit, _iteration(run) if run.is_rl else _step(run)),
    ]
    return [(name, plain(value)) for name, value in described if value]


def _exact(run: RunData) -> str | None:
    """Of bf16: whether layers run on the engine's kernels (--exact)."""
    if run.manifest.get("dtype") != "bfloat16" or "exact" not in run.manifest:
        return None
    return "engine and trainer have the same kernels" if run.manifest["exact"] else f"no: {run.manifest['not_exact']}"


def _rows(run: RunData, which: str) -> str:
    """How many rows of what; which: dataset or evaluation."""
    training = which == "dataset"
    data = run.data if training else run.data["evaluation"]
    name = "prompt_data" if run.is_rl else "dataset"
    listed = run.options.get(name if training else "eval_dataset") or (training and _environment(run))
    names = [short_name(name, "") for name in str(listed or "").split(",")]
    source = ", ".join(name for name in names if name)
    source = source or ("its data" if training else f"the test split of {_dataset_name(run)}")
    kept = finite(data.get("rows_kept"))
    return f"{short_number(kept)} {run.noun} of {source}" if kept is not None else source


def _environment(run: RunData) -> str | None:
    named = run.options.get("environment") or run.options.get("agent_func_path")
    return plain(named) if run.is_rl and named else None


def _dataset_name(run: RunData) -> str:
    listed = run.options.get("prompt_data" if run.is_rl else "dataset") or _environment(run)
    return short_name(str(listed or "").split(",")[0], "its data")


def _objective(run: RunData) -> str | None:
    options = run.options
    if run.job == "sft":
        return "every token of the text" if options.get("pretrain_mode") is True else "the answers, token by token"
    if run.job == "rm":
        margin = ", with margins" if options.get("margin_loss") is True else ""
        return f"which of two answers is better ({plain(options.get('loss', 'sigmoid'))} loss{margin})"
    if run.job == "prm":
        return "which steps of an answer are right"
    if run.job == "dpo":
        kind = str(options.get("preference_loss", "dpo"))
        smoothed = finite(options.get("label_smoothing"))
        name = (
            "cDPO"
            if kind == "dpo" and smoothed
            else {"simpo": "SimPO", "ipo_mean": "IPO over mean log-probabilities"}.get(kind, kind.upper())
        )
        return f"to prefer one answer to another: {name}{_beta(run)}"
    if run.job == "kto":
        return f"to give desirable answers: KTO{_beta(run)}"
    if run.job == "kd":
        return f"to answer as its teacher does: {plain(options.get('kd_loss', 'forward_kl')).replace('_', ' ')}, " + (
            f"weight {plain(options.get('kd_coef', 0.4))}"
        )
    if run.is_rl:
        taught = ", as its teacher would" if any(map(run.options.get, TAUGHT_BY)) else ""
        return f"to give answers of higher reward{taught}{_pushed(run)}: {_method(run)}"
    return None


def _pushed(run: RunData) -> str:
    """How hard bad answers are pushed down, where they are."""
    weight = run.last("kappa") if run.job == "tail" else None
    if weight is None:
        return ""
    beta = plain(run.options.get("target_dist_beta"))
    return f", and bad ones less often (weight {short_number(weight)}, beta {beta})"


def _reward(run: RunData) -> str | None:
    if not run.is_rl:
        return None
    if recording := run.options.get("replay"):
        return f"as recorded in {plain(recording)}"
    named = run.manifest.get("reward")
    if named:
        return plain(named)
    names = ("reward_pretrain", "reward_func", "remote_rm_url", "judge", "reward_verifier")
    sources = [run.options.get(name) for name in names]
    return ", ".join(plain(source) for source in sources if source)


def _beta(run: RunData) -> str:
    return f", beta {plain(run.options['beta'])}" if "beta" in run.options else ""


def _reference(run: RunData) -> str | None:
    if run.job == "dpo" and run.options.get("preference_loss") in ("orpo", "simpo"):
        return "none"
    if run.is_rl:
        return _kl(run)
    if run.job not in ("dpo", "kto"):
        return None
    return plain(run.options.get("ref_pretrain") or "the model as it was at the start")


def _kl(run: RunData) -> str | None:
    weight = finite(run.options.get("init_kl_coef"))
    if weight is None:
        return None
    if weight <= 0:
        return "none"
    place = "the loss" if run.options.get("use_kl_loss") is True else "the reward"
    target = finite(run.options.get("kl_target"))
    adapted = f", adapted towards {short_number(target)}" if target is not None else ""
    estimator = plain(run.options.get("kl_estimator", "k1"))
    return f"the model as it was at the start; KL ({estimator}) in {place}, weight {short_number(weight)}{adapted}"


def _parameters(run: RunData) -> str | None:
    whole, trained = finite(run.manifest.get("parameters")), finite(run.manifest.get("trainable_parameters"))
    if not whole or trained is None:
        return None
    if trained >= whole:
        return f"all {short_number(whole)} parameters"
    rank = finite(run.options.get("lora_rank"))
    adapters = f" (LoRA of rank {rank:.0f})" if rank else ""
    return f"{short_number(trained)} of {short_number(whole)} parameters, {percent(trained / whole, 2)}{adapters}"


def _step(run: RunData) -> str | None:
    size, rate = finite(run.options.get("train_batch_size")), finite(run.options.get("learning_rate"))
    if not size or rate is None:
        return None
    return f"{size:.0f} {run.noun}, learning rate {short_number(rate)}, {plain(run.options.get('lr_scheduler', ''))}"


def _iteration(run: RunData) -> str | None:
    names = (
        "rollout_batch_size",
        "n_samples_per_prompt",
        "generate_max_len",
        "train_batch_size",
        "actor_learning_rate",
    )
    prompts, samples, longest, batch, rate = (finite(run.options.get(name)) for name in names)
    if not prompts or not samples or not longest:
        return None
    told = f"{plural(int(prompts), 'prompt')}, {plural(int(samples), 'answer')} each of up to {longest:.0f} tokens"
    if batch:
        told += f"; learnt from {batch:.0f} answers at a time"
    return told + (f", learning rate {short_number(rate)}" if rate is not None else "")
