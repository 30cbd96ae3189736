"""The module name under which OpenRLHF's documents start RL of every kind: `python -m trimtab.cli.train_ppo_ray` is
`trimtab ppo --ray`."""

import sys
from collections.abc import Sequence

from trimtab.cli import train_ppo


def main(argv: Sequence[str] | None = None) -> int:
    # First, so that --ray False still means what it says.
    return train_ppo.main(["--ray", "True", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    raise SystemExit(main())
