"""What was trained, from what, on what, towards what: the facts of a run in words."""

from __future__ import annotations

from trimtab.config.estimators import CALLED
from trimtab.report.numbers import percent, plain, plural, short_name, short_number
from trimtab.report.read import Run, finite

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


def job_name(run: Run) -> str:
    if run.is_rl:
        return f"Reinforcement learning ({_method(run)})"
    return JOB_NAMES.get(run.job, run.job)


def _method(run: Run) -> str:
    """What the estimator says, for the name of the job is only a preset; of a tail run its method."""
    if run.job == "tail" and "method" in run.options:
        method = run.options["method"]
        return TAIL_METHODS.get(str(method), plain(method))
    chosen = run.options.get("advantage_estimator")
    return CALLED.get(str(chosen), plain(chosen)) if chosen is not None else run.job.upper()


def subject(run: Run) -> str:
    return f"{short_name(run.options.get('pretrain'), 'a model')} → {short_name(str(run.folder.resolve()), 'run')}"


def lead(run: Run) -> str:
    """One line under the headline."""
    parts = [f"on {_rows(run, 'dataset')}"]
    if run.rows:
        epochs = run.last("epoch")
        parts.append(plural(run.steps, run.unit) + (f", epoch {epochs:.3g}" if epochs is not None else ""))
    if "device" in run.manifest:
        dtype = run.manifest.get("dtype")
        parts.append(f"{plain(run.manifest['device'])}{f', {plain(dtype)}' if dtype is not None else ''}")
    return " · ".join(parts)


def facts(run: Run) -> list[tuple[str, str]]:
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
        (run.unit, _iteration(run) if run.is_rl else _step(run)),
    ]
    return [(name, plain(value)) for name, value in described if value]


def _rows(run: Run, which: str) -> str:
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


def _environment(run: Run) -> str | None:
    named = run.options.get("environment") or run.options.get("agent_func_path")
    return plain(named) if run.is_rl and named else None


def _dataset_name(run: Run) -> str:
    listed = run.options.get("prompt_data" if run.is_rl else "dataset") or _environment(run)
    return short_name(str(listed or "").split(",")[0], "its data")


def _objective(run: Run) -> str | None:
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
        taught = ", as its teacher would" if run.options.get("teacher_model") else ""
        return f"to give answers of higher reward{taught}{_pushed(run)}: {_method(run)}"
    return None


def _pushed(run: Run) -> str:
    """How hard bad answers are pushed down, where they are."""
    weight = run.last("kappa") if run.job == "tail" else None
    if weight is None:
        return ""
    beta = plain(run.options.get("target_dist_beta"))
    return f", and bad ones less often (weight {short_number(weight)}, beta {beta})"


def _reward(run: Run) -> str | None:
    if not run.is_rl:
        return None
    if recording := run.options.get("replay"):
        return f"as recorded in {plain(recording)}"
    named = run.manifest.get("reward")
    if named:
        return plain(named)
    sources = [run.options.get(name) for name in ("reward_pretrain", "reward_func", "remote_rm_url", "reward_verifier")]
    return ", ".join(plain(source) for source in sources if source)


def _beta(run: Run) -> str:
    return f", beta {plain(run.options['beta'])}" if "beta" in run.options else ""


def _reference(run: Run) -> str | None:
    if run.job == "dpo" and run.options.get("preference_loss") in ("orpo", "simpo"):
        return "none"
    if run.is_rl:
        return _kl(run)
    if run.job not in ("dpo", "kto"):
        return None
    return plain(run.options.get("ref_pretrain") or "the model as it was at the start")


def _kl(run: Run) -> str | None:
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


def _parameters(run: Run) -> str | None:
    whole, trained = finite(run.manifest.get("parameters")), finite(run.manifest.get("trainable_parameters"))
    if not whole or trained is None:
        return None
    if trained >= whole:
        return f"all {short_number(whole)} parameters"
    rank = finite(run.options.get("lora_rank"))
    adapters = f" (LoRA of rank {rank:.0f})" if rank else ""
    return f"{short_number(trained)} of {short_number(whole)} parameters, {percent(trained / whole, 2)}{adapters}"


def _step(run: Run) -> str | None:
    size, rate = finite(run.options.get("train_batch_size")), finite(run.options.get("learning_rate"))
    if not size or rate is None:
        return None
    return f"{size:.0f} {run.noun}, learning rate {short_number(rate)}, {plain(run.options.get('lr_scheduler', ''))}"


def _iteration(run: Run) -> str | None:
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
