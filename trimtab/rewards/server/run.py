"""A reward behind HTTP, until the process is told to stop."""

from collections.abc import Callable

from trimtab.errors import UserError
from trimtab.rewards.types import Reward

try:
    from trimtab.rewards.server.app import make_app
    from trimtab.web.server import SECONDS_TO_SEND, address, bind, make_server, serve_until_told
except ImportError as error:
    raise UserError(f"a reward server needs the package {error.name}: pip install 'trimtab[serve]'") from error


def serve(
    reward: Reward,
    *,
    host: str,
    port: int,
    token: str | None,
    max_bytes: int,
    max_samples: int | None,
    drain_seconds: float,
    say: Callable[[str], None],
) -> bool:
    """Runs until it is told to stop. `say` gets the line that says where it listens, once it does. Whether nothing is
    being computed any more."""
    listening = bind(host, port)
    app = make_app(reward, token=token, max_bytes=max_bytes, max_samples=max_samples)
    say(f"serving {reward.name} at {address(listening)}")
    serve_until_told(make_server(app, drain_seconds, logs=["trimtab.rewards.server.app"]), listening)
    app.state.batcher.thread.join(SECONDS_TO_SEND)
    return not app.state.batcher.thread.is_alive()
