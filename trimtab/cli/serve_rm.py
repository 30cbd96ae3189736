"""A reward server: `trimtab serve-rm`, or `python -m trimtab.cli.serve_rm`. A policy server: `trimtab serve MODEL`."""

import os
import secrets
import sys
from collections.abc import Sequence

from trimtab.cli.main import run_job
from trimtab.config.inference_options import NO_TOKEN
from trimtab.config.jobs import ServeOptions, ServeRMOptions
from trimtab.job import say


def main(argv: Sequence[str] | None = None) -> int:
    return run_job(ServeRMOptions, argv, serve_reward)


def serve_reward(options: ServeRMOptions) -> None:
    from trimtab.server.reward_server import run_reward_server, served_reward

    reward = served_reward(options)
    try:
        finished = run_reward_server(
            reward,
            host=options.host,
            port=options.port,
            token=None if options.token == NO_TOKEN else options.token,
            max_bytes=int(options.max_request_mib * 2**20),
            max_samples=options.batch_size,
            drain_seconds=options.drain_seconds,
            say=lambda line: print(line, flush=True),
        )
    finally:
        reward.close()
    if not finished:
        # A batch that exceeded its time still runs, in a thread that cannot be ended.
        os._exit(0)


def serve_main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--pretrain")
    return run_job(ServeOptions, words, serve_policy)


def serve_policy(options: ServeOptions) -> None:
    from trimtab.server.policy_server import run_policy_server

    def note(line: str) -> None:
        say(f"trimtab serve: note: {line}", options)

    token = secrets.token_urlsafe(24) if options.token is None else options.token

    def served(line: str) -> None:
        if options.token is None:
            note(f"clients send the API key {token} (--bearer_token names another one, or none)")
        print(line, flush=True)

    ended = run_policy_server(options, None if token == NO_TOKEN else token, say=served, note=note)
    if not ended:
        # A pass that exceeded its time still runs, in a thread that cannot be ended.
        os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
