"""RePULSe's commands, read as `trimtab tail`, and the names of its runs.

Six flags of the original together select a method. Here that is one name, and this file is where they meet. What the
original has and no method of ours means is refused; flags that it shares with us pass through as they are. The grammar
of run names is RePULSe's, so that files of both can lie side by side.
"""

import os
import re
import zlib
from collections.abc import Sequence

from trimtab.config.parser import option_name, parse
from trimtab.config.rl_jobs import TailOptions
from trimtab.config.rl_options import MODULATIONS, PUSHING
from trimtab.errors import UserError

SINGLE_PROMPT = "This man is a"
_MARKS = {
    *("do_harmlessness_training", "harmlessness_training_loss_type", "parameterization", "actor_loss_type"),
    *("duplicate_rollout_batch_by", "base_actor_learning_rate"),
}
"""Flags that OpenRLHF's train_ppo does not have: one of them makes a command RePULSe's."""
_PROPOSALS = {"policy_psi_q_p_s_t": "model", **{name: name for name in MODULATIONS}}
_LOSSES = ("ctl", "ctl_nosecondterm")
# (--harmlessness_training_loss_type, whether the reward is transformed, whether the policy is the proposal) -> method
_METHODS: dict[tuple[str | None, bool, bool], str] = {
    ("reinforce", False, False): "reinforce",
    ("reinforce", True, False): "reinforce_transform",
    ("neg_training", False, True): "base_proposal",
    ("neg_training", False, False): "repulse",
}
_RENAMED = {
    "duplicate_rollout_batch_by": "n_samples_per_prompt",
    "threshold": "bad_threshold",
}
_WITHOUT_EFFECT = ("test_info_every", "n_seeds_f_q", "no_test_info")
"""Flags that do nothing in the original."""
_UNNAMED = {
    "push_down_scale": "pd",
    "token_reduction": "tr",
    "reinforce_baseline_type": "bl",
    "reinforce_hardcoded_baseline": "hb",
    "proposal_lora_rank": "pl",
    "proposal_updates": "pu",
    "reward_input": "rm",
}
"""Options of the method that the original's names do not tell of, and what stands for them in ours: short, as a
file's name has at most 255 characters."""

Flags = dict[str, list[str]]  # name without dashes -> the words that follow it


def is_repulse(words: Sequence[str]) -> bool:
    """Whether a command of train_ppo is one of RePULSe's."""
    return any(word.startswith("--") and option_name(word) in _MARKS for word in words)


def in_words_of_tail(words: Sequence[str]) -> list[str]:
    """The same command for `trimtab tail`."""
    flags = _flags(words)
    for name in _WITHOUT_EFFECT:
        flags.pop(name, None)
    kind = _value(flags, "rm_type") or "rlhf"
    if kind != "rlhf":
        raise UserError(f"--rm_type {kind}: the only potential here is rlhf, exp(beta reward)")
    method = _method(flags)
    flags = {"method": [method], **flags}
    if method != "ppo":
        _translate_pair(flags)
    elif "target_dist_beta" in flags:
        raise UserError("--target_dist_beta: PPO has no target distribution; leave it out")
    if _switch(flags, "new_custom_single_prompt"):
        flags["single_prompt"] = [SINGLE_PROMPT]
    _prompts_to_answers(flags)
    for name, ours in _RENAMED.items():
        if name in flags:
            flags[ours] = flags.pop(name)
    return _words(_in_folder_of_run(flags))


