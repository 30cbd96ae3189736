"""An HTTP server in a thread that answers a JSON object with another, for as long as a test needs it."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextlib.contextmanager
def answering(answer: Callable[..., Any], with_request: bool = False, headers: Any = ()) -> Iterator[str]:
    """The server's address. An answer that gets the request too, its path and headers, gives a status and an object, or
    the bytes of a reply. The body of a GET is None."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(None)

        def do_POST(self):
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body):
            status, reply = answer(body, self) if with_request else (200, answer(body))
            content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            for name, value in [("Content-Length", str(len(content))), *headers]:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # connections at once, which would be reset beyond it

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
