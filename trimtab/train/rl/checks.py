"""Checks of an RL run: options and data refused before it starts, and alarms on the metrics of an iteration."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trimtab.config.data_options import FILE_TYPES, listed
from trimtab.config.rl_jobs import RLOptions, TailOptions
from trimtab.data.batches import SampleOrder
from trimtab.data.prompts import PromptDataset
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.launcher import Unit
from trimtab.distributed.ray.placement import RunPaths
from trimtab.errors import UserError
from trimtab.files import check_folder
from trimtab.models.load import fake_frozen_policy
from trimtab.models.lora import base_layer, refuse_adapted_experts
from trimtab.models.packed import PackedModel
from trimtab.models.parallel.sharded_model import check_parallel_options
from trimtab.models.policy import Policy, check_vocabularies
from trimtab.models.pretrained import check_model_folder
from trimtab.models.rotary import context_in_words, generated_context
from trimtab.rewards.models import same_tokenizer
from trimtab.train.launch import check_processes
from trimtab.train.rl.source import Recording
from trimtab.train.rl.teacher import TeacherPrompts

MUCH_KL = 1.0  # nats a token: the policy no longer resembles the reference
LITTLE_ENTROPY = 0.1  # of the entropy in the first iteration
NEARLY_ALL = 0.9  # of the way from the worst reward to the best: low entropy is then no alarm
MANY_TRUNCATED = 0.5
MUCH_GAP = 0.05  # nats, mean over tokens
RATIO_OFF = 0.02
MANY_CORRECTED = 0.2  # of the tokens
MANY_FAILURES = 0.5  # of the tool calls
MANY_CUT_OFF = 0.5  # of the episodes
MANY_EMPTY = 0.5  # of the samples
OLD_IN_A_ROW = 3  # consecutive iterations at the staleness bound


def alarms(row: dict, first_entropy: float, at_bound: int = 0) -> Iterator[str]:
    """Alarms of an iteration's row; `first_entropy`: of the first iteration, in nats a token; `at_bound`: the number of
    consecutive iterations whose oldest answers were at the staleness bound."""
    # A teacher says something of every token, so equal rewards of answers are normal.
    taught = "teacher_kl" in row or "distance" in row
    if row["reward_std"] == 0 and not taught:
        yield "all rewards are equal: there is nothing to learn from; look at the reward and at a few answers"
    elif row["equal_groups"] == 1 and not taught:
        yield "in every group all rewards are equal: no answer is better than its neighbours; vary prompts or sampling"
    if row.get("kl", 0.0) > MUCH_KL:
        yield f"KL to the reference is {row['kl']:.2f} nats a token: raise --init_kl_coef or lower the learning rate"
    solved = row["reward"] >= row["reward_min"] + NEARLY_ALL * (row["reward_max"] - row["reward_min"])
    if first_entropy > 0 and row["sampled_entropy"] < LITTLE_ENTROPY * first_entropy and not solved:
        yield (
            f"entropy has fallen to {row['sampled_entropy']:.3f} from {first_entropy:.3f} nats a token: all answers "
            "become alike; try --entropy_loss_coef or a higher --temperature"
        )
    if (cut := row.get("finish/length", row["truncated"])) > MANY_TRUNCATED:
        yield f"{cut:.0%} of the answers end at --generate_max_len: raise it, or reward shorter ones"
    gap, ratio = row.get("log_prob_gap", 0.0), row.get("log_prob_ratio", 1.0)
    older = "age" in row  # sampled by older weights: a gap is expected, except on tokens of the current weights
    if (fresh := row.get("log_prob_gap_fresh", 0.0)) > MUCH_GAP:
        yield (
            f"sampled and trained log-probs of the same weights drift apart (mean difference {fresh:.3f} nats): the "
            "weights that write are not those that are trained"
        )
    elif not older and (gap > MUCH_GAP or abs(ratio - 1) > RATIO_OFF):
        yield (
            f"sampled and trained log-probs drift apart (mean difference {gap:.3f} nats, mean ratio {ratio:.3f}): "
            "what is sampled is not what is trained"
        )
    elif (corrected := row.get("corrected_share", 0.0)) > MANY_CORRECTED:
        why = "answers are old for a policy that moves so fast; lower --async_staleness or the learning rate"
        yield (
            f"{corrected:.0%} of the tokens are weighed by a tenth or more: "
            f"{why if older else 'what is sampled is not what is trained'}"
        )
    yield from _episode_alarms(row)
    if at_bound >= OLD_IN_A_ROW:
        yield (
            f"in {at_bound} iterations running the oldest answers were {row['age_max']:.0f} iterations old, the most "
            "that --async_staleness allows: learning waits for them; raise it, or look at what makes them slow"
        )


def _episode_alarms(row: dict) -> Iterator[str]:
    if (empty := row.get("empty_samples", 0)) > MANY_EMPTY * row.get("samples", 0):
        yield (
            f"{empty:.0f} of {row['samples']} samples have no token that the model drew: they teach nothing; look at "
            "what ends them before the first turn"
        )
    if failed := row.get("failed_episodes", 0):
        yield f"{failed:.0f} episodes failed, retries and all, and their groups are left out: look at the environment"
    if failed := row.get("failed_rewards", 0):
        yield f"{failed:.0f} groups are left out since a reward failed, retries and all: look at the judge"
    calls, failures = row.get("tool_calls", 0.0), row.get("tool_failures", 0.0)
    if calls and failures > MANY_FAILURES * calls:
        yield f"{failures / calls:.0%} of the tool calls failed: look at a few episodes and at what the tools expect"
    cut_off = {"turns": "--max_turns", "context": "--episode_max_len"}
    for end, option in cut_off.items():
        if (share := row.get(f"finish/{end}", 0.0)) > MANY_CUT_OFF:
            yield f"{share:.0%} of the episodes end at {option}: raise it, or reward shorter ones"


# ---- checks before anything slow is done


def check_shares(options: RLOptions, units: Iterable[Unit]) -> None:
    """Refuse models that cannot be split over their processes, whose number an outside launcher may have chosen."""
    for unit in units:
        if unit.apart:
            continue
        assert unit.ranks is not None, f"{unit.name} is in no processes yet"
        try:
            check_processes(options, len(unit.ranks), learns=unit.learns)
        except UserError as error:
            raise error if unit.name == "actor" else UserError(f"{error} (of the {unit.name})") from None


def check_model(model: PackedModel, options: RLOptions, stores: dict[str, PromptDataset]) -> None:
    """Refuse a model that this job cannot train."""
    config, name = model.config.get_text_config(), type(model.inner).__name__
    if options.uses_vllm and options.lora_rank > 0:
        refuse_adapted_experts(model, "cannot be sent to vLLM")
    check_context(model, options, max(int(store.lengths.max()) for store in stores.values()))
    largest = max(int(store.largest_token) for store in stores.values())
    if largest >= config.vocab_size:
        raise UserError(
            f"--pretrain {options.pretrain}: its tokenizer made token {largest} of the data, but the model "
            f"knows only {config.vocab_size} tokens; copy the model's own tokenizer there"
        )
    if options.aux_loss_coef > 0 and not hasattr(model.config, "num_experts_per_tok"):
        raise UserError(f"--aux_loss_coef {options.aux_loss_coef}: {name} has no experts; drop it")


def check_context(model: PackedModel, options: RLOptions, prompt: int) -> None:
    """Refuse answers to a prompt of this many tokens that are longer than the model's context."""
    room, name, longest = generated_context(model.config), type(model.inner).__name__, prompt + options.generate_max_len
    if options.plays:
        check_episodes(options, room, name)
    elif room is not None and longest > room:
        raise UserError(
            f"--generate_max_len {options.generate_max_len}: with the longest prompt that is {longest} tokens, but "
            f"{name} has {context_in_words(model.config)}; lower it, or --prompt_max_len"
        )


