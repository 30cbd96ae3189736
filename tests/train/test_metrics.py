import json
import sys
import threading
import tracemalloc
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import ClassVar

import pytest

from trimtab.config.training_options import LoggingOptions
from trimtab.errors import UserError
from trimtab.train.metrics import MetricsFile, RunLog, WandbLog, open_logs, read_rows


def write(path, steps, resume_from=None):
    file = MetricsFile(path, resume_from=resume_from)
    for step in steps:
        file.write({"step": step, "loss": 1.0 / step})
    file.close()


def test_resuming_removes_rows_after_the_checkpoint_and_a_half_written_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    with path.open("a") as file:
        file.write('{"step": 8, "lo')
    write(path, range(5, 10), resume_from=4)
    assert [row["step"] for row in read_rows(path)] == list(range(1, 10))


def test_a_new_run_in_an_old_folder_keeps_the_old_curve_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for count in (2, 3, 4):
        write(path, range(1, count + 1))
    assert len(read_rows(path)) == 4
    assert [len(read_rows(tmp_path / f"metrics.{n}.jsonl")) for n in (1, 2)] == [2, 3]


def test_visualdl_gets_the_same_numbers_in_a_folder_of_the_run(tmp_path):
    visualdl = pytest.importorskip("visualdl")
    (log,) = open_logs(LoggingOptions(use_visualdl=str(tmp_path / "board"), wandb_run_name="mine"), {}, tmp_path)
    for step in (1, 2):
        log.write({"step": step, "loss": 1.0 / step, "eval_loss": 3.0, "device": "cpu", "grad_norm": float("nan")})
    log.close()
    (records,) = (tmp_path / "board" / "mine").iterdir()
    reader = visualdl.LogReader(file_path=str(records))
    assert sorted(reader.get_tags()["scalar"]) == ["eval/loss", "train/loss"]
    assert [(point.id, point.value) for point in reader.get_data("scalar", "train/loss")] == [(1, 1.0), (2, 0.5)]


class Records:
    """Stands for VisualDL's writer: a new record for each that is opened."""

    opened: ClassVar[list[list[tuple]]] = []

    def __init__(self, logdir):
        self.opened.append([])

    def add_scalar(self, tag, value, step):
        self.opened[-1].append((tag, value, step))

    def flush(self):
        pass

    close = flush


def test_the_newest_visualdl_record_of_a_resumed_run_tells_all_of_it(tmp_path, monkeypatch):
    """VisualDL's server reads no other record of a folder."""
    monkeypatch.setitem(sys.modules, "visualdl", SimpleNamespace(LogWriter=Records))
    monkeypatch.setattr(Records, "opened", [])
    options = LoggingOptions(use_visualdl=str(tmp_path / "board"), logging_steps=2)
    for start, steps in ((0, range(1, 8)), (4, range(5, 10))):
        log = RunLog(
            options,
            {},
            tmp_path,
            verb="sft",
            total=9,
            start=start,
            resumed=start > 0,
            space=SimpleNamespace(warning=lambda: None),
            shown=lambda row: {},
        )
        for step in steps:
            log.write({"step": step, "loss": 1.0 / step})
        log.close()
    first, second = Records.opened
    assert [step for _, _, step in first] == [2, 4, 6]
    assert second == [("train/loss", 1.0 / step, step) for step in (2, 4, 6, 8, 9)]


def test_a_logger_that_cannot_start_is_one_line_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "visualdl", None)
    options = LoggingOptions(use_visualdl=str(tmp_path / "board"), use_tensorboard=str(tmp_path / "tensorboard"))
    logs = open_logs(options, {}, tmp_path)
    for log in logs:
        log.write({"step": 1, "loss": 1.0})
        log.close()
    printed = capsys.readouterr().out
    assert printed.startswith("warning: VisualDL is left out from here on: ") and printed.count("\n") == 1
    assert list((tmp_path / "tensorboard" / "run").iterdir())


