"""A model behind HTTP: `trimtab serve`, until it is told to stop."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

from trimtab.config.jobs import ServeOptions
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import Device, find_device
from trimtab.distributed.random_state import seed_everything
from trimtab.errors import UserError
from trimtab.models.hugging_face import check_model_folder, quiet_transformers
from trimtab.models.load import load_frozen_policy
from trimtab.rollout.choose import build_engine
from trimtab.rollout.stopping import stop_tokens

try:
    from trimtab.serving.fronts import FrontProcesses
    from trimtab.serving.policy import ServedPolicy
    from trimtab.serving.server import PolicyServer
    from trimtab.serving.wanted import House
    from trimtab.web.server import address, bind
except ImportError as error:
    raise UserError(f"a policy server needs the package {error.name}: pip install 'trimtab[serve]'") from error


MOST_FRONTS = 8


def serve(options: ServeOptions, token: str | None, say: Callable[[str], None], note: Callable[[str], None]) -> bool:
    """Runs until it is told to stop. `say` gets the line that says where it listens, once it does, and `note` what
    there is to know besides. Whether nothing is being drawn any more."""
    quiet_transformers()
    check_model_folder(options.pretrain)
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(bind(options.host, options.port))
        device = find_device()
        how: dict[str, Any] = {"disable_fast": options.disable_fast_tokenizer}
        how["chat_template"] = options.tokenizer_chat_template
        processes = None
        if count := front_processes(options.http_processes, device):
            processes = FrontProcesses(count, options.pretrain, **how)  # they start while the model is loaded
            opened.callback(processes.close)
        tokenizer = load_tokenizer(options.pretrain, **how)
        seed_everything(options.seed, deterministic=options.full_determinism)
        model = load_frozen_policy(options.pretrain, options, device, flag="--pretrain").model
        engine = build_engine(model, tokenizer, slots=options.max_requests, keep_prefixes=True)
        given = [length for length in (options.max_model_len, engine.context) if length is not None]
        if not given:
            raise UserError(f"--pretrain {options.pretrain}: its config names no context; give --max_model_len")
        house = House(stop_tokens(model, tokenizer), model.head.out_features)
        policy = ServedPolicy(options.served_model_name or options.pretrain, tokenizer, house, min(given))
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
        server.drive(engine)
        opened.enter_context(_short_collections())
        for line in about(policy):
            note(line)
        say(f"serving {policy.name} at {address(listening)}")
        return server.run(listening)


@contextlib.contextmanager
def _short_collections() -> Iterator[None]:
    """What is there now, all of torch among it, is not looked through for garbage again: that took 0.2 s each time, in
    the middle of requests."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def front_processes(wanted: int | None, device: Device) -> int:
    """How many have the HTTP side; 0: this one."""
    if wanted is not None:
        return wanted
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if not device.is_accelerator else min(MOST_FRONTS, cores // 2)


def about(policy: ServedPolicy) -> list[str]:
    """What a user should know of the model's conversations."""
    if not policy.tokenizer.chat_template:
        return ["the tokenizer has no chat template: /v1/chat/completions is refused, /v1/completions is not"]
    stage = policy.stage([], {})
    if stage.appending is not None:
        return []
    return [f"later turns are rendered anew, each a branch of its own ({stage.why_not})"]
