"""The module name under which PaddleNLP's documents start RL: `python -m trimtab.cli.run_rl FILE [option ...]` is
`trimtab rl --config FILE [option ...]`."""

import sys
from collections.abc import Sequence

from trimtab.cli import train_rl
from trimtab.config.paddlenlp_aliases import with_config


def main(argv: Sequence[str] | None = None) -> int:
    return train_rl.main(with_config(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    raise SystemExit(main())
