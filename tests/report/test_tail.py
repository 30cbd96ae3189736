import json

import numpy as np
import pytest
import yaml

from tests.report.pages import Checked, step_row, write_metrics
from trimtab.evaluate.tail_risk import HeldOut, summary, write_summary
from trimtab.report.page import render
from trimtab.report.run_data import read_run
from trimtab.train.tail.measurements import finite


def page_of(folder) -> str:
    write_metrics(folder, [step_row(1)])
    page = render(read_run(folder))
    Checked(page)
    return page


def test_the_page_tells_what_the_worst_samples_are(tmp_path):
    samples = HeldOut(np.array([-6.0, -4.0, 0.0, 2.0]), *(np.zeros(4) for _ in range(3)))
    write_summary(tmp_path, "run_s1", summary(samples, [-5.0], [0.5]))
    page = page_of(tmp_path)
    assert "4 samples, the worst with a reward of -6" in page
    assert "<td>share below -5</td><td>0.25</td><td>" in page
    assert "<td>mean of the worst 2 (CVaR 0.5)</td><td>-5</td><td>" in page
    assert "of new answers to these prompts, not of new prompts" in page and "<th>new prompts</th>" not in page


def test_an_interval_says_whether_it_speaks_of_these_prompts_or_of_new_ones(tmp_path):
    samples = HeldOut(np.repeat([-6.0, -4.0, 0.0, 2.0], 25), *(np.zeros(100) for _ in range(3)))
    figures = summary(samples, [-5.0, -9.0], [0.5, 0.01], np.repeat(np.arange(4), 25))
    write_summary(tmp_path, "run_s1", finite(figures))
    page = page_of(tmp_path)
    assert "100 samples for 4 prompts" in page and "<th>these prompts</th><th>new prompts</th>" in page
    assert "<td>share below -5</td><td>0.25</td><td>0.175 to 0.343</td><td>0.0" in page
    assert "<td>share below -9</td><td>0</td><td>0 to 0.037</td><td>0 to 0.49</td>" in page
    assert "(CVaR 0.01)</td><td>-6</td><td>-6 to -6</td><td>unknown</td>" in page, "all of one prompt"


def test_samples_are_found_where_the_run_wrote_them_with_what_the_proposal_says(tmp_path):
    folder, info = tmp_path / "run", tmp_path / "info"
    samples = HeldOut(np.array([-6.0, -4.0, 0.0, 2.0]), *(np.zeros(4) for _ in range(3)))
    weighed = {"log_probability": -9.210340, "log_low": -11.512925, "log_high": -6.907755}
    weighed |= {"effective_samples": 90.0, "effective_bad_samples": 2.5}
    for name in "run_s1", "run_s2":
        figures = summary(samples, [-5.0], [0.5])
        figures["rare_events"] = {"-5": {"importance": weighed, "plain": figures["below"]["-5"]}}
        figures["samples"] = int(name[-1])
        write_summary(info, name, figures)
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"job": "tail", "run_name": "run_s2"}))
    (folder / "options.yaml").write_text(yaml.safe_dump({"method": "repulse", "save_info_path": str(info)}))
    page = page_of(folder)
    assert "2 samples, the worst" in page and "1 samples, the worst" not in page
    assert "weighed (-5): 2.5 effective bad samples, of 90</td><td>1e-4</td><td>1e-5 to 0.001</td>" in page
    assert "share below -5 the two estimates contradict each other" in page, "0.25 was counted"


@pytest.mark.parametrize(
    "method, row, told",
    [
        ("repulse", {"kappa": 0.02}, "bad ones less often (weight 0.02, beta -10): RePULSe"),
        ("reinforce", {}, "to give answers of higher reward: REINFORCE<"),
    ],
)
def test_a_tail_run_is_called_by_its_method(tmp_path, method, row, told):
    write_metrics(tmp_path, [step_row(1) | row])
    (tmp_path / "manifest.json").write_text(json.dumps({"job": "tail"}))
    options = {"method": method, "advantage_estimator": "rloo", "target_dist_beta": -10.0}
    (tmp_path / "options.yaml").write_text(yaml.safe_dump(options))
    page = render(read_run(tmp_path))
    assert told in page and "RLOO" not in page and "Reinforcement learning (" in page


def test_a_run_without_samples_says_nothing_and_a_broken_file_is_named(tmp_path):
    assert "Held-out samples" not in page_of(tmp_path)
    (tmp_path / "info_eval_x.json").write_text('{"samples": 3')
    (tmp_path / "info_eval_y.json").write_text("[]")
    page = page_of(tmp_path)
    assert "info_eval_x.json cannot be read" in page and "info_eval_y.json cannot be read" in page
