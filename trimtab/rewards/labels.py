"""Before the first answer: has every prompt the label that a verifier will compare with?"""

from trimtab.data.prompts import PromptStore
from trimtab.errors import UserError
from trimtab.rewards.verify import needing_labels


def check_labels(stores: dict[str, PromptStore], reward_verifier: str | None, label_key: str | None) -> None:
    """`stores`: prompts by what they are called."""
    needing = needing_labels(reward_verifier)
    for what, store in stores.items() if needing else ():
        missing = store.unlabelled()
        if not missing:
            continue
        remedy = (
            f"fill in column '{label_key}', or leave these rows out"
            if label_key
            else "name the column that holds it with --label_key"
        )
        raise UserError(
            f"--reward_verifier {needing[0]} compares with a label, and {len(missing):,} of {len(store):,} prompts of "
            f"the {what} data have none (the first: {store.place(missing[0])}): {remedy}"
        )