@pytest.mark.parametrize(
    "line", [b"garbage", b"\xff\xfe\x00", b"[1]", b'{"loss": 1}', b'{"step": "x"}', b"[" * 100_000]
)
def test_a_line_that_is_no_row_is_named_and_nothing_is_thrown_away(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    content = path.read_bytes()
    path.write_bytes(content + line + b"\n" + content)
    with pytest.raises(UserError, match=r"metrics.jsonl: line 4 is no row of metrics"):
        MetricsFile(path, resume_from=2)
    assert path.read_bytes() == content + line + b"\n" + content


def test_a_run_goes_on_without_its_rows_in_memory(tmp_path):
    path = tmp_path / "tokens.jsonl"
    rows = [json.dumps({"step": step, "texts": ["token"] * 5000}) + "\n" for step in range(100)]
    path.write_text("".join(rows))
    tracemalloc.start()
    file = MetricsFile(path, resume_from=49)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    file.close()
    assert file.last == 49 and path.read_text() == "".join(rows[:50])
    assert most < 0.2 * sum(map(len, rows))


def test_closing_a_file_on_a_full_disk_does_not_hide_what_was_told(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", resume_from=None)
    file._file.close()
    file._file = open("/dev/full", "w")  # noqa: SIM115 (closed below)
    with pytest.raises(OSError, match="No space left"):
        file.write({"step": 1})
    file.close()


def test_wandb_s_traffic_goes_through_its_proxy(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    asked, begun = [], {}

    class Proxy(BaseHTTPRequestHandler):
        def do_CONNECT(self):
            asked.append(self.path)
            self.send_error(403)

        def log_message(self, *_):
            pass

    proxy = HTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{proxy.server_port}"
    monkeypatch.setattr(wandb, "init", lambda **settings: begun.update(settings))
    WandbLog(LoggingOptions(use_wandb="online", wandb_http_proxy=address), {}, tmp_path)
    proxy.shutdown()
    assert asked and asked[0].endswith(":443")
    assert (begun["settings"].http_proxy, begun["settings"].https_proxy) == (address, address)
    assert begun["mode"] == "offline"  # the proxy lets nothing through


class Trackio:
    """Stands for the trackio package."""

    def __init__(self):
        self.begun, self.logged, self.finished = [], [], 0

    def init(self, **settings):
        print("* a greeting")
        self.begun.append(settings)
        return SimpleNamespace(log=lambda row, step: self.logged.append((step, row)))

    def finish(self):
        print("* a farewell")
        self.finished += 1

    @staticmethod
    def Trace(messages, metadata):
        return messages, metadata


def test_trackio_gets_the_rows_and_the_best_and_worst_answers_as_conversations(tmp_path, monkeypatch, capsys):
    package = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", package)
    address = "http://127.0.0.1:7860?write_token=abc"
    options = LoggingOptions(use_trackio=address, wandb_run_name="mine", trackio_project="some")
    (log,) = open_logs(options, {"seed": 3}, tmp_path, earlier=[{"step": 1, "loss": 4.0}])
    (settings,) = package.begun
    assert (settings["project"], settings["name"], settings["server_url"]) == ("some", "mine", address)
    assert settings["config"]["seed"] == 3 and "abc" not in str(settings["config"])
    plain = {"prompt": "2+2=", "response": "4", "reward": 1.0, "kept": "best", "step": 2}
    turns = [{"role": "assistant", "text": "higher?", "drawn": True}, {"role": "user", "text": "no", "drawn": False}]
    log.show([plain, {**plain, "turns": turns, "reward": 0.0, "kept": "worst"}, {**plain, "kept": None}])
    log.write({"step": 2, "loss": 2.0, "eval_loss": 3.0, "alarms": ["x"], "grad_norm": float("nan")})
    log.write({"step": 3, "loss": 1.0})
    log.close()
    asked = {"role": "user", "content": "2+2="}
    best = ([asked, {"role": "assistant", "content": "4"}], {"step": 2, "reward": 1.0})
    said = [asked, {"role": "assistant", "content": "higher?"}, {"role": "user", "content": "no"}]
    assert package.logged == [
        (1, {"train/loss": 4.0}),
        (
            2,
            {
                "train/loss": 2.0,
                "eval/loss": 3.0,
                "best answers": [best],
                "worst answers": [(said, {"step": 2, "reward": 0.0})],
            },
        ),
        (3, {"train/loss": 1.0}),
    ]
    assert package.finished == 1 and capsys.readouterr().out == ""


def test_trackio_on_this_machine_says_how_to_look_at_the_run(tmp_path, monkeypatch, capsys):
    package = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", package)
    open_logs(LoggingOptions(use_trackio="True"), {}, tmp_path)
    assert package.begun[0]["server_url"] is None
    assert capsys.readouterr().out == "trackio: look at the run with: trackio show --project trimtab\n"


def test_what_is_no_address_of_a_trackio_server_is_refused():
    with pytest.raises(UserError, match="--use_trackio: give it alone, or the address"):
        LoggingOptions(use_trackio="me/my-space").check()
