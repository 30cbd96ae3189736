"""A Learner's policy behind HTTP, with its current weights: requests wait during an update and go on after it."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

from trimtab.errors import UserError
from trimtab.models.policy import Policy
from trimtab.rollout.engine import Engine
from trimtab.rollout.sampling import SamplingParams


class Turns:
    def __init__(self) -> None:
        self._calls = threading.RLock()
        self._state = threading.Condition()
        self._wanted = 0
        self._serving = False

    @property
    def wanted(self) -> bool:
        """Whether a call waits, or is at work: the server is to set down what it does."""
        return self._wanted > 0

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Inside, the model is this call's alone. A call may make another."""
        with self._state:
            self._wanted += 1
        try:
            with self._calls:
                with self._state:
                    self._state.wait_for(lambda: not self._serving)
                yield
        finally:
            with self._state:
                self._wanted -= 1
                self._state.notify_all()

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        """Inside, the model is the server's, who looks at `wanted`; calls go first."""
        with self._state:
            self._state.wait_for(lambda: not self._wanted and not self._serving)
            self._serving = True
        try:
            yield
        finally:
            with self._state:
                self._serving = False
                self._state.notify_all()


LOOK_EVERY = 0.2  # seconds

log = logging.getLogger(__name__)


@contextlib.contextmanager
def serving(
    engine: Engine,
    policy: Policy,
    tokenizer: Any,
    turns: Turns,
    *,
    name: str,
    stops: tuple[int, ...],
    seed: int,
    port: int,
    token: str | None,
) -> Iterator[str]:
    """The address for clients of OpenAI's protocol, until the block ends."""
    from trimtab.server.policy_server import PolicyServer
    from trimtab.server.request_params import ServerDefaults
    from trimtab.server.request_queue import EngineFailed, RequestQueue
    from trimtab.server.sessions import ServedPolicy

    if engine.context is None:
        raise UserError(f"{name}: its config names no context, which a server must know; set max_position_embeddings")
    defaults = ServerDefaults(stops, policy.head.out_features)
    served = ServedPolicy(name, tokenizer, defaults, engine.context)
    server = PolicyServer(served, token=token, seed=seed, version=lambda: engine.version)

    def work(queue: RequestQueue) -> None:
        try:
            while not queue.closed:
                if queue.wait(LOOK_EVERY):
                    with turns.serve(), engine.session(SamplingParams(stop_token_ids=stops)) as session:
                        try:
                            while queue.waiting and not queue.closed and not turns.wanted:
                                with queue.metrics.working():
                                    queue.step(session)
                            queue.suspend(session)
                        except Exception as error:
                            log.error("the engine failed", exc_info=error)
                            queue.engine_failed(error)
        finally:
            queue.close(EngineFailed("the engine has ended"))

    address = server.start(port)
    thread = threading.Thread(target=work, args=(server.queue,), name="engine", daemon=True)
    thread.start()
    try:
        yield f"{address}/v1"
    finally:
        server.stop()
        server.join()
        thread.join()
