"""The machines of a cluster, as far as a plan must know them, and how fast bytes go between their devices."""

from dataclasses import dataclass

from trimtab.errors import UserError
from trimtab.plan.hardware import Hardware

LINK_SHARE = 0.7  # of a link's speed that a collective reaches
MAIN_MEMORY = 25e9  # bytes a second that one process reads and writes where the optimiser is in main memory


@dataclass(frozen=True)
class Machines:
    hardware: Hardware
    nodes: int
    gpus: int
    """Devices of each machine."""
    network: float
    """Bytes a second in and out of a machine, all its cards together."""

    def __post_init__(self) -> None:
        hardware = self.hardware
        if not hardware.accelerator:
            raise UserError("--nodes and --gpus plan accelerators: name one with --on, for example --on A100-80G")
        if hardware.link is None or hardware.bandwidth is None:
            raise UserError(f"{hardware.name}: how fast it is is not known; name another device with --on")

    @property
    def devices(self) -> int:
        return self.nodes * self.gpus

    def within(self) -> float:
        """Bytes a second between devices of one machine."""
        assert self.hardware.link is not None
        return LINK_SHARE * self.hardware.link

    def between(self) -> float:
        """Bytes a second that one device sends to another machine, over its share of the cards."""
        return LINK_SHARE * self.network / self.gpus

    def collective(self, devices: int, stride: int = 1) -> float:
        """Bytes a second through each device of so many that gather or sum together, machine by machine in a ring: the
        slower of what devices and machines pass on. `stride` n: only every n-th device is in the ring, and the
        others have rings of their own at the same time."""
        if devices * stride <= self.gpus:
            return self.within()
        return min(self.within(), LINK_SHARE * self.network / min(stride, self.gpus))

    def gathering(self, size: float, devices: int, stride: int = 1) -> float:
        """Seconds in which each of the devices gets all of a model that is split over them; as many as it takes to add
        gradients up and split them."""
        return size * (devices - 1) / devices / self.collective(devices, stride) if devices > 1 else 0.0

    def moving(self, size: float) -> float:
        """Seconds in which each device moves so much to main memory, or back."""
        return size / (LINK_SHARE * self.hardware.host_link)

    def in_words(self) -> str:
        hardware = self.hardware
        assert hardware.link is not None
        return (
            f"{LINK_SHARE:.0%} used of {hardware.link / 1e9:g} GB/s between devices of a machine, "
            f"{self.network / 1e9:g} GB/s in and out of a machine, {hardware.host_link / 1e9:g} GB/s to main memory"
        )