def run_name(options: TailOptions) -> str:
    """What the original calls a run of these options; its files and checkpoints carry it.

    Settings that the original does not have, or does not tell apart, stand before the seed.
    """
    ppo, pushes = options.method == "ppo", options.method in PUSHING
    beta: float | int = float(options.target_dist_beta)
    if ppo:  # which has none: 1 / init_kl_coef in three decimals, or the integer 10000
        beta = round(1 / options.init_kl_coef, 3) if options.init_kl_coef else 10000
    proposals = {ours: theirs for theirs, ours in _PROPOSALS.items()}
    parameterization = "policy" if ppo else proposals[options.proposal]
    parts = ["rlhf", *(["baseprop"] if options.method == "base_proposal" else [])]
    parts += [abbreviated(place) for place in (options.pretrain, _reward(options) or "", options.prompt_data)]
    parts += [f"len{options.generate_max_len}", f"kl{float(options.init_kl_coef)}"]
    if pushes and options.start_target_dist_beta is not None:
        parts.append(f"start{float(options.start_target_dist_beta)}")
    parts.append(f"beta{beta}")
    if not ppo:
        parts += ["harml", "neg_training" if pushes else "reinforce"]
        if pushes and options.start_alpha is not None:
            parts.append(f"start{float(options.start_alpha)}")
        alpha = float(options.alpha)
        parts.append(f"a{alpha}rta{alpha}_b{beta}" if options.method == "reinforce_transform" else f"a{alpha}")
    parts += [parameterization, "ppo" if ppo else options.proposal_loss]
    parts += [f"epo{options.max_epochs}", f"epi{options.num_episodes}", f"sch{options.lr_scheduler}"]
    if ppo:
        parts += [f"alr{float(options.actor_learning_rate)}", f"clr{float(options.critic_learning_rate)}", "clossmse"]
    else:
        parts += [f"alr{float(options.proposal_learning_rate)}", f"blr{float(options.actor_learning_rate)}"]
    return "_".join([*parts, parameterization, *_unnamed(options), f"s{options.seed}"])


def abbreviated(place: str) -> str:
    """`owner/SmolLM-135M-Instruct` as Sm13In: the first two characters of each word of the last part of a path."""
    last = place.rstrip("/").rsplit("/", 1)[-1]
    return "".join(piece[:2] for piece in re.split("[-_]", last))


def _unnamed(options: TailOptions) -> list[str]:
    """What else makes a run learn something else: two such runs in one folder must not overwrite each other."""
    values = {short: getattr(options, name) for name, short in _UNNAMED.items() if options.changed(name)}
    if options.method == "reinforce_transform" and options.reward_transform == "minus_alpha_ind":
        values["ind"] = options.bad_threshold
    if options.single_prompt not in (None, SINGLE_PROMPT):
        values["sp"] = zlib.crc32(options.single_prompt.encode())
    return [f"{short}{abbreviated(value) if isinstance(value, str) else value}" for short, value in values.items()]


# ---- which method


def _method(flags: Flags) -> str:
    """The one name for the six flags, which are taken out."""
    paired = _switch(flags, "do_harmlessness_training")
    parameterization, actor_loss = _value(flags, "parameterization"), _value(flags, "actor_loss_type")
    loss = _value(flags, "harmlessness_training_loss_type")
    transformed, own_answers = "reward_transform" in flags, _switch(flags, "use_base_as_proposal")
    if actor_loss == "ppo" or parameterization == "policy":
        if (actor_loss, parameterization) != ("ppo", "policy") or paired or loss or transformed or own_answers:
            raise UserError(
                "--actor_loss_type ppo, --parameterization policy and no --do_harmlessness_training, loss type, reward "
                "transform or base proposal go together: that is PPO"
            )
        return "ppo"
    if not paired:
        raise UserError(
            "--do_harmlessness_training is missing: a proposal alone, without a policy, is not trained here"
        )
    if parameterization not in _PROPOSALS:
        raise UserError(f"--parameterization {parameterization}: it must be policy or one of {', '.join(_PROPOSALS)}")
    if actor_loss not in _LOSSES:
        raise UserError(f"--actor_loss_type {actor_loss}: it must be ppo or one of {', '.join(_LOSSES)}")
    method = _METHODS.get((loss or "", transformed, own_answers))
    if method is None:
        raise UserError(
            f"--harmlessness_training_loss_type {loss}{' with --reward_transform' * transformed}"
            f"{' with --use_base_as_proposal' * own_answers} is none of the methods: reinforce, with or without "
            "--reward_transform, or neg_training, with or without --use_base_as_proposal"
        )
    flags |= {"proposal": [_PROPOSALS[parameterization]], "proposal_loss": [actor_loss]}
    return method


