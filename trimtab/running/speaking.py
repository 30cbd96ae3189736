"""What is said to the user beside a run's own output, without keys."""

import sys

from trimtab.config.option import Options
from trimtab.config.resolved_config import redact


def say(text: str, options: Options | None = None) -> None:
    """A line for the user on standard error, without keys."""
    print(redact(text, options), file=sys.stderr, flush=True)
