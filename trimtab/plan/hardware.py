"""Memory and speed of devices, from data sheets or measured on this machine, and of the links between them."""

import math
from dataclasses import dataclass, replace

import torch

from trimtab.distributed.device import Device, total_memory
from trimtab.errors import UserError

GIB = 2**30
LINK_SHARE = 0.7  # of a link's speed that a collective reaches
MAIN_MEMORY = 25e9  # bytes a second that one process reads and writes with the optimizer in main memory


@dataclass(frozen=True)
class Hardware:
    """Figures of a data sheet: dense FLOP/s in bf16 and fp32, bytes a second of memory bandwidth."""

    name: str
    memory: int
    bf16_flops: float | None = None
    """None: unknown, and no time is predicted."""
    fp32_flops: float | None = None
    bandwidth: float | None = None
    accelerator: bool = True
    program: int = 0
    """Bytes of this memory in use before anything is loaded."""
    growth: int = 0
    """Bytes that the program takes more once it trains."""
    link: float | None = None
    """Bytes a second to other devices of the machine, in each direction."""
    host_link: float = 25e9
    """Bytes a second to and from main memory."""

    def flops(self, bf16: bool) -> float | None:
        return self.bf16_flops if bf16 else self.fp32_flops


GROWTH = 18 * 2**20  # in main memory: modules imported late, threads, buffers of matrix products (10 MiB)
# Rough figures per core: with 256-bit vectors, and a desktop's memory.
CORE_FLOPS, CORE_BANDWIDTH = 50e9, 10e9

NAMED = {
    "A100-40G": Hardware("A100-40G", int(39.4 * GIB), 312e12, 19.5e12, 1.555e12, link=300e9),
    "A100-80G": Hardware("A100-80G", int(79.2 * GIB), 312e12, 19.5e12, 2.039e12, link=300e9),
    "A800-80G": Hardware("A800-80G", int(79.2 * GIB), 312e12, 19.5e12, 2.039e12, link=200e9),
    "H100": Hardware("H100", int(79.2 * GIB), 989e12, 67e12, 3.35e12, link=450e9, host_link=50e9),
    "H200": Hardware("H200", int(139.8 * GIB), 989e12, 67e12, 4.8e12, link=450e9, host_link=50e9),
    "B200": Hardware("B200", int(178 * GIB), 2250e12, 80e12, 8e12, link=900e9, host_link=50e9),
    "MI300X": Hardware("MI300X", int(191 * GIB), 1307e12, 163e12, 5.3e12, link=448e9, host_link=50e9),
    "L40S": Hardware("L40S", int(44.4 * GIB), 362e12, 91.6e12, 0.864e12, link=25e9),
    "RTX-3090": Hardware("RTX-3090", int(23.6 * GIB), 71e12, 35.6e12, 0.936e12, link=25e9),
    "RTX-4090": Hardware("RTX-4090", int(23.5 * GIB), 165e12, 82.6e12, 1.008e12, link=25e9),
}
# A name without its memory size means the larger variant.
SHORT = {"A100": "A100-80G", "A800": "A800-80G", "H100-80G": "H100"}


def named(name: str, here: Device, memory_gib: float | None = None) -> Hardware:
    """The hardware called `name`; "here" and "CPU" mean this machine's. `memory_gib`: replaces the device's memory."""
    wanted = name.replace(" ", "-").upper()
    wanted = SHORT.get(wanted, wanted)
    if wanted in NAMED:
        found = NAMED[wanted]
    elif wanted in ("HERE", "CPU"):
        found = of_device(here if wanted == "HERE" else Device(torch.device("cpu"), "CPU"))
    else:
        raise UserError(f"--on {name}: not known; give here, CPU or one of {', '.join(NAMED)}")
    if memory_gib is None:
        return found
    memory = int(memory_gib * GIB) if math.isfinite(memory_gib) else 0
    if memory <= 0:
        raise UserError(f"--device_memory is {memory_gib:g}: it must be a number of GiB above 0")
    return replace(found, memory=memory)


def of_device(device: Device) -> Hardware:
    memory = total_memory(device.torch)
    if not device.is_accelerator:
        cores = torch.get_num_threads()
        flops = cores * CORE_FLOPS
        bf16 = flops if device.has_fast_bf16() else flops / 2
        program: dict[str, int] = {"program": int(device.memory_gib() * GIB), "growth": GROWTH}
        return Hardware(device.name, memory, bf16, flops, cores * CORE_BANDWIDTH, accelerator=False, **program)
    words = device.name.upper().replace(" ", "-")
    like = [known for name, known in NAMED.items() if name.removesuffix("-40G").removesuffix("-80G") in words]
    if not like:
        return Hardware(device.name, memory)
    return replace(min(like, key=lambda known: abs(known.memory - memory)), name=device.name, memory=memory)


def shared(hardware: Hardware, processes: int) -> Hardware:
    """The hardware of one of `processes`: one device, or a share of main memory."""
    return hardware if hardware.accelerator else replace(hardware, memory=hardware.memory // processes)


@dataclass(frozen=True)
class ClusterHardware:
    """`nodes` machines with `gpus` devices each, and the bandwidth between them. A single device is one machine."""

    hardware: Hardware
    nodes: int = 1
    gpus: int = 1
    network: float = math.inf
    """Bytes a second in and out of a machine, over all its network cards."""

    def require_links(self) -> None:
        if not self.hardware.accelerator:
            raise UserError("--nodes and --gpus plan accelerators: name one with --on, for example --on A100-80G")
        if self.hardware.link is None or self.hardware.bandwidth is None:
            raise UserError(f"{self.hardware.name}: how fast it is is not known; name another device with --on")

    @property
    def devices(self) -> int:
        return self.nodes * self.gpus

    def within(self) -> float:
        """Bytes a second between devices of one machine."""
        return LINK_SHARE * (self.hardware.link or math.inf)

    def between(self) -> float:
        """Bytes a second from one device to another machine, over its share of the network cards."""
        return LINK_SHARE * self.network / self.gpus

    def gathering(self, size: float, devices: int, stride: int = 1) -> float:
        """Seconds of an all-gather or reduce-scatter of `size` bytes over `devices`, in a ring that goes machine by
        machine: the slower of device and network links decides. `stride` n: the ring has every n-th device, and the
        other devices form rings at the same time."""
        if devices == 1:
            return 0.0
        rate = self.within()
        if devices * stride > self.gpus:
            rate = min(rate, LINK_SHARE * self.network / min(stride, self.gpus))
        return size * (devices - 1) / devices / rate

    def moving(self, size: float) -> float:
        """Seconds for each device to copy `size` bytes to or from main memory."""
        return size / (LINK_SHARE * self.hardware.host_link)