def check_episodes(options: RLOptions, room: int | None, name: str) -> None:
    """Refuse episodes longer than the model's context of `room` tokens (None: unknown), or shorter than one turn."""
    longest = options.episode_max_len
    assert longest is not None, "settled"
    if room is not None and longest > room:
        raise UserError(f"--episode_max_len {longest}: {name} has a context of {room} tokens; lower it")
    if longest <= options.generate_max_len:
        raise UserError(
            f"--generate_max_len {options.generate_max_len}: one turn alone would fill the {longest} tokens of an "
            "episode; lower it"
        )


def check_drop_last(order: SampleOrder, options: RLOptions) -> None:
    """Refuse --drop_last where it would drop all prompts."""
    if not order.samples_per_epoch:
        raise UserError(
            f"--drop_last leaves out all {order.samples} prompts: they do not fill an iteration, which takes "
            f"{order.multiple}; lower --rollout_batch_size"
        )


def check_teacher(options: RLOptions, tokenizer: Any, policy: Policy, store: PromptDataset) -> TeacherPrompts | None:
    """Refuse a teacher with another tokenizer, because it scores the policy's token ids, and one whose distributions or
    prompts cannot be used. Returns the prompts that it reads, if they are not the policy's."""
    teacher, name = policy, options.teacher_model
    if name is not None:
        if not _reads_tokens(name, "--teacher_model", options, tokenizer):
            raise UserError(f"--teacher_model {name}: its tokenizer is not --pretrain's; use one that is")
        teacher = fake_frozen_policy(name, "--teacher_model")
    if options.teaches_vocabulary:
        check_vocabularies(policy, teacher, tokenizer, name)
        if options.teacher_ema and base_layer(policy.head) is not policy.head:
            raise UserError("--teacher_ema: the LM head has an adapter; leave it out of --target_modules")
    if not options.teacher_prompt_key and not options.teacher_prompt_func:
        return None
    return TeacherPrompts(options, store, tokenizer, generated_context(teacher.config))


