"""Build the reward of a run from its options (models, functions, servers, verifiers), check it, and fingerprint it."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trimtab.config.data_options import EnvironmentOptions, listed
from trimtab.config.jobs import GenerateOptions
from trimtab.config.objective_options import GIVEN, StepScoreOptions
from trimtab.config.rl_jobs import RLOptions, TailOptions
from trimtab.data.prompts import PromptDataset
from trimtab.distributed.device import Device
from trimtab.distributed.mesh import Mesh
from trimtab.errors import UserError
from trimtab.models.parallel.sharded_model import enable_context_parallel, is_frozen_sharded
from trimtab.models.pretrained import weights_fingerprint
from trimtab.rewards.client import HTTPReward, RemoteReward
from trimtab.rewards.code_verifier import read_tests
from trimtab.rewards.functions import CALLS_AT_ONCE, CallableReward, FunctionReward, find_function
from trimtab.rewards.judge import JudgeReward
from trimtab.rewards.models import ModelReward, ProcessReward, load_classifier_reward
from trimtab.rewards.requests import make_reward_request
from trimtab.rewards.signatures import Signature, read_signature, recognize
from trimtab.rewards.types import BadSample, EnvironmentReward, Reward, RewardFailed, RewardRequest, WeightedReward
from trimtab.rewards.verifiers import make_verifier, verifiers_with_labels
from trimtab.sandbox.process import Waiter
from trimtab.sandbox.worker import parse_source

SAMPLES_AT_RISK = 8  # of one request to a server, where samples may be left out
Parts = list[tuple[Reward, float]]  # rewards and their weights


def build_reward(
    options: RLOptions | GenerateOptions,
    device: Device,
    tokenizer: PreTrainedTokenizerBase,
    stopped: Callable[[], bool] = lambda: False,
) -> WeightedReward:
    """The whole reward, in this process. `tokenizer`: the policy's; `stopped`: whether the run has been told to stop,
    which ends every wait (RunStopped)."""
    return WeightedReward([*reward_models(options, device, tokenizer), *non_model_rewards(options, stopped)])


def reward_models(
    options: RLOptions | GenerateOptions, device: Device, tokenizer: PreTrainedTokenizerBase, mesh: Mesh | None = None
) -> list[tuple[ModelReward | ProcessReward, float]]:
    """The models of --reward_pretrain, which need a device. `mesh`: the processes that share them."""
    kept: dict[str, Any] = {}
    if isinstance(options, RLOptions):
        offload = options.ref_reward_offload
        kept = {
            "offload": offload,
            "mesh": mesh if mesh and is_frozen_sharded(options, mesh, offload=offload) else None,
        }
    models = [_model(name, options, device, tokenizer, **kept) for name in listed(options.reward_pretrain)]
    if mesh and isinstance(options, RLOptions):
        for model in models:
            enable_context_parallel(model.model, options, mesh, "--reward_pretrain")
    return list(zip(models, options.reward_weights or (1.0,) * len(models)))


def non_model_rewards(options: RLOptions | GenerateOptions, stopped: Callable[[], bool]) -> Parts:
    """Functions, servers and verifiers, which are best close to the rollouts."""
    waiter = Waiter(stopped)
    files, addresses = _places(options)
    by_groups = isinstance(options, RLOptions) and options.outlives_updates
    limits: dict[str, Any] = {} if options.reward_timeout is None else {"seconds": options.reward_timeout}
    limits |= {"calls_at_once": CALLS_AT_ONCE} if by_groups else {}
    places = [*listed(options.reward_func), *files]
    functions: list[CallableReward | FunctionReward] = [
        CallableReward(place) if place.startswith(GIVEN) else FunctionReward(place, waiter=waiter, **limits)
        for place in places
    ]
    # Without the option, functions and servers stop the run as they always did; a judge may fail now and then.
    tolerant = options.max_failed_rewards is not None and options.failed_reward_share > 0
    for function in functions:
        function.tolerant = tolerant
    rewards: list[Reward] = [*functions]
    if addresses:
        limits = {} if options.reward_timeout is None else {"timeout": options.reward_timeout}
        limits |= {"concurrency": CALLS_AT_ONCE * len(addresses)} if by_groups else {}
        limits |= {"tolerant": True, "batch_size": SAMPLES_AT_RISK} if tolerant else {}
        rewards.append(RemoteReward(addresses, waiter=waiter, **limits))
    if options.judge:
        own = str(Path(options.save_path) / "judge.jsonl") if isinstance(options, RLOptions) else None
        kept = options.judge_cache or own
        limits = {} if options.reward_timeout is None else {"timeout": options.reward_timeout}
        limits |= {"cache": None if kept is None else Path(kept).expanduser()}
        rewards.append(JudgeReward(options, listed(options.judge), waiter=waiter, **limits))
    models = len(listed(options.reward_pretrain))
    weights = options.reward_weights[models:] if options.reward_weights else (1.0,) * len(rewards)
    parts: Parts = list(zip(rewards, weights, strict=True))
    if options.reward_verifier:
        parts += make_verifier(options.reward_verifier, waiter).parts
    if isinstance(options, EnvironmentOptions) and (source := options.environment_source):
        parts.append((EnvironmentReward(source), 1.0))
    return parts


def describe_rewards(rewards: str, options: RLOptions) -> str:
    """The rewards of an RL run, for the log; `rewards`: those besides recordings and teachers."""
    if options.replay:
        parts = [f"as recorded in {options.replay}", *([f"evaluations by {rewards}"] if rewards else [])]
    else:
        parts = [rewards] if rewards else []
    if options.is_taught:
        by = f"the teacher {options.teacher_model}" if options.teacher_model else "the policy as its own teacher"
        kind = options.teacher_divergence
        what = "log-probability by" if kind == "sampled" else f"{kind.replace('_', ' ')} (loss, all tokens) from"
        parts.append(f"{options.teacher_coef:g} x {what} {by}")
    return "; ".join(parts)


def reward_fingerprints(reward: WeightedReward) -> list[str | None]:
    """A hash of each part's weights or code, which may change while its path does not; None: it has none."""
    return [_fingerprint(part) for part, _ in reward.parts]


