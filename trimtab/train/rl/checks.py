"""What is refused of an RL run before anything slow is done, in one line each."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trimtab.config.jobs import RLOptions, TailOptions
from trimtab.data.order import SampleOrder
from trimtab.data.prompts import PromptStore
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.launcher import Unit
from trimtab.errors import UserError
from trimtab.files import check_folder
from trimtab.models.packed import PackedModel
from trimtab.models.parallel.sharded_model import check_parallel_options
from trimtab.models.pretrained import check_model_folder
from trimtab.models.rotary import context_in_words, generated_context
from trimtab.rewards.models import same_tokenizer
from trimtab.train.launch import check_share
from trimtab.train.rl.recording import Recording


def check_shares(options: RLOptions, units: Iterable[Unit]) -> None:
    """Refuse models that cannot be shared out among their processes. Whoever starts these does not know the options."""
    for unit in units:
        if unit.apart:
            continue
        assert unit.ranks is not None, f"{unit.name} is in no processes yet"
        try:
            check_share(options, len(unit.ranks), learns=unit.learns)
        except UserError as error:
            raise error if unit.name == "actor" else UserError(f"{error} (of the {unit.name})") from None


def check_model(model: PackedModel, options: RLOptions, stores: dict[str, PromptStore]) -> None:
    """Refuse a model this job cannot train, in one line."""
    config, name = model.config.get_text_config(), type(model.inner).__name__
    prompt = max(int(store.lengths.max()) for store in stores.values())
    longest = prompt + options.generate_max_len
    room = generated_context(model.config)
    if options.plays:
        check_episodes(options, room, name)
    elif room is not None and longest > room:
        raise UserError(
            f"--generate_max_len {options.generate_max_len}: with the longest prompt that is {longest} tokens, but "
            f"{name} has {context_in_words(model.config)}; lower it, or --prompt_max_len"
        )
    largest = max(int(store.largest_token) for store in stores.values())
    if largest >= config.vocab_size:
        raise UserError(
            f"--pretrain {options.pretrain}: its tokenizer made token {largest} of the data, but the model "
            f"knows only {config.vocab_size} tokens; copy the model's own tokenizer there"
        )
    if options.aux_loss_coef > 0 and not hasattr(model.config, "num_experts_per_tok"):
        raise UserError(f"--aux_loss_coef {options.aux_loss_coef}: {name} has no experts; drop it")


def check_episodes(options: RLOptions, room: int | None, name: str) -> None:
    """Of a model with a context of so many tokens, if that is known."""
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
    """Refuse to leave out everything."""
    if not order.samples_per_epoch:
        raise UserError(
            f"--drop_last leaves out all {order.samples} prompts: they do not fill an iteration, which takes "
            f"{order.multiple}; lower --rollout_batch_size"
        )


def check_teacher(options: RLOptions, tokenizer: Any) -> None:
    """A teacher judges the policy's tokens, so they must mean the same to it."""
    assert options.teacher_model is not None
    if not _reads_tokens(options.teacher_model, "--teacher_model", options, tokenizer):
        raise UserError(f"--teacher_model {options.teacher_model}: its tokenizer is not --pretrain's; use one that is")


def critic_start(options: RLOptions, tokenizer: Any) -> tuple[str, str | None]:
    """The model that the critic starts from, and what there is to say of the choice. It reads the policy's tokens."""
    if name := options.critic_pretrain:
        if not _reads_tokens(name, "--critic_pretrain", options, tokenizer):
            raise UserError(f"--critic_pretrain {name}: its tokenizer is not --pretrain's; use one that is")
        return name, None
    reward = first_reward(options)
    if reward is None or _reads_tokens(reward, "--reward_pretrain", options, tokenizer):
        return reward or options.pretrain, None
    return options.pretrain, f"the critic starts from the policy: {reward} has another tokenizer"


def first_reward(options: RLOptions) -> str | None:
    """The first reward model."""
    return options.reward_pretrain.split(",")[0].strip() if options.reward_pretrain else None


def _reads_tokens(name: str, flag: str, options: RLOptions, tokenizer: Any) -> bool:
    """Whether the policy's tokens mean the same to this model."""
    theirs = load_tokenizer(name, disable_fast=options.disable_fast_tokenizer, flag=flag)
    return name == options.pretrain or same_tokenizer(tokenizer, theirs)


def check_places(options: RLOptions) -> None:
    """Before anything slow: are the models there, can they be split as asked, and can their successors be written?"""
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
    """The folders that a run writes to, by their options."""
    places = {"save_path": options.save_path, "ckpt_path": options.ckpt_path, "record": options.record}
    places |= {"use_tensorboard": options.use_tensorboard, "use_visualdl": options.use_visualdl}
    if isinstance(options, TailOptions):
        places |= {"save_info_path": options.save_info_path, "negdata_path": options.negdata_path}
    return {flag: place for flag, place in places.items() if place}
