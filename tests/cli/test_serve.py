"""`trimtab serve`: from the command to an answer, and its end."""

import contextlib
import os
import secrets
import signal
import socket
import threading
import time

import httpx
import pytest

from trimtab.cli.main import main
from trimtab.embedded.sort_task import make_model, make_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_it_serves_a_model_folder_and_ends_when_told(model, capsys, signals, monkeypatch):
    monkeypatch.delenv("TRIMTAB_BEARER_TOKEN", raising=False)
    make, made = secrets.token_urlsafe, []
    monkeypatch.setattr(secrets, "token_urlsafe", lambda size: made.append(make(size)) or made[0])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = []

    def talk():
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            while not found:
                with contextlib.suppress(httpx.ConnectError):
                    assert client.get("/v1/models").status_code == 401
                    client.headers["Authorization"] = f"Bearer {made[0]}"
                    found.append(client.get("/v1/models").json()["data"][0])
                time.sleep(0.02)
            body = {"model": "sorter", "messages": [{"role": "user", "content": "231"}], "max_tokens": 5}
            found.append(client.post("/v1/chat/completions", json=body))
        os.kill(os.getpid(), signal.SIGTERM)

    talking = threading.Thread(target=talk)
    talking.start()
    assert main(["serve", model, "--port", str(port), "--served_model_name", "sorter"]) == 0
    talking.join(30)
    printed = capsys.readouterr()
    assert printed.out == f"serving sorter at http://127.0.0.1:{port}\n"
    assert f"clients send the API key {made[0]} (" in printed.err and len(made[0]) >= 32
    assert found[0]["id"] == "sorter" and found[0]["max_model_len"] == 256
    assert found[1].status_code == 200 and found[1].json()["usage"]["completion_tokens"] <= 5


def test_mistakes_are_one_line(model, tmp_path, trimtab):
    assert trimtab("serve").mistake.startswith("--pretrain is missing")
    absent = trimtab(f"serve {tmp_path}/nowhere")
    assert absent.code == 2 and "nowhere" in absent.err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = trimtab(f"serve {model} --port {taken.getsockname()[1]}")
    assert done.code == 2 and "cannot listen there" in done.err
    assert trimtab(f"serve {model} --max_model_len 1").code == 2


def test_a_server_for_everybody_without_a_token_is_warned_of(trimtab, monkeypatch):
    monkeypatch.delenv("TRIMTAB_BEARER_TOKEN", raising=False)
    made = trimtab("serve a/b --host 0.0.0.0 --dry_run")
    assert made.code == 0 and "--bearer_token" not in made.err, "it makes one"
    open_to_all = trimtab("serve a/b --host 0.0.0.0 --bearer_token none --dry_run")
    assert open_to_all.code == 0 and "pretrain: a/b" in open_to_all.out
    assert "give a --bearer_token" in open_to_all.err