def _fingerprint(reward: Reward) -> str | None:
    if isinstance(reward, ModelReward):
        return weights_fingerprint(reward.model)
    if isinstance(reward, CallableReward):
        return None if (text := reward.source()) is None else hashlib.blake2b(text, digest_size=16).hexdigest()
    if isinstance(reward, JudgeReward):
        return hashlib.blake2b(reward.fingerprint(), digest_size=16).hexdigest()
    if isinstance(reward, FunctionReward):
        return hashlib.blake2b(reward.file.read_bytes(), digest_size=16).hexdigest()
    return None


def _places(options: RLOptions | GenerateOptions) -> tuple[list[str], list[str]]:
    """Files of functions, and addresses of servers, which share a batch."""
    places = listed(options.remote_rm_url)
    files = [place for place in places if not place.startswith(("http://", "https://"))]
    return files, [place for place in places if place not in files]


def _model(
    name: str, options: RLOptions | GenerateOptions, device: Device, tokenizer: PreTrainedTokenizerBase, **kept: Any
) -> ModelReward | ProcessReward:
    if isinstance(options, GenerateOptions):
        passes: dict[str, Any] = {"max_samples": options.micro_batch_size}
        normalize = False  # what is compared within a prompt needs none
    else:
        count = options.micro_reward_batch_size or options.micro_rollout_batch_size
        passes = {"max_samples": None if options.use_dynamic_batch else count}
        normalize = options.normalize_reward
    if isinstance(options, StepScoreOptions) and options.placeholder_token:
        place, separator = options.step_reward, options.step_separator
        return ProcessReward(
            name, options, device, place=place, separator=separator, policy_tokenizer=tokenizer, **passes, **kept
        )
    settings = (
        kept
        | passes
        | {
            "policy_tokenizer": tokenizer,
            "messages_key": options.input_key if options.apply_chat_template else None,
            "normalize": normalize,
        }
    )
    if isinstance(options, TailOptions):
        return load_classifier_reward(name, options, device, **settings)
    return ModelReward(name, options, device, **settings)


# ---- checks of columns before the run


def check_columns(stores: dict[str, PromptDataset], options: RLOptions | GenerateOptions) -> None:
    """Raise UserError if the data lack a verifier's label, or a column that a reward function needs. `stores`: prompts
    by name."""
    if isinstance(options, RLOptions) and options.replay:
        stores = {what: store for what, store in stores.items() if what != "train"}  # its rewards were recorded
    for what, store in stores.items():
        _check_labels(what, store, options)
        for name, signature in _signatures(options):
            if missing := signature.missing_parameters(store.column_names):
                raise UserError(_lacking(name, signature, missing, what, store))


