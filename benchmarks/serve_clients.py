"""Clients of a server that ask for completions as fast as they are answered: what serve_speed.py measures with."""

import json
import multiprocessing
import selectors
import socket
import time
from collections.abc import Iterator

PROCESSES = 4  # that they are in

Asked = tuple[list[int], int]  # a prompt, and the tokens of its answer


class Client:
    """One that asks, waits for the whole reply, and asks for the next. Requests are written before the clock runs and
    replies read after it has stopped, so that what it costs to be a client is hardly measured."""

    def __init__(self, requests: list[bytes], numbers: Iterator[int]):
        """`numbers`: of the requests that it makes, which it takes when it is about to."""
        self.requests, self.numbers = requests, numbers
        self.replies: list[tuple[int, bytes]] = []
        self._come, self._whole = bytearray(), 0

    def connect(self, port: int) -> socket.socket:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self.socket

    def ask(self) -> bool:
        """For the next one; whether there was one."""
        self._number = next(self.numbers, None)
        if self._number is not None:
            self.socket.sendall(self.requests[self._number])
        return self._number is not None

    def receive(self) -> bool:
        """What has come; whether it was the last of the last reply."""
        chunk = self.socket.recv(2**20)
        assert chunk, f"the server hung up: {bytes(self._come[:200])!r}"
        self._come += chunk
        if not self._whole and (end := self._come.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._come[:end]).lower()
            self._whole = end + 4 + int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        if not self._whole or len(self._come) < self._whole:
            return False
        self.replies.append((self._number, bytes(self._come)))
        self._come, self._whole = bytearray(), 0
        return not self.ask()

    def drawn(self, asked: list[Asked]) -> int:
        for number, reply in self.replies:
            head, _, body = reply.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), reply[:500]
            assert len(json.loads(body)["choices"][0]["logprobs"]["token_logprobs"]) == asked[number][1]
        return sum(asked[number][1] for number, _ in self.replies)


def _request(model: str, prompt: list[int], tokens: int) -> bytes:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def clients(port: int, model: str, asked: list[Asked], count: int, next_number, ready, answer) -> None:
    """So many clients in one process; they begin together. `next_number`: shared with those in other processes."""
    requests = [_request(model, *one) for one in asked]

    def numbers() -> Iterator[int]:
        while True:
            with next_number.get_lock():
                number = next_number.value
                next_number.value += 1
            if number >= len(asked):
                return
            yield number

    all_of_them = [Client(requests, numbers()) for _ in range(count)]
    ready.wait()
    with selectors.DefaultSelector() as waiting:
        left = 0
        for client in all_of_them:
            waiting.register(client.connect(port), selectors.EVENT_READ, client)
            left += client.ask()
        while left:
            for key, _ in waiting.select():
                if key.data.receive():
                    waiting.unregister(key.fileobj)
                    key.data.socket.close()
                    left -= 1
    ended = time.monotonic()
    answer.put((ended, sum(client.drawn(asked) for client in all_of_them)))


def through_server(port: int, model: str, asked: list[Asked], count: int) -> tuple[float, int]:
    context = multiprocessing.get_context("spawn")
    processes = min(PROCESSES, count)
    ready, answer, next_number = context.Barrier(processes + 1), context.Queue(), context.Value("q", 0)
    parts = [len(range(number, count, processes)) for number in range(processes)]
    started = [
        context.Process(target=clients, args=(port, model, asked, part, next_number, ready, answer)) for part in parts
    ]
    for process in started:
        process.start()
    ready.wait()
    began = time.monotonic()
    ended, drawn = zip(*(answer.get() for _ in started))
    for process in started:
        process.join()
    return max(ended) - began, sum(drawn)
