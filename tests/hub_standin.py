"""A stand-in for the Hugging Face hub at this machine: it makes repositories and takes files, small and large ones."""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_stand_in"


class HubStandin:
    """`files`: content by repository and path; `private`: whether each repository is; `asked`: every request;
    `broken`: the beginning of paths at which it fails; `role`: of the token."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.asked: list[str] = []
        self.broken: str | None = None
        self.role = "write"
        self.large: dict[str, bytes] = {}
        self.url = ""

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, dict]:
        self.asked.append(f"{method} {path}")
        if path.startswith("/large/"):
            self.large[path.removeprefix("/large/")] = body
            return 200, {}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials"}
        if self.broken and path.startswith(self.broken):
            return 507, {"error": "no room on the hub"}
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "type": "user", "auth": {"accessToken": {"role": self.role}}}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            known = name in self.files
            self.files.setdefault(name, {})
            self.private.setdefault(name, asked.get("private") or asked.get("visibility") == "private")
            return (409 if known else 200), {"url": f"{self.url}/{name}", "name": name}
        repo = next((name for name in self.files if f"/{name}" in path), "")
        if path.endswith("/preupload/main"):
            listed = [{"path": file["path"], "shouldIgnore": False} for file in json.loads(body)["files"]]
            modes = [{"uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular"} for file in listed]
            return 200, {"files": [file | mode for file, mode in zip(listed, modes)]}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for one in objects:
                one["actions"] = {"upload": {"href": f"{self.url}/large/{one['oid']}"}}
            return 200, {"transfer": "basic", "objects": objects}
        if path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[repo][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    content = self.large[value["oid"]]
                    assert hashlib.sha256(content).hexdigest() == value["oid"], "all of it has arrived"
                    self.files[repo][value["path"]] = content
            return 200, {"commitUrl": f"{self.url}/{repo}/commit/1", "commitOid": "1", "hookOutput": ""}
        return 404, {"error": f"{method} {path} is not of this stand-in"}


@contextlib.contextmanager
def hub_standin(monkeypatch) -> Iterator[HubStandin]:
    """huggingface_hub in this process, and in those it starts, speaks to it."""
    from huggingface_hub import constants

    hub = HubStandin()

    class Handler(BaseHTTPRequestHandler):
        def do(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path, _, _ = self.path.partition("?")
            status, reply = hub.answer(self.command, path, self.headers.get("Authorization", ""), body)
            content = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else content)

        do_GET = do_POST = do_PUT = do_HEAD = do

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    own = {"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_TOKEN_PATH": "/no/such/token"}
    for name, value in own.items():
        monkeypatch.setattr(constants, name, value)
    for name, value in {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
