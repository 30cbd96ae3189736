"""What each kind of device offers, as a table. No other file says what one of them can or cannot do.

What a device does not offer falls back where something else gives the same numbers (kernels, graphs, fused optimiser,
attention over packed rows, sums in double precision), and is refused where nothing does (`LACKING`), before anything is
loaded.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Kind:
    name: str  # for people
    collectives: str | None = None
    """The library between the processes of several devices; None: whichever torch knows for it, if it knows one."""
    interface: str | None = None
    """Environment: the network interface that this library is to use."""
    resource: str | None = None
    """What Ray calls such devices; None: Ray does not count them."""
    visible: str | None = None
    """Environment: the devices that a process is to see, and Ray's switch to leave that as it is."""
    left_visible: str | None = None
    extension: str | None = None
    """The package that brings the device to torch."""
    bf16: bool = False
    """It is known to work; else it is tried before the first step."""
    float64: bool = False
    """In kernels and collectives alike."""
    fused_adam: bool = False
    triton: bool = False
    ptx: bool = False
    """Its instructions can stand inside Triton's kernels."""
    graphs: bool = False
    """Captured work, with Triton's kernels in it."""
    varlen: bool = False
    """torch's own attention of sequences of any length, in half precision."""
    wide_products: bool = False
    """Products of half-precision matrices with a single-precision result."""
    shared_memory: bool = False
    """Processes on one device can see each other's tensors."""
    lacks: frozenset[str] = frozenset()
    """Of LACKING, what is refused there."""

    def lacking(self, feature: str) -> str | None:
        """This device's name, if a run that asks for the feature is refused there."""
        assert feature in LACKING, feature
        return self.name if feature in self.lacks else None


# What a run can ask for and a device may not offer: config/support.py says which options do, and what to do instead.
LACKING = frozenset({"ring attention", "tensor parallel", "sleeping engines", "four bit", "liger", "flash-attn"})

CUDA = Kind(
    "an NVIDIA GPU",
    collectives="nccl",
    interface="NCCL_SOCKET_IFNAME",
    resource="GPU",
    visible="CUDA_VISIBLE_DEVICES",
    left_visible="RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    bf16=True,
    float64=True,
    fused_adam=True,
    triton=True,
    ptx=True,
    graphs=True,
    varlen=True,
    wide_products=True,
    shared_memory=True,
)

KINDS = {
    "cpu": Kind("a CPU", collectives="gloo", float64=True, fused_adam=True),
    "cuda": CUDA,
    # What torch calls cuda too, where it was built for ROCm.
    "rocm": replace(
        CUDA,
        name="an AMD GPU",
        ptx=False,
        visible="HIP_VISIBLE_DEVICES",
        left_visible="RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
    ),
    "npu": Kind(
        "an Ascend NPU",
        collectives="hccl",
        interface="HCCL_SOCKET_IFNAME",
        resource="NPU",
        visible="ASCEND_RT_VISIBLE_DEVICES",
        left_visible="RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
        extension="torch_npu",
        # Of flash attention transformers has the device's own operator, so that its package is not needed.
        lacks=LACKING,
    ),
    "xpu": Kind(
        "an Intel GPU",
        collectives="xccl",
        resource="GPU",
        visible="ZE_AFFINITY_MASK",
        left_visible="RAY_EXPERIMENTAL_NOSET_ZE_AFFINITY_MASK",
        fused_adam=True,
        lacks=frozenset({"sleeping engines", "liger"}),
    ),
    "mps": Kind("an Apple GPU", fused_adam=True, lacks=frozenset({"sleeping engines", "four bit", "liger"})),
}
OTHER = Kind("this accelerator", lacks=frozenset({"sleeping engines", "four bit", "liger"}))

RESOURCES = tuple(dict.fromkeys(kind.resource for kind in KINDS.values() if kind.resource))
INTERFACES = tuple(dict.fromkeys(kind.interface for kind in KINDS.values() if kind.interface))


def of_resource(resource: str | None) -> Kind:
    """The devices of a Ray cluster, before a process sees them: the first kind of those that share a name there."""
    return next((kind for kind in KINDS.values() if kind.resource == resource), KINDS["cpu"])
