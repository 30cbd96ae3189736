"""The parts of a live page, as functions of a run's folder."""

import json
import os
import re
import signal
import subprocess
import sys

import httpx
import pytest

from tests.report.live_runs import EVIL, add_answer, add_row, events, rl_run, served, write_answers
from tests.report.pages import Checked, write_episode_run, write_run
from trimtab.report.assets import LIVE_STYLE, SCRIPT
from trimtab.report.live_page import LiveIndex, LiveRun, index_page, run_page, tokens
from trimtab.report.rollouts import answers


def board(folder) -> LiveRun:
    found = LiveRun(folder, every=0.0)
    found.resting = 0.0
    found.look()
    return found


@pytest.mark.parametrize("job", ["sft", "rm", "prm", "dpo", "kto", "kd", "grpo", "episodes"])
def test_the_page_of_every_job_is_whole_and_fetches_nothing_from_elsewhere(tmp_path, job):
    folder = tmp_path / job
    {"grpo": rl_run, "episodes": write_episode_run}.get(job, lambda folder: write_run(folder, job))(folder)
    page = run_page(board(folder), "x-1", 1, several=False)
    checked = Checked(page)
    assert "Curves" in page and "<svg" in page and "script" in checked.tags and "style" not in checked.tags
    asked = {value for name, value in checked.attributes if name in ("src", "href")}
    assert all(value.startswith(("/", "#", "data:,")) and not value.startswith("//") for value in asked)
    assert not any(name.startswith("on") for name, _ in checked.attributes)
    for text in (page, LIVE_STYLE, SCRIPT):
        assert "http:" not in text and "https:" not in text and "@import" not in text and "url(" not in text


def test_a_folder_without_a_run_says_so_and_shows_the_run_that_begins_later(tmp_path):
    folder = tmp_path / "later"
    found = board(folder)
    assert "No run here yet" in found.sections["head"][1] and found.sections["curves"][1] == ""
    Checked(run_page(found, "x-1", 1, several=False))
    rl_run(folder)
    found.look()
    assert "iteration 4 of 4" in found.sections["head"][1] and "<svg" in found.sections["curves"][1]


def test_only_what_has_changed_is_new(tmp_path):
    folder = rl_run(tmp_path)
    found = board(folder)
    first = found.version
    assert found.look() == first and found.since(first) == {}
    add_row(folder, 5)
    changed = found.since(first) if found.look() > first else {}
    assert {"head", "curves"} <= changed.keys() and not {"answers", "configuration", "what"} & changed.keys()


def test_a_group_stands_side_by_side_the_best_first(tmp_path):
    html = answers(board(rl_run(tmp_path)).followed.run)
    assert "Answers of iteration 2" in html and "row 7: 4 answers, mean reward 0.375" in html
    assert [float(reward) for reward in re.findall(r"<b>reward ([\d.]+)</b>", html)] == [0.75, 0.5, 0.25, 0]
    assert re.findall(r'data-step="2" data-answer="(\d)"', html) == ["3", "2", "1", "0"]


@pytest.mark.parametrize(("asked", "shown"), [(None, 9), (1, 1), (4, 1), (5, 5), (8, 5), (99, 9), (0, 1)])
def test_the_iteration_shown_is_the_last_one_kept_until_then(tmp_path, asked, shown):
    run = board(rl_run(tmp_path, steps=(1, 5, 9))).followed.run
    html = answers(run, asked)
    assert f"123 {shown}.0" in html and f'data-step="{shown}"' in html
    earlier, later = {1: ("", 5), 5: (1, 9), 9: (5, "")}[shown]
    assert f'data-earlier="{earlier}" data-later="{later}" data-first="1" data-newest="9"' in html


def test_conversations_of_agents_are_there_turn_by_turn(tmp_path):
    html = answers(board(write_episode_run(tmp_path / "run")).followed.run)
    assert "Episodes of iteration 40" in html and html.count('<li class="world">') >= 2
    assert "&lt;tool_call&gt;" in html and "<b>seven</b>" not in html


def test_what_a_model_writes_stays_text(tmp_path):
    folder = rl_run(tmp_path, response=EVIL, prompt=EVIL, label=EVIL, finish=EVIL)
    page = run_page(board(folder), "x-1", 1, several=False)
    row = {"texts": [EVIL, EVIL], "drawn": [1, 1], "log_probs": [-1.0]}
    for html in (page, tokens(row, 1.0)):
        checked = Checked(html)
        assert "img" not in checked.tags and html.count("<script") == (html is page)
        assert "alert(1)&lt;/script&gt;" in html


def classes(html: str) -> list[str]:
    return re.findall(r'<span class="?([^">]*)"?[ >]', html)