def _check_labels(what: str, store: PromptDataset, options: RLOptions | GenerateOptions) -> None:
    needing = verifiers_with_labels(options.reward_verifier) if options.reward_verifier else []
    asking = [f"--reward_verifier {needing[0]} compares with a label"] if needing else []
    if options.judge and "{label}" in options.judge_question:
        asking.append("--judge_template has {label}")
    missing = store.unlabelled() if asking else []
    if "code" in needing and not missing:
        for row in range(len(store)):
            try:
                if (label := store.label(row)) is not None:
                    read_tests(label)
            except BadSample as error:
                raise UserError(f"--reward_verifier code: {store.place(row)}: {error}; see docs/rewards.md") from error
    if not missing:
        return
    if options.label_key:
        remedy = f"fill in column '{options.label_key}', or leave these rows out"
    else:
        remedy = f"name the column that holds it with --label_key (found: {', '.join(store.column_names)})"
    raise UserError(
        f"{asking[0]}, and {len(missing):,} of {len(store):,} prompts of "
        f"the {what} data have none (the first: {store.place(missing[0])}): {remedy}"
    )


def _lacking(name: str, signature: Signature, missing: list[str], what: str, store: PromptDataset) -> str:
    plural = "s" * (len(missing) > 1)
    if signature.project != "TRL":
        return (
            f"the reward function {name} asks for {', '.join(missing)}, which a function of {signature.project}'s kind "
            f"does not get: give the parameter{plural} a default, or take columns as f(prompts, completions, **columns)"
        )
    return (
        f"the reward function {name} needs the column{plural} {', '.join(missing)}, and the {what} data have "
        f"{', '.join(store.column_names)}: rename the column{plural}, or give the parameter{plural} a default"
    )


def _signatures(options: RLOptions | GenerateOptions) -> Iterator[tuple[str, Signature]]:
    """The reward functions whose parameters are known before they run."""
    for place in [*listed(options.reward_func), *listed(options.remote_rm_url)]:
        if place.startswith(GIVEN):
            name, found = place.removeprefix(GIVEN), recognize(find_function(place))
        elif place.startswith(("http://", "https://")):
            continue
        else:
            file, function = parse_source(place)
            name, found = place, read_signature(file, function)
        if found is not None:
            yield name, found


# ---- a trial before the run


MADE_UP = "I do not know."


def check_reward(
    options: RLOptions | GenerateOptions, device: Device, tokenizer: PreTrainedTokenizerBase, store: PromptDataset
) -> list[str]:
    """Call the reward on two made-up answers to the first prompt, one of which is its label, and report the rewards."""
    built = build_reward(options, device, tokenizer)
    # An environment scores episodes, not made-up answers.
    reward = WeightedReward([part for part in built.parts if not isinstance(part[0], EnvironmentReward)])
    try:
        if not reward.parts:
            return []
        for part, _ in reward.parts:
            if isinstance(part, HTTPReward):
                part.attempts = 1  # a run waits for a server that is late; here the user waits
            if isinstance(part, JudgeReward):
                part.cache.file = None  # known replies are used, and nothing is written
        request = _request(store, tokenizer)
        found = reward(request)
        if found.failed:
            raise RewardFailed(next(iter(found.failed.values())))
        rewards = found.rewards
    except BadSample as error:  # made-up answers may not be of the kind that is scored
        return [f"reward, tried on the first prompt: {error}"]
    except RewardFailed as error:
        raise UserError(f"the reward was tried and failed: {error}") from error
    finally:
        reward.close()
    parts = [f"{value:g} for {answer!r}" for value, answer in zip(rewards, request.responses)]
    return [f"reward, tried on the first prompt: {', '.join(parts)}"]


def _request(store: PromptDataset, tokenizer: PreTrainedTokenizerBase) -> RewardRequest:
    known: Any = store.label(0)
    answers = [str(known) if known is not None else "Yes.", MADE_UP]
    ids = [tokenizer(answer, add_special_tokens=False)["input_ids"] or store.ids(0)[-1:] for answer in answers]
    responses = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return make_reward_request(store, [0, 0], responses, [store.ids(0)] * 2, ids)
