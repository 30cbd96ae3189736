"""The policy server: its parts put together, and `trimtab serve`, which serves a model until SIGTERM.

`PolicyServer` runs in the main thread, or in a thread of a process that trains (agents.py, api/learner_server.py).
"""

import contextlib
import gc
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from trimtab.config.jobs import ServeOptions
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import Device, find_device
from trimtab.distributed.random_state import seed_everything
from trimtab.errors import UserError
from trimtab.models.load import load_frozen_policy
from trimtab.models.pretrained import check_model_folder, quiet_transformers
from trimtab.rollout.engine import Engine
from trimtab.rollout.factory import build_engine
from trimtab.rollout.sampling import SamplingParams, stop_tokens

try:
    from trimtab.server.endpoints import MOST_BYTES, make_policy_app
    from trimtab.server.http import (
        DRAIN_SECONDS,
        SECONDS_TO_SEND,
        DrainingServer,
        address,
        bind,
        make_server,
        run_until_signal,
    )
    from trimtab.server.http_workers import HTTPWorkerProcesses, HTTPWorkers
    from trimtab.server.request_params import ServerDefaults
    from trimtab.server.request_queue import (
        MOST_WAITING,
        EngineFailed,
        EngineThread,
        PolicyMetrics,
        RequestQueue,
    )
    from trimtab.server.sessions import ServedPolicy, SessionStore
except ImportError as error:
    raise UserError(f"a policy server needs the package {error.name}: pip install 'trimtab[serve]'") from error

INVITED_CONNECTIONS = 2**16  # all episodes of an iteration run at once, each with its own connection
# How soon the engine's thread gets the interpreter back while responses are written. Python's default of 5 ms is
# several decode steps.
SWITCH_SECONDS = 0.0002
MOST_HTTP_WORKERS = 8


class PolicyServer:
    """The policy server: request queue, sessions, app and HTTP server."""

    def __init__(
        self,
        policy: ServedPolicy,
        *,
        token: str | None = None,
        seed: int = 0,
        version: Callable[[], int] = lambda: 0,
        max_bytes: int = MOST_BYTES,
        max_waiting: int = MOST_WAITING,
        drain_seconds: float = DRAIN_SECONDS,
        invited: bool = False,
        private: bool = False,
        processes: HTTPWorkerProcesses | None = None,
    ):
        """`token`: the bearer token that requests need; `seed`: for requests without one; `version`: of the weights;
        `invited`: answer only sessions that this process opened; `private`: the server issues session names;
        `processes`:
        HTTP workers, which end with the server."""
        self.policy, self.metrics = policy, PolicyMetrics()
        self.sessions = SessionStore(invited=invited, private=private)
        self.queue = RequestQueue(self.metrics, max_waiting, seed)
        app = make_policy_app(
            *(policy, self.queue, self.sessions, self.metrics), token=token, version=version, max_bytes=max_bytes
        )
        self.gate = app.state.gate
        self._server: DrainingServer | HTTPWorkers
        if processes is None:
            connections = INVITED_CONNECTIONS if invited else None
            self._server = make_server(app, drain_seconds, connections=connections)
        else:
            settings = {
                "name": policy.name,
                "stops": list(policy.defaults.stops),
                "vocabulary": policy.defaults.vocabulary,
                "max_model_len": policy.max_model_len,
                "token": token,
                "private": private,
                "max_bytes": max_bytes,
                "max_waiting": max_waiting,
                "drain_seconds": drain_seconds,
            }
            self._server = HTTPWorkers(processes, app, self.queue, settings)
        self._engine_thread: EngineThread | None = None
        self._thread: threading.Thread | None = None
        sys.setswitchinterval(SWITCH_SECONDS)

    def start_engine(self, engine: Engine) -> None:
        """Run the request queue with this engine in a thread. Otherwise a caller with an open session runs the
        queue."""
        usual = SamplingParams(stop_token_ids=self.policy.defaults.stops)
        self._engine_thread = EngineThread(engine, self.queue, usual, self.policy.max_model_len)

    def run(self, listening: socket.socket) -> bool:
        """Serve in the main thread until SIGINT or SIGTERM; returns whether the engine has stopped."""
        try:
            run_until_signal(self._server, listening)
        finally:
            stopped = self._end()
        return stopped

    def start(self, port: int = 0) -> str:
        """Serve in a thread on the loopback address, at this port or a free one; returns the URL."""
        listening = bind("127.0.0.1", port)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listening]}, name="policy server", daemon=True
        )
        self._thread.start()
        return address(listening)

    def stop(self) -> None:
        """Answer admitted requests, refuse others, then end."""
        self._server.drain()

    def join(self) -> None:
        assert self._thread is not None, "it was started"
        self._thread.join()
        self._end()

    def _end(self) -> bool:
        self.queue.close(EngineFailed("the server has ended"))
        if self._engine_thread is None:
            return True
        self._engine_thread.thread.join(SECONDS_TO_SEND)
        return not self._engine_thread.thread.is_alive()


