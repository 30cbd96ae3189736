"""The policy's side of weights that go to engines apart from it."""

from typing import Any

from trimtab.config.jobs import RLOptions
from trimtab.distributed.device import Device
from trimtab.distributed.weight_transfer import TransferPlan, TransferSender
from trimtab.models.policy import Policy
from trimtab.models.weight_export import WeightExport


def handover_of(options: RLOptions, policy: Policy) -> WeightExport:
    return WeightExport(policy, bf16=options.bf16, adapters=options.vllm_sync_lora == "adapter")


class Sending:
    """In every process of the policy: of a split one all gather, and those that have a link send."""

    def __init__(self, handover: WeightExport, device: Device):
        self.handover = handover
        self._outgoing = TransferSender(device.torch)

    def offer(self) -> dict[str, Any]:
        """Where to connect to, and what will be sent."""
        about = {"adapter_config": self.handover.adapter_config()} if self.handover.adapters else {}
        return {**self._outgoing.offer(), "tensors": self.handover.described(), "about": about}

    def open(self, plan: TransferPlan) -> None:
        self._outgoing.open(plan)

    def send(self) -> None:
        self._outgoing.send(self.handover.tensors())

    def close(self) -> None:
        self._outgoing.close()
