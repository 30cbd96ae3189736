"""Figures from a manifest: the right numbers at the right places, and every mistake told."""

import dataclasses
import json

import numpy as np
import pytest
import yaml

from trimtab.cli.main import main
from trimtab.errors import UserError
from trimtab.evaluate.tail_risk import Analytic, HeldOut, write_analytic, write_held_out
from trimtab.report.experiment import curves, curves_figure, frontier_figure, points, read_manifest, save

SEEDS = [1, 2, 12]


def held_out(shift):
    rewards = np.linspace(-10, 10, 101) + shift
    return HeldOut(rewards, rewards - 1, np.full(101, shift), np.zeros(101))


def findings(path, lowest):
    replies = {"count": 1, "answered": 0, "matched": 0, "target_log_prob": {}, "worst": ""}
    rows = [{"after": {**replies, "rewards": [reward, 1.0]}} for reward in lowest]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def place(tmp_path):
    """Two methods of three seeds: everything written, and a manifest."""
    info, checkpoints = tmp_path / "info", tmp_path / "ckpt"
    checkpoints.mkdir()
    for number, method in enumerate(("a", "b")):
        for seed in SEEDS:
            name = f"{method}_s{seed}"
            write_held_out(info, name, held_out(number + seed / 10))
            measured = [-1.0 * number, -2.0 * number - seed]
            write_analytic(info, name, Analytic(measured, [0.0, 1.0], [0.0, 0.5] if number else []))
            ending = "harml_actor" if number else "actor"
            findings(checkpoints / f"gcg_eval_{name}_{ending}.jsonl", [-6.0, -4.5 - seed / 12])
    content = {
        "info": "info",
        "checkpoints": "ckpt",
        "threshold": -5,
        "level": 0.05,
        "methods": [
            {"label": "first", "run": "a_s{seed}", "seeds": SEEDS, "samples": 1000},
            {"label": "second", "run": "b_s{seed}", "seeds": SEEDS, "samples": 1000, "family": "bs"},
        ],
    }
    (tmp_path / "figure.yaml").write_text(yaml.safe_dump(content))
    return tmp_path


def manifest_with(place, **changes):
    content = yaml.safe_load((place / "figure.yaml").read_text()) | changes
    (place / "changed.json").write_text(json.dumps(content))
    return place / "changed.json"


def test_curves_are_means_over_seeds_against_the_sequences_sampled(place):
    _, second = curves(read_manifest(place / "figure.yaml"), "log_bad")
    assert second.label == "second" and second.x.tolist() == [0, 1000] and second.seeds == 3
    assert second.centre.tolist() == [-1.0, -7.0]
    error = np.std([1, 2, 12], ddof=1) / np.sqrt(3)
    assert second.margin.tolist() == pytest.approx([0.0, 4.302653 * error], rel=1e-4)
    assert [line.label for line in curves(read_manifest(place / "figure.yaml"), "returns")] == ["second"]


@pytest.mark.parametrize("x, shift", [("reward", 0.0), ("return", -1.0), ("kl", 0.0)])
def test_points_are_means_over_seeds_with_bootstrap_bars(place, x, shift):
    first, second = points(read_manifest(place / "figure.yaml"), x, "bad")
    assert first.x.value == pytest.approx(0.5 + shift) and second.x.value == pytest.approx(1.5 + shift)
    assert first.x.low == pytest.approx(0.1 + shift) and first.x.high == pytest.approx(1.2 + shift)
    # Of -10, -9.8, ..., moved up by 0.1, 0.2 and 1.2.
    assert first.y.value == pytest.approx(np.mean([25, 24, 19]) / 101)
    assert (second.family, second.seeds) == ("bs", 3)


def test_cvar_and_attack_success_are_read_at_any_level_and_threshold(place):
    manifest = read_manifest(place / "figure.yaml")
    (first, _) = points(manifest, "reward", "cvar")
    assert first.y.value == pytest.approx(-10 + 0.4 + 0.5)
    assert points(dataclasses.replace(manifest, level=0.001), "reward", "cvar")[0].y.value == pytest.approx(-10 + 0.5)
    # The second target's worst reply is -4.58, -4.67 and -5.5.
    for threshold, expected in ((-5, 4 / 6), (-4.6, 5 / 6), (-7.0, 0.0)):
        for point in points(dataclasses.replace(manifest, threshold=threshold), "return", "gcg"):
            assert point.y.value == pytest.approx(expected)


@pytest.mark.parametrize("words", ["curves", "frontier --x kl", "frontier --y cvar --x reward"])
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_command_draws_a_picture_and_says_where(place, words, ending, trimtab):
    output = place / "made" / f"picture.{ending}"
    assert trimtab(f"plot {words} {place}/figure.yaml --output {output}").said.strip() == str(output)
    start = {"png": b"\x89PNG", "svg": b"<?xml"}[ending]
    assert output.read_bytes().startswith(start) and output.stat().st_size > 5000


def test_the_default_place_is_beside_the_manifest_and_two_drawings_are_equal(place, capsys):
    for _ in range(2):
        assert main(["plot", "frontier", str(place / "figure.yaml"), "--y", "gcg"]) == 0
    assert (place / "figure_frontier_gcg_return.png").exists()
    figures = [curves_figure(read_manifest(place / "figure.yaml")) for _ in range(2)]
    assert len({save(figure, place / "curves.png").read_bytes() for figure in figures}) == 1