# ---- what is named otherwise, or counted otherwise


def _translate_pair(flags: Flags) -> None:
    """A policy and a proposal: the original's actor is the proposal."""
    for name, what in (("target_dist_beta", "beta of the target distribution"), ("alpha", "its weight")):
        if name not in flags:
            raise UserError(f"--{name} is missing: give {what}")
    flags.pop("critic_learning_rate", None)
    if not _switch(flags, "anneal_target_dist_beta"):
        for name in ("start_target_dist_beta", "start_alpha"):
            flags.pop(name, None)
    # Without the flag the original subtracts nothing.
    flags.setdefault("reinforce_baseline_type", ["none"])
    for theirs, ours in (
        ("actor_learning_rate", "proposal_learning_rate"),
        ("base_actor_learning_rate", "actor_learning_rate"),
        ("num_episodes", "proposal_updates"),
        ("harmlessness_training_num_episodes", "num_episodes"),
        ("save_steps_harmless", "save_steps"),  # a checkpoint holds policy and proposal
    ):
        if (given := flags.pop(theirs, None)) is not None and (ours != "save_steps" or given != ["-1"]):
            flags[ours] = given


def _prompts_to_answers(flags: Flags) -> None:
    """The original counts scoring passes in prompts, and duplicates prompts itself."""
    if flags.pop("n_samples_per_prompt", ["1"]) != ["1"]:
        raise UserError("--n_samples_per_prompt must be 1 in this spelling: --duplicate_rollout_batch_by says how many")
    try:
        prompts, group = (int(flags[name][0]) for name in ("micro_rollout_batch_size", "duplicate_rollout_batch_by"))
    except (KeyError, IndexError, ValueError):
        return  # one is not given, or parsing will refuse it
    flags["micro_rollout_batch_size"] = [str(prompts * group)]


def _in_folder_of_run(flags: Flags) -> Flags:
    """Runs of all methods and seeds share the original's folders: here each has its own in there, under its name."""
    options = parse(TailOptions, _words(flags))
    if not (options.pretrain and options.prompt_data and _reward(options)):
        return flags  # checks will say so
    suffix = "_actor" if options.method == "ppo" else "_harml_actor"
    folder = os.path.join(options.ckpt_path or "./ckpt/checkpoints_tail", run_name(options) + suffix)
    places = {"negdata_path": options.save_path, "save_path": folder, "ckpt_path": os.path.join(folder, "checkpoints")}
    return flags | {name: [place] for name, place in places.items()}


def _reward(options: TailOptions) -> str | None:
    return next(iter(options.named_rewards), None)


# ---- words


def _flags(words: Sequence[str]) -> Flags:
    flags: Flags = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name = option_name(word)
            flags[name] = word.split("=", 1)[1:]
        elif name is None:
            raise UserError(f"unexpected {word!r}: every value follows its option")
        else:
            flags[name].append(word)
    return flags


def _words(flags: Flags) -> list[str]:
    return [word for name, values in flags.items() for word in (f"--{name}", *values)]


def _value(flags: Flags, name: str) -> str | None:
    """The one value of a flag, which is taken out."""
    values = flags.pop(name, None)
    if values is not None and len(values) != 1:
        raise UserError(f"--{name} takes one value")
    return values[0] if values else None


def _switch(flags: Flags, name: str) -> bool:
    """Whether a switch is on, which is taken out."""
    values = flags.pop(name, None)
    return values is not None and values[:1] not in (["False"], ["false"])
