"""What an RL run reads and writes, for the look at a cluster before it begins (distributed/ray/preflight)."""

import os
from collections.abc import Iterator

from trimtab.config.jobs import RLOptions, TailOptions
from trimtab.config.sources import FILE_TYPES, listed
from trimtab.distributed.ray.preflight import Places
from trimtab.train.rl.checks import places_written

SHARED = ("save_path", "ckpt_path")


def places_of(options: RLOptions) -> Places:
    written = places_written(options) | {"ckpt_path": options.checkpoint_folder}
    return Places(
        read=[(flag, path) for flag, path in _named(options) if os.path.exists(os.path.expanduser(path))],
        written=[(flag, path) for flag, path in written.items() if flag not in SHARED],
        shared=[(flag, written[flag]) for flag in SHARED],
    )


def _named(options: RLOptions) -> Iterator[tuple[str, str]]:
    """Paths, and names of the hub, which are nowhere here."""
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
    functions["agent_func_path"] = options.agent_func_path
    for flag, files in functions.items():
        for file in listed(files):
            yield flag, file[: file.rfind(".py") + 3]  # a function's name may follow
