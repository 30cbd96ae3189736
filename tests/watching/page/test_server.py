"""The page's server, with a real client."""

import os
import signal
import subprocess
import sys

import httpx
import pytest

from tests.report.pages import write_run
from tests.watching.page.runs import add_answer, add_row, events, rl_run, served
from trimtab.cli.main import main


def test_changes_come_as_events_and_a_client_that_comes_back_gets_what_it_missed(tmp_path):
    folder = rl_run(tmp_path)
    with served(folder) as client:
        with client.stream("GET", "/run/1/events") as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            told = events(reply.iter_lines())
            first, whole = next(told)
            assert {"head", "curves", "answers", "configuration"} <= whole.keys()
            add_row(folder, 5)
            second, changed = next(told)
            assert "curves" in changed and "configuration" not in changed
        add_answer(folder, 5, 0, response="newest")
        for where in ({"params": {"seen": second}}, {"headers": {"last-event-id": second}}):
            with client.stream("GET", "/run/1/events", **where) as reply:
                _, missed = next(events(reply.iter_lines()))
                assert "newest" in missed["answers"] and "configuration" not in missed
        # What another server told is not taken for this one's.
        with client.stream("GET", "/run/1/events", params={"seen": f"other-{second.rpartition('-')[2]}"}) as reply:
            assert "configuration" in next(events(reply.iter_lines()))[1]
    assert first != second


def test_answers_of_an_iteration_and_their_tokens_are_there_on_demand(tmp_path):
    with served(rl_run(tmp_path / "a"), write_run(tmp_path / "b", "sft")) as client:
        assert "Answers of iteration 2" in client.get("/run/1").text
        assert "123 1.0" in client.get("/run/1/answers/1").text
        assert '<span class="drawn p0' in client.get("/run/1/tokens/1/2").text
        assert [client.get(f"/run/{path}").status_code for path in ("1/tokens/9/9", "3", "2/answers/1")] == [
            404,
            404,
            200,
        ]
        assert "href='/run/2'" in client.get("/").text
    with served(tmp_path / "a") as client:
        assert client.get("/").headers["location"] == "/run/1"


@pytest.mark.parametrize("path", ["/", "/run/1", "/run/1/events", "/page.js", "/nowhere"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "10.0.0.1", "[::2]:1"]
)
def test_a_name_that_is_not_this_machine_s_gets_nothing(served_run, path, host):
    reply = served_run.get(path, headers={"host": host})
    assert reply.status_code == 421 and "grpo" not in reply.text


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1:8000", "[::1]:7", "127.0.0.2"])
def test_a_tunnel_s_port_is_as_good_as_another(served_run, host):
    assert served_run.get("/run/1", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
def test_only_get_is_answered(served_run, method):
    assert served_run.request(method, "/run/1").status_code == 405


def test_a_number_of_any_length_is_no_accident(served_run):
    assert served_run.get(f"/run/1/answers/{'9' * 5000}").status_code == 404


def test_other_sites_may_lead_here_and_not_look_in(served_run):
    elsewhere = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
    assert served_run.get("/run/1", headers=elsewhere).status_code == 403
    assert served_run.get("/run/1", headers=elsewhere | {"sec-fetch-mode": "navigate"}).status_code == 200


def test_every_answer_forbids_all_but_this_server_s_own_script(served_run):
    for path in ("/run/1", "/page.js", "/nowhere", "/run/1/answers/1"):
        policy = dict(
            part.split(" ", 1) for part in served_run.get(path).headers["content-security-policy"].split("; ")
        )
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"


@pytest.fixture(scope="module")
def served_run(tmp_path_factory):
    with served(rl_run(tmp_path_factory.mktemp("run") / "grpo")) as client:
        yield client


def test_the_command_says_where_it_is_and_ends_with_a_listener_at_ctrl_c(tmp_path):
    words = [sys.executable, "-m", "trimtab.cli.watch", "--page", str(rl_run(tmp_path)), "--every", "0.1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            place = next(word for word in line.split() if word.startswith("http://127.0.0.1:"))
            with httpx.stream("GET", f"{place}/run/1/events", timeout=60, trust_env=False) as reply:
                next(events(reply.iter_lines()))
                os.kill(process.pid, signal.SIGINT)
                assert process.wait(60) == 0  # and does not wait for the listener
        finally:
            process.kill()
        assert process.stderr.read() == ""


def test_a_port_that_is_taken_is_one_line(served_run, tmp_path, capsys):
    folder = rl_run(tmp_path)
    assert main(["watch", "--page", str(folder), "--port", str(served_run.base_url.port)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and f"--port {served_run.base_url.port}" in told


def test_without_the_servers_packages_the_way_to_them_is_one_line(tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("trimtab.watching.page.", "trimtab.server"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["watch", "--page", str(rl_run(tmp_path))]) == 2
    assert "pip install 'trimtab[serve]'" in capsys.readouterr().err
