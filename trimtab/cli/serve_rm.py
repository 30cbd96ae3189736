"""A reward server: `trimtab serve-rm`, or `python -m trimtab.cli.serve_rm`."""

import os
from collections.abc import Sequence

from trimtab.cli.main import run_job
from trimtab.config.inference_options import NO_TOKEN
from trimtab.config.jobs import ServeRMOptions


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
        # A batch that is beyond its time is still being computed, by a thread that nobody can end.
        os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
