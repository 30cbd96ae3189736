"""What real_frontier.py trains: methods with their weights of the KL, and other settings of RePULSe."""

import argparse

# Words of trimtab tail; those in braces are options of real_frontier.py.
PUSH = {"method": "repulse", "alpha": "{alpha}", "target_dist_beta": "{beta}",
        "proposal_learning_rate": "{proposal_learning_rate}"}  # fmt: skip
KAPPA = PUSH | {"push_down_scale": "per_group"}  # alpha is kappa then
METHODS = {
    "REINFORCE": {"method": "reinforce"},
    "RePULSe": PUSH,
    "base proposal": {"method": "base_proposal", "alpha": "{alpha}", "target_dist_beta": "{beta}"},
}
VARIANTS = {
    "RePULSe, 2 proposal updates": PUSH | {"proposal_updates": "2"},
    "RePULSe, proposal rate 3e-5": PUSH | {"proposal_learning_rate": "3e-5"},
    "RePULSe, beta -1": PUSH | {"target_dist_beta": "-1"},
    "RePULSe, beta -20": PUSH | {"target_dist_beta": "-20"},
    "RePULSe, kappa 0.1": KAPPA | {"alpha": "0.1"},
    "RePULSe, kappa 0.002 to 0.1": KAPPA | {"alpha": "0.1", "start_alpha": "0.002"},
    "RePULSe, 5 proposal updates": PUSH | {"proposal_updates": "5"},
    "RePULSe, kappa 0.1 to 0.002": KAPPA | {"alpha": "0.002", "start_alpha": "0.1"},
    "RePULSe, beta -1 to -20": PUSH | {"target_dist_beta": "-20", "start_target_dist_beta": "-1"},
    "RePULSe, proposal rate 3e-4": PUSH | {"proposal_learning_rate": "3e-4"},
    "RePULSe, kappa 0.004": KAPPA | {"alpha": "0.004"},
    "RePULSe, beta -50": PUSH | {"target_dist_beta": "-50"},
}
BEFORE = "before training"
# Wide, and further up for what pushes down: at the same weight it moves further.
WEIGHTS = {
    "REINFORCE": (0.3, 0.15, 0.08),
    "RePULSe": (0.5, 0.25, 0.12),
    "base proposal": (0.5, 0.25, 0.12),
}


def words_of(method: str, options: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """The method's name in trimtab tail, and its other settings there."""
    words = {name: word.format(**vars(options)) for name, word in (METHODS | VARIANTS)[method].items()}
    return words.pop("method"), words