def test_tokens_are_coloured_by_log_prob_advantage_and_mask():
    row = {"texts": ["a", "b\n", "world", "c", "d"], "drawn": [2, 1, 2], "log_probs": [-0.001, -5.0, None, -0.6]}
    row |= {"advantages": [[2.0, 1], [-1.0, 1], [0.0, 2]]}
    html = tokens(row, scale=2.0)
    assert classes(html) == ["drawn p0 a3", "drawn p5 b2", "world", "drawn", "drawn p2"]
    assert 'data-facts="-5.000 -1"' in html and "b<i>↵</i>\n" in html
    assert re.findall(r'<li class="(\w+)">', html) == ["drawn", "world", "drawn"]
    Checked(html)


def test_tokens_that_were_left_out_are_counted():
    html = tokens({"texts": list("abc"), "drawn": [3], "log_probs": [-1, -1, -1], "left_out": [2, 4000]}, 0.0)
    assert re.sub("<[^>]*>", "", html) == "ab … 4,000 tokens are not kept … c"


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"texts": 3, "drawn": "x"},
        {"texts": ["a"], "drawn": [9, -1, None]},
        {"texts": ["a"], "drawn": [1]},
        {"texts": ["a"], "drawn": [1], "log_probs": ["x"], "advantages": [[1], 2, [None, 1]], "left_out": [1]},
    ],
)
def test_a_damaged_row_of_tokens_is_no_accident(row):
    Checked(tokens(row, 1.0))


def test_tokens_are_found_as_they_are_appended_and_after_a_run_went_back(tmp_path):
    folder = rl_run(tmp_path)
    found = board(folder).tokens
    assert "2.3" in found.answer(2, 3) and found.answer(3, 0) == ""
    write_answers(folder, steps=(3,))
    assert "3.0" in found.answer(3, 0)
    # A resumed run writes the file anew without what came after its checkpoint.
    kept = [line for line in (folder / "tokens.jsonl").read_text().splitlines() if json.loads(line)["step"] < 2]
    (folder / "new").write_text("\n".join(kept) + "\n")
    (folder / "new").replace(folder / "tokens.jsonl")
    assert found.answer(3, 0) == "" and "1.2" in found.answer(1, 2)
    with (folder / "tokens.jsonl").open("a") as file:
        file.write('{"step": 2, "answer": 0, "texts": ["half')
    assert found.answer(2, 0) == ""


def test_a_file_written_over_with_more_is_read_anew(tmp_path):
    """A new run may get the very file, as the system counts files, that an old one had."""
    folder = rl_run(tmp_path)
    found = board(folder).tokens
    before = found.answer(1, 0)
    text = (folder / "tokens.jsonl").read_text()
    (folder / "tokens.jsonl").write_text('{"step": 7, "answer": 0, "texts": ["new"], "drawn": [1]}\n' + text)
    assert before and found.answer(1, 0) == before and ">new<" in found.answer(7, 0)


def test_advantages_of_one_iteration_have_one_scale(tmp_path):
    found = board(rl_run(tmp_path)).tokens  # -1.5, -0.5, 0.5, 1.5
    assert ["a3" in found.answer(2, 3), "b3" in found.answer(2, 0), "a1" in found.answer(2, 2)] == [True] * 3


def test_several_runs_have_an_index(tmp_path):
    boards = [
        LiveRun(folder, 0.0) for folder in (rl_run(tmp_path / "a"), write_run(tmp_path / "b", "sft"), tmp_path / "c")
    ]
    index = LiveIndex(boards, 0.0)
    index.look()
    page = index_page(index, "x-1")
    Checked(page)
    assert all(f"href='/run/{number}'" in page for number in (1, 2, 3)) and "held-out success" in page
    assert boards[0].look() == 1 and "<svg" in boards[0].sections["curves"][1], "drawn whole when it is opened"
    assert "all runs" in run_page(boards[0], "x-1", 1, several=True)


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
        for path, code in (("1/tokens/9/9", 404), ("3", 404), ("2/answers/1", 200)):
            assert client.get(f"/run/{path}").status_code == code
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
    words = [sys.executable, "-m", "trimtab.cli.main", "watch", "--page", str(rl_run(tmp_path)), "--every", "0.1"]
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


def test_a_port_that_is_taken_is_one_line(served_run, tmp_path, trimtab):
    taken = f"--port {served_run.base_url.port}"
    assert taken in trimtab(f"watch --page {rl_run(tmp_path)} {taken}").mistake


def test_without_the_servers_packages_the_way_to_them_is_one_line(tmp_path, trimtab, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("trimtab.report.live_page", "trimtab.server"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'trimtab[serve]'" in trimtab(f"watch --page {rl_run(tmp_path)}").mistake
