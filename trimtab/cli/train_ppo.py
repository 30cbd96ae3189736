"""Proximal policy optimisation: `trimtab ppo`, or `python -m trimtab.cli.train_ppo`.

RePULSe's documents start all their methods under this module's name: such a command is one of `trimtab tail`.
"""

import sys
from collections.abc import Sequence

from trimtab.cli import train_tail
from trimtab.cli.run import guarded
from trimtab.cli.training import training_main
from trimtab.config.repulse_aliases import in_words_of_tail, is_repulse


def main(argv: Sequence[str] | None = None) -> int:
    if is_repulse(sys.argv[1:] if argv is None else argv):
        return guarded("trimtab tail", lambda: _tail(argv))
    return training_main("ppo", argv)


def _tail(argv: Sequence[str] | None) -> int:
    if argv is not None:
        return train_tail.main(in_words_of_tail(argv))
    sys.argv[1:] = in_words_of_tail(sys.argv[1:])
    return train_tail.main()


if __name__ == "__main__":
    raise SystemExit(main())
