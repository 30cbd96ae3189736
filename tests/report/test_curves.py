from itertools import pairwise

import pytest

from trimtab.report.charts import Line, axis_labels, chart, nice_ticks, smooth, thin
from trimtab.report.formatting import percent, short_number


def test_smoothing_keeps_a_straight_line_and_averages_noise():
    straight = [(step, 2.0 * step) for step in range(20)]
    assert [value for _, value in smooth(straight, 5)] == pytest.approx([value for _, value in straight])
    zigzag = [(step, float(step % 2)) for step in range(21)]
    assert smooth(zigzag, 3)[10] == (10, pytest.approx(2 / 3))
    assert smooth(zigzag, 3)[0] == zigzag[0] and smooth(zigzag, 3)[-1] == zigzag[-1]
    assert smooth([], 5) == []


def test_thinning_keeps_ends_and_every_spike():
    points = [(step, 0.0) for step in range(10_000)]
    points[5_678] = (5_678, 9.0)
    points[123] = (123, -9.0)
    kept = thin(points, 100)
    assert len(kept) <= 110
    assert {points[0], points[-1], points[5_678], points[123]} <= set(kept)
    assert kept == sorted(kept)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.031, 3.84), (-7, 2), (1e-6, 5e-6), (1, 300), (12_345, 99_999)])
def test_ticks_are_few_even_and_cover_the_range(low, high):
    ticks = nice_ticks(low, high, 4)
    assert 3 <= len(ticks) <= 8
    assert ticks[0] <= low + 1e-12 and ticks[-1] >= high - 1e-12
    gaps = [b - a for a, b in pairwise(ticks)]
    assert gaps == pytest.approx([gaps[0]] * len(gaps))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1500, "1,500"), (25_300, "25.3k"), (2e6, "2M"), (0.05, "0.05"), (2e-5, "2e-5"), (-1.5e-5, "-1.5e-5")],
)
def test_numbers_are_short(value, text):
    assert short_number(value) == text


def test_an_axis_has_one_notation():
    assert axis_labels([0, 0.0005, 0.001, 0.0015]) == ["0", "0.0005", "0.0010", "0.0015"]
    assert axis_labels([0, 5000, 10_000]) == ["0", "5k", "10k"]
    assert axis_labels([0, 5e-6, 1e-5]) == ["0", "5e-6", "1e-5"]


def test_a_chart_places_the_lowest_value_at_the_bottom_and_the_highest_at_the_top():
    drawn = chart("Loss", [Line("loss", [(0, 4.0), (10, 0.0)])])
    assert 'd="M0.0 11.5L1000.0 300.0"' in drawn, "with four hundredths of room above"


def test_a_tall_chart_of_widely_spread_values_is_logarithmic():
    points = [(0, 10.0), (1, 1.0), (2, 0.1)]
    drawn = chart("Loss", [Line("loss", points)], tall=True)
    (first, second, third) = [float(place.split(" ")[1]) for place in drawn.split(' d="M')[1].split('"')[0].split("L")]
    assert second - first == pytest.approx(third - second, abs=0.11)
    assert "logarithmic" in drawn and ">0.1<" in drawn
    assert "logarithmic" not in chart("Loss", [Line("loss", points)])
    assert "logarithmic" not in chart("Loss", [Line("loss", [*points, (3, 0.0)])], tall=True)


def test_a_single_point_is_a_dot_and_an_empty_chart_says_so():
    assert 'class="dots only c0"' in chart("Loss", [Line("loss", [(1, 2.0)])])
    assert "Not recorded" in chart("Loss", [Line("loss", [])])


def test_a_percent_says_all_only_of_all():
    assert [percent(share) for share in (1.0, 0.9999, 0.5, 0.8533)] == [
        "100\u00a0%",
        "99.9\u00a0%",
        "50\u00a0%",
        "85.3\u00a0%",
    ]


def test_a_band_lies_between_its_curves_and_a_level_where_it_belongs():
    upper, lower = [(0, 1.0), (10, 1.0)], [(0, 0.0), (10, 0.0)]
    lines = [Line("upper", upper, series=0), Line("lower", lower, series=1)]
    drawn = chart("Rewards", lines, band=(upper, lower), level=0.5)
    top = 300 * 0.04 / 1.04
    assert f'class="band" d="M0.0 {top:.1f}L1000.0 {top:.1f}L1000.0 300.0L0.0 300.0Z"' in drawn
    assert f'class=level x1=0 x2=1000 y1="{300 - 150 / 1.04:.1f}"' in drawn


def test_shares_have_percents_up_to_one_whatever_the_values():
    drawn = chart("Accuracy", [Line("accuracy", [(0, 0.5), (10, 0.75)])], share=True)
    assert 'd="M0.0 150.0L1000.0 75.0"' in drawn and ">100 %<" in drawn


def test_the_seventh_curve_is_the_first_colour_dashed():
    drawn = chart("Loss", [Line(f"run {index}", [(0, 1.0), (1, 2.0)], series=index) for index in range(7)])
    assert drawn.count('class="only c0"') == 1 and drawn.count('class="only c0 dashed"') == 1
