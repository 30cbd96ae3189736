"""Messages between a run and a process of its own, of which neither waits for the other. At the other end is a
multiprocessing Connection, whose way to mark lengths this is."""

import socket
import struct

LARGEST = 2**28
AT_ONCE = 2**20
LENGTH = struct.Struct("!i")


class TooLarge(Exception):
    """A message that nobody wants to hold."""


class Channel:
    def __init__(self, end: socket.socket):
        end.setblocking(False)
        self._end = end
        self._incoming, self._outgoing = bytearray(), bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def has_more(self) -> bool:
        """Whether messages wait to be sent."""
        return bool(self._outgoing)

    def send(self, message: bytes) -> None:
        """Now, or when `flush` is called and there is room."""
        assert len(message) <= LARGEST, f"a message of {len(message)} bytes"
        whole = LENGTH.pack(len(message)) + message
        if not self._outgoing and len(whole) <= AT_ONCE:  # nearly always; nothing is copied for it
            try:
                whole = whole[self._end.send(whole) :]
            except BlockingIOError:
                pass
            except OSError:  # as below
                return
        if whole:
            self._outgoing += whole
            self.flush()

    def flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._end.send(memoryview(self._outgoing)[:AT_ONCE].tobytes())]
        except BlockingIOError:
            return
        except OSError:  # whoever receives learns that the other end is gone
            self._outgoing.clear()

    def receive(self) -> list[bytes]:
        """All that is there. EOFError: nothing more will come."""
        ended = False
        try:
            while len(chunk := self._end.recv(AT_ONCE)):
                self._incoming += chunk
            ended = True
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        messages = self._whole()
        if ended and not messages:
            raise EOFError
        return messages

    def _whole(self) -> list[bytes]:
        messages, start = [], 0
        while len(self._incoming) >= start + LENGTH.size:
            (length,) = LENGTH.unpack_from(self._incoming, start)
            if not 0 <= length <= LARGEST:
                raise TooLarge
            end = start + LENGTH.size + length
            if len(self._incoming) < end:
                break
            messages.append(bytes(self._incoming[start + LENGTH.size : end]))
            start = end
        del self._incoming[:start]
        return messages
