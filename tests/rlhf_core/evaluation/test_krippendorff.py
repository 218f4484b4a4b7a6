"""Krippendorff's alpha of published examples, and what it is where the answer is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.evaluation.krippendorff import agreements, alpha_interval, krippendorff_alpha

PAPER = ("123321412...", "1233224125.3", ".3332342251.", "12332441251.")
"""Krippendorff 2011, section B: four observers, twelve units, missing values."""
THREE_CODERS = (".....34121133.3", "1.213343.......", "..21344.21133.4")
"""The example of Wikipedia's article: three coders, fifteen units."""


def units(observers: tuple[str, ...]) -> list[dict[str, float]]:
    columns = zip(*observers, strict=True)
    return [{str(i): float(v) for i, v in enumerate(column) if v != "."} for column in columns]


@pytest.mark.parametrize(
    ("observers", "alpha"),
    [(PAPER, 0.743), (THREE_CODERS, 0.691)],
)
def test_published_examples(observers: tuple[str, ...], alpha: float) -> None:
    assert krippendorff_alpha(units(observers)) == pytest.approx(alpha, abs=0.0005)


@pytest.mark.parametrize("observers", [(), ("12.", "..1"), ("111", "111")])
def test_without_two_values_or_without_variation_there_is_none(observers: tuple[str, ...]) -> None:
    assert krippendorff_alpha(units(observers)) is None


def test_perfect_agreement_is_one_and_units_of_one_value_change_nothing() -> None:
    assert krippendorff_alpha(units(("1021", "1021"))) == pytest.approx(1.0)
    assert krippendorff_alpha([*units(PAPER), {"4": 9.0}]) == krippendorff_alpha(units(PAPER))


def test_two_annotators_who_always_disagree_are_below_chance() -> None:
    assert krippendorff_alpha(units(("1010", "0101"))) == pytest.approx(1 - 1 / (4 / 7))


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.0, 0.5, 1.0])), max_size=12), st.randoms())
def test_names_and_order_do_not_matter(found: list[dict[str, float]], random) -> None:  # type: ignore[no-untyped-def]
    renamed = [{f"{name}!": value for name, value in unit.items()} for unit in found]
    random.shuffle(renamed)
    first, second = krippendorff_alpha(found), krippendorff_alpha(renamed)
    assert first == (second if second is None else pytest.approx(second))


def test_agreements_are_between_every_two_annotators_of_a_unit() -> None:
    units = [{"anna": 1.0, "ben": 1.0, "eve": 0.0}, {"anna": 0.5, "ben": 0.0}, {"eve": 1.0}]
    assert agreements(units) == {"anna": [True, False, False], "ben": [True, False, False], "eve": [False, False]}
    assert agreements([{"anna": 1.0}]) == {}


def test_the_jackknife_interval_is_that_of_leaving_out_each_unit() -> None:
    found = units(PAPER)
    shared = [unit for unit in found if len(unit) > 1]
    without = [krippendorff_alpha([u for u in shared if u is not unit]) or 0.0 for unit in shared]
    n, mean = len(without), sum(without) / len(without)
    error = ((n - 1) / n * sum((value - mean) ** 2 for value in without)) ** 0.5
    alpha = krippendorff_alpha(found) or 0.0
    assert alpha_interval(found) == pytest.approx((alpha - 1.96 * error, 1.0)), "0.46 – 1.03"
    assert 0.0 < alpha - 1.96 * error < alpha


def test_no_interval_where_one_unit_is_the_only_one_with_another_value() -> None:
    assert alpha_interval(units(("1112", "1112"))) is None
    assert alpha_interval(units(("111", "111"))) is None
