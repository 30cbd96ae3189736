"""A policy server: `trimtab serve MODEL`, or `python -m trimtab.cli.serve MODEL`."""

import os
import sys
from collections.abc import Sequence

from trimtab.cli.run import run_job, say
from trimtab.config.jobs import ServeOptions
from trimtab.config.serving import TOKEN_VARIABLE


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--pretrain")
    return run_job(ServeOptions, words, serve_policy)


def serve_policy(options: ServeOptions) -> None:
    from trimtab.serving.run import serve

    token = options.bearer_token or os.environ.get(TOKEN_VARIABLE) or None
    ended = serve(
        *(options, token),
        say=lambda line: print(line, flush=True),
        note=lambda line: say(f"trimtab serve: note: {line}", options),
    )
    if not ended:
        # A pass that is beyond its time is still being computed, by a thread that nobody can end.
        os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