# ---- trimtab serve


def run_policy_server(
    options: ServeOptions, token: str | None, say: Callable[[str], None], note: Callable[[str], None]
) -> bool:
    """Serve until SIGINT or SIGTERM; returns whether the engine has stopped. `say`: prints the line with the URL once
    the server listens; `note`: prints further lines."""
    quiet_transformers()
    check_model_folder(options.pretrain)
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(bind(options.host, options.port))
        device = find_device()
        how: dict[str, Any] = {"disable_fast": options.disable_fast_tokenizer}
        how["chat_template"] = options.tokenizer_chat_template
        processes = None
        if count := http_worker_count(options.http_processes, device):
            processes = HTTPWorkerProcesses(count, options.pretrain, **how)  # they start while the model is loaded
            opened.callback(processes.close)
        tokenizer = load_tokenizer(options.pretrain, **how)
        seed_everything(options.seed, deterministic=options.full_determinism)
        model = load_frozen_policy(options.pretrain, options, device, flag="--pretrain").model
        engine = build_engine(model, tokenizer, max_num_seqs=options.max_requests, prefix_caching=True)
        given = [length for length in (options.max_model_len, engine.context) if length is not None]
        if not given:
            raise UserError(f"--pretrain {options.pretrain}: its config names no context; give --max_model_len")
        defaults = ServerDefaults(stop_tokens(model, tokenizer), model.head.out_features)
        policy = ServedPolicy(options.served_model_name or options.pretrain, tokenizer, defaults, min(given))
        policy.name_all()
        server = PolicyServer(
            policy,
            token=token,
            seed=options.seed,
            version=lambda: engine.version,
            max_bytes=int(options.max_request_mib * 2**20),
            max_waiting=options.max_waiting,
            drain_seconds=options.drain_seconds,
            private=options.private_sessions,
            processes=processes,
        )
        server.start_engine(engine)
        # Exclude all present objects, with all of torch, from garbage collection: each collection took 0.2 s.
        gc.freeze()
        opened.callback(gc.unfreeze)
        for line in chat_notes(policy):
            note(line)
        say(f"serving {policy.name} at {address(listening)}")
        return server.run(listening)


def http_worker_count(wanted: int | None, device: Device) -> int:
    """0: the engine's process serves HTTP itself."""
    if wanted is not None:
        return wanted
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if not device.is_accelerator else min(MOST_HTTP_WORKERS, cores // 2)


def chat_notes(policy: ServedPolicy) -> list[str]:
    """Notes for the user on chats with this model."""
    if not policy.tokenizer.chat_template:
        return ["the tokenizer has no chat template: /v1/chat/completions is refused, /v1/completions is not"]
    chat_format = policy.chat_format([], {})
    if chat_format.appending is not None:
        return []
    return [f"later turns are rendered anew, each a branch of its own ({chat_format.why_not})"]