def critic_start(options: RLOptions, tokenizer: Any) -> tuple[str, str | None]:
    """The model that initializes the critic, and a note on the choice. It must share the policy's tokenizer."""
    if name := options.critic_pretrain:
        if not _reads_tokens(name, "--critic_pretrain", options, tokenizer):
            raise UserError(f"--critic_pretrain {name}: its tokenizer is not --pretrain's; use one that is")
        return name, None
    reward = first_reward(options)
    if reward is None or _reads_tokens(reward, "--reward_pretrain", options, tokenizer):
        return reward or options.pretrain, None
    return options.pretrain, f"the critic starts from the policy: {reward} has another tokenizer"


def first_reward(options: RLOptions) -> str | None:
    """The name of the first reward model, if any."""
    return options.reward_pretrain.split(",")[0].strip() if options.reward_pretrain else None


def _reads_tokens(name: str, flag: str, options: RLOptions, tokenizer: Any) -> bool:
    """Whether the model `name` has the policy's tokenizer."""
    theirs = load_tokenizer(name, disable_fast=options.disable_fast_tokenizer, flag=flag)
    return name == options.pretrain or same_tokenizer(tokenizer, theirs)


def check_places(options: RLOptions) -> None:
    """Check that the models exist, that they can be split as asked, and that the output folders can be written."""
    models: list[tuple[str, str | None]] = [("pretrain", options.pretrain)]
    models += [("critic_pretrain", options.critic_pretrain), ("teacher_model", options.teacher_model)]
    models += [("reward_pretrain", name.strip()) for name in (options.reward_pretrain or "").split(",")]
    for flag, name in models:
        if name:
            check_model_folder(name, f"--{flag}")
            check_parallel_options(name, options, f"--{flag}")
    for flag, place in places_written(options).items():
        check_folder(flag, Path(place))
    if options.record and not options.load_checkpoint and (recording := Recording.of(options)):
        recording.check_empty()


def places_written(options: RLOptions) -> dict[str, str]:
    """The folders that a run writes to, by option."""
    places = {"save_path": options.save_path, "ckpt_path": options.ckpt_path, "record": options.record}
    places["judge_cache"] = options.judge_cache and str(Path(options.judge_cache).parent)
    places |= {"use_tensorboard": options.use_tensorboard, "use_visualdl": options.use_visualdl}
    if isinstance(options, TailOptions):
        places |= {"save_info_path": options.save_info_path, "negdata_path": options.negdata_path}
    return {flag: place for flag, place in places.items() if place}


# ---- paths for the preflight check of a cluster


SHARED = ("save_path", "ckpt_path")


def locations_of(options: RLOptions) -> RunPaths:
    written = places_written(options) | {"ckpt_path": options.checkpoint_folder}
    return RunPaths(
        read=[(flag, path) for flag, path in _named_sources(options) if os.path.exists(os.path.expanduser(path))],
        written=[(flag, path) for flag, path in written.items() if flag not in SHARED],
        shared=[(flag, written[flag]) for flag in SHARED],
    )


def _named_sources(options: RLOptions) -> Iterator[tuple[str, str]]:
    """Models, data and code that the options name: local paths and hub names alike."""
    models = {"pretrain": options.pretrain, "critic_pretrain": options.critic_pretrain}
    models |= {"teacher_model": options.teacher_model, "reward_pretrain": options.reward_pretrain}
    for flag, names in models.items():
        yield from ((flag, name) for name in listed(names))
    data = {"prompt_data": options.prompt_data, "eval_dataset": options.eval_dataset}
    data |= {"pretrain_data": options.pretrain_data, "replay": options.replay}
    if isinstance(options, TailOptions):
        data["heldout_prompt_data"] = options.heldout_prompt_data
    for flag, sources in data.items():
        for source in listed(sources):
            kind, _, folder = source.partition("@")
            yield flag, folder if kind in FILE_TYPES and folder else source
    functions = {"reward_func": options.reward_func, "remote_rm_url": options.remote_rm_url}
    functions |= {"agent_func_path": options.agent_func_path, "teacher_prompt_func": options.teacher_prompt_func}
    for flag, files in functions.items():
        for file in listed(files):
            yield flag, file[: file.rfind(".py") + 3]  # a function's name may follow
