"""Network interfaces of this machine, by their addresses."""

import fcntl
import os
import socket
import struct

from trimtab.distributed.devices import INTERFACES

GET_ADDRESS = 0x8915  # of an interface: SIOCGIFADDR


def speak_at(address: str) -> None:
    """Have the sockets between processes use the interface that has this address, unless another is asked for."""
    if (name := interface_at(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        for variable in INTERFACES:
            os.environ.setdefault(variable, name)


def interface_at(address: str) -> str | None:
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), None)


def address_of(interface: str) -> str | None:
    """Its IPv4 address."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anything:
            asked = struct.pack("256s", interface[:15].encode())
            return socket.inet_ntoa(fcntl.ioctl(anything.fileno(), GET_ADDRESS, asked)[20:24])
    except OSError:
        return None
