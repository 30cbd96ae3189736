"""Before a run: does the reward answer at all? It is built as in the run and asked for two answers that are made up."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from trimtab.config.jobs import GenerateOptions, RLOptions
from trimtab.data.prompts import PromptStore
from trimtab.distributed.device import Device
from trimtab.errors import UserError
from trimtab.rewards.build import build_reward
from trimtab.rewards.client import HttpReward
from trimtab.rewards.environment import EnvironmentReward
from trimtab.rewards.requests import request_of
from trimtab.rewards.types import BadSample, RewardFailed, RewardRequest
from trimtab.rewards.weighing import Weighted

MADE_UP = "I do not know."


def try_reward(
    options: RLOptions | GenerateOptions, device: Device, tokenizer: PreTrainedTokenizerBase, store: PromptStore
) -> list[str]:
    """What the reward gives for the first prompt's label, or a made-up answer, and for another made-up one."""
    built = build_reward(options, device, tokenizer)
    # An environment answers turns, not answers that are made up.
    reward = Weighted([part for part in built.parts if not isinstance(part[0], EnvironmentReward)])
    try:
        if not reward.parts:
            return []
        for part, _ in reward.parts:
            if isinstance(part, HttpReward):
                part.attempts = 1  # in the run a server may be late; here somebody waits
        request = _request(store, tokenizer)
        rewards = reward(request).rewards
    except BadSample as error:  # the answers are made up, and perhaps not of the kind that is judged
        return [f"reward, tried on the first prompt: {error}"]
    except RewardFailed as error:
        raise UserError(f"the reward was tried and failed: {error}") from error
    finally:
        reward.close()
    told = [f"{value:g} for {answer!r}" for value, answer in zip(rewards, request.responses)]
    return [f"reward, tried on the first prompt: {', '.join(told)}"]


def _request(store: PromptStore, tokenizer: PreTrainedTokenizerBase) -> RewardRequest:
    known: Any = store.label(0)
    answers = [str(known) if known is not None else "Yes.", MADE_UP]
    ids = [tokenizer(answer, add_special_tokens=False)["input_ids"] or store.ids(0)[-1:] for answer in answers]
    responses = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return request_of(store, [0, 0], responses, [store.ids(0)] * 2, ids)
