"""The page from whole, odd and broken runs. Whatever is on disk, there is a report, and nothing in it is executed."""

import json

import pytest

from tests.report.pages import Checked, page_of, step_row, write_metrics


@pytest.fixture
def run(tmp_path):
    """A healthy run of 40 steps."""
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [step_row(step) | ({"eval_loss": 3 / step} if step % 10 == 0 else {}) for step in range(1, 41)]
    write_metrics(folder, rows)
    (folder / "options.yaml").write_text("pretrain: some/model\ndataset: data/rows.jsonl\nlearning_rate: 1.0e-3\n")
    manifest = {"versions": {"torch": "2.13.0"}, "steps": 40, "device": "cpu", "dtype": "float32"}
    manifest |= {"trainable": [f"layer.{index}" for index in range(100)]}
    manifest |= {"data": {"rows_read": 400, "rows_kept": 390, "rows_truncated": 3, "evaluation": {"rows_read": 7}}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    samples = [{"prompt": "sort 21>", "before": "zz", "after": "12", "reference": "12"}]
    (folder / "samples.json").write_text(json.dumps(samples))
    (folder / "config.json").write_text("{}")
    return folder


def test_a_healthy_run_shows_its_figures_and_nothing_unusual(run):
    page = page_of(run)
    assert "some/model" in page and "390 rows of data/rows.jsonl" in page
    assert "Nothing unusual" in page
    assert "versions · torch" in page and "layer.3 and 96 more" in page
    assert "<td>rows read</td><td>400</td><td>7</td>" in page
    assert page.count("<figure") == 5 and "Not recorded" not in page
    assert ">4.0 s<" in page and ">4,000<" in page, "seconds and tokens add up over the steps"
    assert ">0.164<" in page, "final loss is the mean over the last tenth of the steps"
    assert "class=right>12<" in page and "class=wrong>zz<" in page
    assert not (run / "report.html.part").exists()


def test_the_page_is_self_contained_and_runs_no_script(run):
    page = Checked(page_of(run))
    assert not [name for name, value in page.attributes if name in ("src", "href") or name.startswith("on")]
    assert "url(" not in (run / "report.html").read_text() and "@import" not in (run / "report.html").read_text()


def test_markup_from_any_file_is_text(run):
    evil = "</style><script>alert('x')</script>\"&"
    (run / "samples.json").write_text(json.dumps([{"prompt": evil, "before": evil, "after": evil, "reference": evil}]))
    (run / "options.yaml").write_text(json.dumps({"pretrain": evil, "dataset": evil, evil: evil}))
    manifest = {"device": evil, "job": evil, evil: {evil: evil}, "data": {evil: evil, "rows_kept": evil}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    page_of(run)  # which fails on a script


def test_a_cut_last_line_is_left_out_and_named(run):
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-30])
    page = page_of(run)
    assert "last line of metrics.jsonl is cut off" in page and "39 steps" in page


def test_a_repeated_step_counts_once_with_its_later_row(run):
    write_metrics(run, [step_row(1), step_row(2, loss=9.0), step_row(2, loss=0.5)])
    page = page_of(run)
    assert "2 steps" in page and "each step 9" not in page and ">0.5<" in page


@pytest.mark.parametrize(
    "metrics",
    [
        b"",
        b"\n\n",
        b'not json\n[1, 2]\n"text"\n17\nnull\n',
        b"\xff\xfe\x00\x80\n",
        b'{"step": 1}\n',
        b'{"loss": 1.0}\n{"step": null, "loss": 1}\n{"step": NaN}\n{"step": "three"}\n',
        b'{"step": 1, "loss": NaN, "grad_norm": Infinity, "seconds": -Infinity}\n',
        b'{"step": 1, "loss": "high", "grad_norm": null, "tokens": true, "memory_gib": [1], "epoch": {}}\n',
        b'{"step": 1, "loss": 0.0}\n{"step": 2, "loss": 0.0}\n',
        b'{"step": 1, "loss": 1e308}\n{"step": 2, "loss": -1e308}\n{"step": 3, "loss": 1e199}\n',
        b'{"step": 1, "loss": 5e-324}\n{"step": 2, "loss": 1e-320}\n',
        b'{"step": 1, "loss": 1' + b"0" * 400 + b"}\n",
        b'{"step": 1' + b"0" * 150 + b', "loss": 1}\n{"step": -5, "loss": 2}\n',
        b'{"step": 1, "loss": -3.5, "eval_loss": -4}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_broken_metrics_still_give_a_report(run, metrics):
    (run / "metrics.jsonl").write_bytes(metrics)
    page_of(run)


@pytest.mark.parametrize(
    "content", [None, "", "[1, 2", "[]", "3", "{", "a: b: c", "\x00", '{"data": 3}', '{"data": {}}']
)
@pytest.mark.parametrize("name", ["options.yaml", "manifest.json", "samples.json"])
def test_broken_or_missing_companions_still_give_a_report(run, name, content):
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content)
    page_of(run)


def test_odd_samples_are_shown_as_they_are(run):
    samples = [3, {}, {"prompt": 5, "after": None}, {"prompt": ["a"], "before": "", "after": "x", "reference": "y"}]
    (run / "samples.json").write_text(json.dumps(samples))
    assert "empty" in page_of(run)


def test_only_a_short_answer_is_called_right_or_wrong(run):
    sentence = "There is more than one way of saying something like this."
    (run / "samples.json").write_text(json.dumps([{"prompt": "?", "after": "Indeed.", "reference": sentence}]))
    page = page_of(run)
    assert sentence in page and "class=wrong" not in page and "class=right" not in page


def test_a_long_answer_loses_its_middle(run):
    (run / "samples.json").write_text(json.dumps([{"prompt": "a" * 900 + "b" * 900 + "c" * 900}]))
    page = page_of(run)
    assert "a" * 750 + " [... 1,200 characters ...] " + "c" * 750 in page


def test_a_long_run_stays_a_small_page(run):
    write_metrics(run, [step_row(step) for step in range(1, 20_001)])
    assert len(page_of(run)) < 400_000


def test_command_prints_the_path(run, trimtab):
    assert trimtab(f"report {run}").said == f"{run / 'report.html'}\n"


@pytest.mark.parametrize("words", ["", "here/is/nothing", ".", "--folder x"])
def test_a_mistake_is_one_line_and_exit_code_2(words, trimtab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert trimtab(f"report {words}").mistake
