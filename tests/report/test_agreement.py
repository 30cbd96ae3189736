"""The errors of two curves, against numpy and by hand, and curves that cannot be compared."""

import json
import math

import numpy as np
import pytest

from tests.report.pages import write_metrics, write_run
from trimtab.errors import UserError
from trimtab.report.judgement import Errors, Judged, joined
from trimtab.report.run_data import read_run

LOSS = Judged("loss", "loss")


def runs(folder, a: list, b: list, **more: list):
    """Two runs with these losses; `more`: other columns of the first."""
    made = []
    for name, values in (("a", a), ("b", b)):
        write_run(folder / name)
        rows = [{"step": 0, "eval_loss": 9.0}]
        for place, value in enumerate(values):
            others = {column: held[place] for column, held in more.items()} if name == "a" else {}
            rows.append({"step": place + 1, "loss": value, **others})
        write_metrics(folder / name, rows)
        made.append(read_run(folder / name))
    return made


def errors(folder, a, b, judged=LOSS, **more) -> Errors:
    return Errors.of(joined(*runs(folder, a, b, **more), judged))


def test_the_errors_are_those_of_numpy(tmp_path):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 50)) + 0.5
    found, apart = errors(tmp_path, a.tolist(), b.tolist()), b - a
    assert found.steps == 50
    assert found.weighted == pytest.approx(np.abs(apart).sum() / np.abs(a).sum(), rel=1e-12)
    assert found.mean_relative == pytest.approx(np.mean(np.abs(apart / a)), rel=1e-12)
    assert found.mean_absolute == pytest.approx(np.abs(apart).mean(), rel=1e-12)
    assert found.bias == pytest.approx(apart.mean(), rel=1e-12)
    worst = int(np.abs(apart).argmax())
    assert (found.largest, found.largest_step) == (pytest.approx(apart[worst]), worst + 1)
    assert (found.first, found.first_step) == (pytest.approx(abs(apart[0] / a[0])), 1)


def test_errors_of_both_signs_cancel_in_the_bias_alone(tmp_path):
    found = errors(tmp_path, [1.0] * 6, [1.1, 0.9] * 3)
    assert found.bias == pytest.approx(0, abs=1e-12)
    assert found.weighted == found.mean_relative == pytest.approx(0.1)


def test_small_values_weigh_little_in_the_weighted_error(tmp_path):
    found = errors(tmp_path, [10.0] * 9 + [0.01], [10.0] * 9 + [0.02])
    assert found.weighted == pytest.approx(0.01 / 90.01) and found.mean_relative == pytest.approx(0.1)


def test_a_floor_is_what_small_values_count_as(tmp_path):
    a, b = [0.0, 0.001, 0.002, 0.01, 0.2], [0.0005] * 5
    found = errors(tmp_path, a, b, Judged("loss", "loss", floor=0.05))
    differences = [abs(x - y) for x, y in zip(a, b)]
    assert found.weighted == pytest.approx(sum(differences) / (4 * 0.05 + 0.2))
    assert found.first == pytest.approx(0.0005 / 0.05)
    assert found.without_floor == pytest.approx(sum(differences) / sum(a))


def test_a_figure_whose_terms_cancel_is_seen_against_their_size(tmp_path):
    judged = Judged("loss", "loss", scale="size")
    found = errors(tmp_path, [1e-6] * 5, [2e-3] * 5, judged, size=[0.5, 0.5, 1.0, 1.0, 1.0])
    assert found.weighted == pytest.approx(5 * (2e-3 - 1e-6) / 4)


def test_what_is_zero_in_one_run_alone_is_apart_without_bound(tmp_path):
    assert errors(tmp_path / "equal", [0.0] * 5, [0.0] * 5).weighted == 0
    found = errors(tmp_path / "other", [0.0] * 5, [0.1] * 5)
    assert math.isinf(found.weighted) and json.loads(json.dumps(found.as_dict()))["weighted"] is None


@pytest.mark.parametrize(
    "a, b, told",
    [
        ([1.0] * 9, [1.0] * 7, "b: it lacks step 8, 9, which .*a has.*--steps 7"),
        ([1.0] * 9, [1.0] * 2, "b: it lacks step 3 to 9, which .*a has; let it run to its end$"),
        ([1.0] * 4, [1.0] * 4, "loss is there in 4 steps of both; at least 5"),
        ([1.0] * 4 + [None] + [1.0], [1.0] * 6, "a: loss of step 5 is no number"),
        ([1.0] * 6, [1.0, math.nan] + [1.0] * 4, "b: loss of step 2 is no number"),
    ],
)
def test_curves_that_cannot_be_compared_are_refused(tmp_path, a, b, told):
    with pytest.raises(UserError, match=told):
        joined(*runs(tmp_path, a, b), LOSS)


def test_a_missing_step_in_the_middle_is_named(tmp_path):
    a, b = runs(tmp_path, [1.0] * 9, [1.0] * 9)
    b.rows = [row for row in b.rows if row["step"] != 6]
    with pytest.raises(UserError, match=r"it lacks step 6, .*--steps 5 alone"):
        joined(a, b, LOSS)
    assert len(joined(a, b, LOSS, most=5)) == 5


def test_steps_in_which_neither_run_has_the_figure_are_left_out(tmp_path):
    a, b = runs(tmp_path, [1.0] * 9, [1.1] * 9)
    for run in (a, b):
        del run.rows[1]["loss"], run.rows[2]["loss"]
    assert [place.step for place in joined(a, b, LOSS)] == [3, 4, 5, 6, 7, 8, 9]
