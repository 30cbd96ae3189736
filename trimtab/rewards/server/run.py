"""Bind, serve until SIGINT or SIGTERM, answer what has been accepted, end."""

import ipaddress
import signal
import socket
from collections.abc import Callable

from trimtab.errors import UserError
from trimtab.rewards.types import Reward

try:
    import uvicorn

    from trimtab.rewards.server.app import make_app
except ImportError as error:
    raise UserError(f"a reward server needs the package {error.name}: pip install 'trimtab[serve]'") from error

SECONDS_TO_FINISH = 30


def serve(
    reward: Reward,
    *,
    host: str,
    port: int,
    token: str | None,
    max_bytes: int,
    max_samples: int | None,
    say: Callable[[str], None],
) -> None:
    """Runs until it is told to stop. `say` gets the line that says where it listens, once it does."""
    listening = bind(host, port)
    app = make_app(reward, token=token, max_bytes=max_bytes, max_samples=max_samples)
    say(f"serving {reward.name} at {address(listening)}")
    # uvicorn hands the signal on once it has finished; by then there is nothing left to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    make_server(app).run(sockets=[listening])


def make_server(app: object) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=SECONDS_TO_FINISH
        )
    )


def bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if _is_ipv6(host) else socket.AF_INET
        # Only where the protocol is named does asyncio send small replies at once (TCP_NODELAY): 40 ms less.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"--host {host} --port {port}: cannot listen there ({reason}); choose another") from error
    return listening


def address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
