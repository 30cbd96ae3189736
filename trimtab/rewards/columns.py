"""Before the first answer: have the prompts' rows what the rewards read of them?"""

from collections.abc import Iterator
from pathlib import Path

from trimtab.config.jobs import GenerateOptions, RLOptions
from trimtab.config.rewards import GIVEN
from trimtab.config.sources import listed
from trimtab.data.prompts import PromptStore
from trimtab.errors import UserError
from trimtab.rewards.functions import split_place
from trimtab.rewards.given import given_function
from trimtab.rewards.signatures import Signature, read_signature, recognise
from trimtab.rewards.verify import needing_labels


def check_columns(stores: dict[str, PromptStore], options: RLOptions | GenerateOptions) -> None:
    """`stores`: prompts by what they are called. A UserError: a verifier's label, or a column that a reward function
    cannot do without, is not in the data."""
    if isinstance(options, RLOptions) and options.replay:
        stores = {what: store for what, store in stores.items() if what != "train"}  # its rewards were recorded
    for what, store in stores.items():
        _check_labels(what, store, options)
        for name, signature in _signatures(options):
            if missing := signature.lacking(store.column_names):
                raise UserError(_lacking(name, signature, missing, what, store))


def _check_labels(what: str, store: PromptStore, options: RLOptions | GenerateOptions) -> None:
    needing = needing_labels(options.reward_verifier)
    if not needing or not (missing := store.unlabelled()):
        return
    if options.label_key:
        remedy = f"fill in column '{options.label_key}', or leave these rows out"
    else:
        remedy = f"name the column that holds it with --label_key (found: {', '.join(store.column_names)})"
    raise UserError(
        f"--reward_verifier {needing[0]} compares with a label, and {len(missing):,} of {len(store):,} prompts of "
        f"the {what} data have none (the first: {store.place(missing[0])}): {remedy}"
    )


def _lacking(name: str, signature: Signature, missing: list[str], what: str, store: PromptStore) -> str:
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
            name, found = place.removeprefix(GIVEN), recognise(given_function(place))
        elif place.startswith(("http://", "https://")):
            continue
        else:
            file, function = split_place(place)
            name, found = place, read_signature(Path(file).expanduser(), function)
        if found is not None:
            yield name, found
