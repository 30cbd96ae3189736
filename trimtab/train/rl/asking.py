"""Prompts out to the rollout role, answers back in order, however many processes it has."""

from trimtab.distributed.roles import Group
from trimtab.errors import OutOfMemory
from trimtab.rewards.types import RewardFailed
from trimtab.rollout.types import Sampling
from trimtab.train.pass_limit import NoRoom
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.rollouts import Request, no_room


def ask_for_samples(rollouts: Group, requests: list[Request], store: str, sampling: Sampling) -> Experience | None:
    """Prompts dealt out to all processes in turn; their answers in order. None: they were given up."""
    shares = [list(range(rank, len(requests), rollouts.size)) for rank in range(rollouts.size)]
    asked = [[requests[place] for place in share] for share in shares]
    try:
        parts = rollouts.call("sample", asked, store=store, sampling=sampling)
    except OutOfMemory as shortage:  # one of several processes has called off what all were doing
        rollouts.meet_again()
        raise no_room(shortage) from shortage
    for part, share in zip(parts, shares):
        if isinstance(part, RewardFailed | NoRoom):
            raise part
        if part is None and share:
            return None
    joined = Experience.joined([part for part in parts if part is not None])
    places = [place for share in shares for place in share]
    return joined.take(joined.samples_of(sorted(range(len(places)), key=places.__getitem__)))
