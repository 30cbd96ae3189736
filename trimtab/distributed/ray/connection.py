"""The Ray that a run uses: the one at RAY_ADDRESS, or one that it starts, which only this machine can reach."""

import contextlib
import json
import logging
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from typing import Any

from trimtab.errors import UserError

ADDRESS = "RAY_ADDRESS"  # `ray job submit` sets it for the command that it starts
TO_ANSWER = 10.0  # seconds for a Ray that is there
TOKENS = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"  # only the owner of a process can read its environment
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
if not os.environ.get(ADDRESS):
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Its own Ray would listen on every interface of this machine. The name is misleading: it says whether this Ray may
    # have other nodes, and is read when ray is imported.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # When the driver is killed, the kernel ends Ray's control store with it. Workers and agents look for the store for
    # this time before they end, with all the memory that they hold: by default 60 s, for a store that is started again;
    # this one never is.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
    if "ray" not in sys.modules:  # it has read this when it was imported; ray.init then turns tokens on by itself
        os.environ.setdefault("RAY_AUTH_MODE", "token")

import ray  # noqa: E402
from ray.exceptions import AuthenticationError  # noqa: E402


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Inside, Ray can be used. Signal handlers are to be installed inside: Ray replaces those that it finds."""
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address := os.environ.get(ADDRESS):
            _check_reachable(address)
            ray.init(address=address, **quiet)
        else:
            _set_token()
            ray.init(address="local", include_dashboard=False, **quiet)
    except AuthenticationError as error:
        raise UserError(
            f"Ray at {os.environ.get(ADDRESS, 'this machine')} asks for its token: set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN_PATH to the file that its head was started with"
        ) from error
    except UserError:
        raise
    except Exception as error:  # a Ray that does not come up in its half minute is a plain Exception
        place = f"at {os.environ[ADDRESS]} (RAY_ADDRESS)" if ADDRESS in os.environ else "on this machine"
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"no Ray {place}: {said}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _set_token() -> None:
    """Give the Ray that this process starts a token unless the user has named one. Ray itself would write one to
    ~/.ray/auth_token for every user of this machine to read, and with it one can run code here."""
    if not any(name in os.environ for name in TOKENS):
        os.environ[TOKENS[0]] = secrets.token_hex(32)


def _check_reachable(address: str) -> None:
    """Raise ConnectionError if no Ray is there. Ray itself would try for minutes."""
    if "://" in address:
        raise UserError(f"RAY_ADDRESS {address}: give the head's own address, HOST:PORT, from a node of the cluster")
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=TO_ANSWER).close()
        except OSError as error:
            raise ConnectionError(error.strerror or str(error) or "it does not answer") from error


def stop_line() -> str | None:
    """How to stop a run that was submitted, None if this one was not: `ray job submit` only shows its output."""
    if SUBMITTED not in os.environ:
        return None
    name = json.loads(os.environ[SUBMITTED]).get("metadata", {}).get("job_submission_id", "ID")
    return f"to stop this run and keep its work: ray job stop {name}"