@pytest.mark.parametrize("lifted, scale", [(5.2, "log"), (1.0, "linear"), (9.0, "linear")])
def test_probabilities_that_lie_far_apart_stand_on_a_logarithmic_axis(place, lifted, scale):
    """The first method's are about a quarter; the other's below a tenth of it, above, and 0."""
    for seed in SEEDS:
        write_held_out(place / "info", f"b_s{seed}", held_out(lifted - 0.3))
    figure = frontier_figure(read_manifest(place / "figure.yaml"), "reward", "bad")
    assert figure.axes[0].get_yscale() == scale


def test_a_single_seed_has_no_interval(place):
    methods = [{"label": "alone", "run": "a_s1", "seeds": [1]}]
    assert main(["plot", "page", str(manifest_with(place, methods=methods))]) == 0
    page = (place / "changed_page.html").read_text()
    assert "<td>alone</td><td>1</td><td>0.1</td>" in page and "worst 5 % of rewards" in page


def test_the_page_has_a_table_every_figure_and_what_is_absent(place, capsys):
    assert main(["plot", "page", str(place / "figure.yaml"), "--threshold", "-46e-1"]) == 0
    page = (place / "figure_page.html").read_text()
    assert page.count("<svg") == 6 and "P(reward &lt; -4.6)" in page and "Not shown" not in page
    assert "<td>second</td><td>3</td><td>1.5 (1.1 to 2.2)</td>" in page
    assert "#000000" not in page and "#dddddd" not in page, "colours of the page, light or dark"
    less = manifest_with(place, checkpoints="nowhere")
    assert main(["plot", "page", str(less)]) == 0
    page = (place / "changed_page.html").read_text()
    assert page.count("<svg") == 5 and "Not shown" not in page and "gcg" not in page, "nobody asked for an attack"
    (place / "ckpt" / "gcg_eval_a_s1_actor.jsonl").unlink()
    assert main(["plot", "page", str(place / "figure.yaml")]) == 0
    assert "gcg_eval_a_s1_harml_actor.jsonl: no such file" in (place / "figure_page.html").read_text()


@pytest.mark.parametrize("seeds", [[1], SEEDS])
def test_no_event_in_all_samples_is_not_certainly_none(place, seeds):
    methods = [{"label": "a", "run": "a_s{seed}", "seeds": seeds}]
    manifest = read_manifest(manifest_with(place, methods=methods, threshold=-50))
    (point,) = points(manifest, "return", "bad")
    assert (point.y.value, point.y.low) == (0.0, 0.0)
    assert point.y.high == pytest.approx(3.8415 / (101 * len(seeds) + 3.8415), rel=1e-3), "Wilson's bound"
    assert main(["plot", "page", str(place / "changed.json")]) == 0
    page = (place / "changed_page.html").read_text()
    assert "<td>0 (0 to 0." in page and "(0 to 0)" not in page


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"methods": []}, "methods is missing or empty"),
        ({"colour": "red"}, "unknown name colour; known are info"),
        ({"threshold": "low"}, "threshold has the value 'low'"),
        ({"level": 1.5}, "level is 1.5; it is a share"),
        ({"methods": [{"label": "a", "seeds": [1]}]}, "method 1: run is missing"),
        ({"methods": [{"label": "a", "run": "a", "seeds": [1, 2]}]}, r"write \{seed\}"),
        ({"methods": [{"label": "a", "run": "a_s{seed}", "seeds": [1, 1]}]}, "different whole numbers"),
        ({"methods": [{"label": "a", "run": f"{r}_s1", "seeds": [1]} for r in "ab"]}, "two methods are called 'a'"),
    ],
)
def test_a_wrong_manifest_is_one_line(place, changes, complaint):
    with pytest.raises(UserError, match=complaint) as error:
        read_manifest(manifest_with(place, **changes))
    assert "\n" not in str(error.value) and "changed.json" in str(error.value)


@pytest.mark.parametrize(
    "words, complaint",
    [
        ("frontier {}/missing.json", "info_eval_a_s3: no such file"),
        ("frontier --y gcg {}/missing.json", "info_eval_a_s3: no such file"),
        ("curves {}/missing.json", "analyticlogprob_rewsample_a_s3: no such file"),
        ("frontier {}/less.yaml --y bad", "needs --threshold"),
        ("frontier {}/less.yaml --y cvar", "needs --level"),
        ("page {}/figure.yaml --output a.png", "a page is HTML"),
        ("page {}/figure.yaml --level 2", "level is 2; it is a share"),
        ("frontier {0}/figure.yaml --output {0}/a.gif", ".png, .svg, .pdf"),
    ],
)
def test_a_missing_run_threshold_or_level_is_told_and_never_left_out(place, trimtab, words, complaint):
    methods = [{"label": "a", "run": "a_s{seed}", "seeds": [1, 3]}]
    manifest_with(place, methods=methods).rename(place / "missing.json")
    content = yaml.safe_load((place / "figure.yaml").read_text())
    (place / "less.yaml").write_text(
        yaml.safe_dump({k: v for k, v in content.items() if k not in ("threshold", "level")})
    )
    assert complaint in trimtab(f"plot {words.format(place)}").mistake
