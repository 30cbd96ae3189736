"""How whoever answers prompts comes to the weights as they are now.

    SharedWeights   the engine is where the policy is, and reads its weights in place or takes a copy there
    SentWeights     engines are apart: the policy's processes send, over links of their own, while the engines receive

An engine with a copy may hold something else than was sent, without any error. So after every update it answers a few
prompts, and the trainer computes the log-probs of those tokens too (`Probe`).
"""

from typing import Protocol

from trimtab.config.jobs import RLOptions
from trimtab.data.prompts import PromptStore
from trimtab.distributed.launcher import EngineLost, Group
from trimtab.distributed.weight_transfer import GLOO, plan_transfer
from trimtab.train.rl.passes import Passes
from trimtab.train.rl.probe import Probe
from trimtab.train.rl.role_groups import Roles


class Publishing(Protocol):
    def connect(self) -> None:
        """Once before the first weights are published, while policy and engines hold those they were loaded with; and
        again whenever an engine has taken another one's place."""

    def publish(self, version: int) -> None:
        """Answers come from the policy as it is now, called by this number. RunFailed: they would not. EngineLost: one
        is gone; to `mend` that brings them to all."""

    def speak_to(self, roles: Roles) -> None:
        """The same roles, built anew, connected again."""

    def mend(self, lost: EngineLost, version: int) -> None:
        """Have another engine in the place of one that is gone, and all with the policy as it is now, called by this
        number; or raise that."""


def publishing_of(options: RLOptions, roles: Roles, prompts: PromptStore, passes: Passes) -> Publishing:
    probe = Probe(options, roles, prompts, passes) if options.uses_vllm else None
    if options.engines_apart:
        assert probe is not None
        return SentWeights(options, roles, probe)
    return SharedWeights(roles.rollouts, probe)


class SharedWeights:
    def __init__(self, rollouts: Group, probe: Probe | None):
        """`probe`: of an engine that takes a copy."""
        self.rollouts, self.probe = rollouts, probe

    def connect(self) -> None:
        if self.probe is not None:
            self.probe.measure_start()

    def publish(self, version: int) -> None:
        self.rollouts.call("weights_changed", version=version)
        if self.probe is not None:
            self.probe.check(version)

    def speak_to(self, roles: Roles) -> None:
        self.rollouts = roles.rollouts
        if self.probe is not None:
            self.probe.roles = roles

    def mend(self, lost: EngineLost, version: int) -> None:
        raise lost


class SentWeights:
    def __init__(self, options: RLOptions, roles: Roles, probe: Probe):
        self.options, self.roles, self.probe = options, roles, probe
        self.replaced = 0  # engines, of --max_restarts

    def connect(self) -> None:
        offers, found = self.roles.actor.call("offer_link"), self.roles.rollouts.call("seats")
        library, asked = offers[0]["library"], self.options.vllm_sync_backend
        backend = asked if asked == GLOO else library
        if backend != asked and self.options.asks("vllm_sync_backend"):
            why = "needs accelerators" if library == GLOO else "is another device's"
            print(f"--vllm_sync_backend {asked} {why}: {library} is used", flush=True)
        plan = plan_transfer(
            offers,
            [seat for engine in found for seat in engine],
            backend=backend,
            tensors=offers[0]["tensors"],
            about=offers[0]["about"],
            patience=self.options.hang_timeout,
        )
        # Each waits for the other.
        pending = [role.start("join_links", plan=plan) for role in (self.roles.actor, self.roles.rollouts)]
        for call in reversed(pending):  # a lost engine is noticed while engines are waited for
            call.wait()
        self.probe.measure_start()

    def publish(self, version: int) -> None:
        self._send(version)

    def mend(self, lost: EngineLost, version: int) -> None:
        while True:
            self.replaced += 1
            if self.replaced > self.options.max_restarts:
                raise lost
            print(f"{lost}; engine {self.replaced} of {self.options.max_restarts} takes its place", flush=True)
            try:
                self.roles.rollouts.replace_engine(lost)
                self.connect()
                return self._send(version)
            except EngineLost as another:
                lost = another

    def _send(self, version: int) -> None:
        sending = self.roles.actor.start("send_weights")
        receiving = self.roles.rollouts.start("receive_weights", version=version)
        for call in (receiving, sending):  # a lost engine is noticed while engines are waited for
            call.wait()
        self.probe.check(version)

    def speak_to(self, roles: Roles) -> None:
        self.roles = self.probe.roles = roles
        self.connect()
