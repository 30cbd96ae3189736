"""`trimtab serve`: from the command to an answer, and its end."""

import signal
import socket
import subprocess
import sys

import httpx

from trimtab.cli.main import main
from trimtab.embedded.sort_task import make_model, make_tokenizer


def test_it_serves_a_model_folder_and_ends_when_told(tmp_path):
    make_model(0).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    words = [sys.executable, "-m", "trimtab.cli.serve", str(tmp_path / "model"), "--port", "0"]
    with subprocess.Popen([*words, "--served_model_name", "sorter"], stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("serving sorter at http://127.0.0.1:")
            with httpx.Client(base_url=line.split()[-1], timeout=60) as client:
                assert client.get("/v1/models").json()["data"][0] | {"created": 0} == {
                    **{"id": "sorter", "object": "model", "created": 0, "owned_by": "trimtab", "root": "sorter"},
                    **{"parent": None, "max_model_len": 256},
                }
                body = {"model": "sorter", "messages": [{"role": "user", "content": "231"}], "max_tokens": 5}
                reply = client.post("/v1/chat/completions", json=body)
                assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] <= 5
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_mistakes_are_one_line(tmp_path, capsys):
    assert main(["serve"]) == 2
    assert capsys.readouterr().err.startswith("trimtab serve: error: --pretrain is missing")
    assert main(["serve", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    make_model(0).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(tmp_path / "model"), "--port", port]) == 2
    assert "cannot listen there" in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "model"), "--max_model_len", "1"]) == 2


def test_a_server_for_everybody_without_a_token_is_warned_of(capsys, monkeypatch):
    monkeypatch.delenv("TRIMTAB_BEARER_TOKEN", raising=False)
    assert main(["serve", "a/b", "--host", "0.0.0.0", "--dry_run"]) == 0
    printed = capsys.readouterr()
    assert "give a --bearer_token" in printed.err and "pretrain: a/b" in printed.out
