"""The pictures: their order, bytes and texts; pictures without numbers are left out."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure

from rlhf_core.evaluation.majorant import majorant_at
from tasks.page import comparison_figures
from tasks.page.canvas import canvas, colour_of, png, styled
from tasks.page.comparison_table import LABELS
from tasks.page.figures import PICTURES, draw, ppo_kl, score_distribution
from tasks.page.inputs import Run
from tasks.page.labels import name_points
from tasks.page.picture import Picture
from tasks.page.wording import number, percent, percent_interval, points
from tasks.params.methods import BY_NAME

MakeRun = Callable[..., Run]
Lines = list[list[tuple[str, object, list[float], list[float]]]]
Drawn = dict[bool, list[Picture]]


def names(run: Run) -> list[str]:
    return [picture.name for picture in draw(run)]


OF_ENSEMBLES = ("disagreement",)
"""Pictures that a run with one reward model does not have."""


def test_all_pictures_are_there_in_order(pictures: Drawn) -> None:
    every = [make.__name__ for make in PICTURES if make.__name__ not in OF_ENSEMBLES]
    assert len(every) == 12
    for drawn in pictures.values():
        assert [picture.name for picture in drawn] == every


def test_pictures_are_png_without_metadata(pictures: Drawn) -> None:
    for picture in pictures[True]:
        assert picture.png.startswith(b"\x89PNG")
        assert not any(chunk in picture.png for chunk in (b"tEXt", b"iTXt", b"tIME"))


def test_same_numbers_same_bytes_whatever_the_users_style(make_run: MakeRun, pictures: Drawn) -> None:
    with mpl.rc_context({"font.size": 20, "axes.facecolor": "black", "savefig.dpi": 30}):
        assert draw(make_run()) == pictures[True]
        assert mpl.rcParams["font.size"] == 20


@pytest.mark.slow
def test_other_numbers_other_bytes(make_run: MakeRun, pictures: Drawn) -> None:
    run = make_run()
    ppo = run.curves["ppo"]
    changed = replace(run, curves=run.curves | {"ppo": ppo | {"kl": [value + 1 for value in ppo["kl"]]}})
    differ = [a.name for a, b in zip(pictures[True], draw(changed), strict=True) if a != b]
    assert differ == ["ppo_kl"]


def test_alternative_text_has_the_ends_of_a_curve(make_run: MakeRun, pictures: Drawn) -> None:
    run = make_run()
    alt = {picture.name: picture.alt for picture in pictures[True]}
    kl, critic = run.curves["ppo"]["kl"], run.curves["ppo"]["explained_variance"]
    assert f"KL from {kl[0]:.2f} to {kl[-1]:.2f} nats per answer" in alt["ppo_kl"]
    assert "β from 0.0502 to 0.0600" in alt["ppo_kl"]
    assert math.isnan(critic[0])
    assert f"from {critic[1]:.3f} to {critic[-1]:.3f}".replace("-", "−") in alt["health"]


def test_fixed_coefficient_is_not_drawn(make_run: MakeRun) -> None:
    run = make_run()
    ppo = run.curves["ppo"]
    fixed = replace(run, curves=run.curves | {"ppo": ppo | {"kl_coef": [0.05] * len(ppo["kl"])}})
    drawn = ppo_kl(fixed)
    assert drawn is not None
    assert "β" not in drawn.alt


def test_scores_are_of_all_sampling_seeds_as_in_the_table(make_run: MakeRun) -> None:
    run = make_run()
    run = replace(run, answers=[row | {"gold": float(row["seed"] or 9)} for row in run.answers])
    drawn = score_distribution(run)
    assert drawn is not None
    assert "of 120 held-out answers: mean 2.00 for SFT, 2.00 for the policy" in drawn.alt
    assert "The gold score of all 120 held-out answers of each model, with every sampling seed" in drawn.caption


@pytest.mark.parametrize("hole", [[], [math.nan]])
def test_pictures_without_numbers_are_left_out(make_run: MakeRun, hole: list[float]) -> None:
    run = make_run()
    empty = {name: dict.fromkeys(curve, hole) for name, curve in run.curves.items()}
    metrics = run.metrics | {"evaluate": run.evaluation | {"models": {}}, "reward": {}}
    run = replace(run, metrics=metrics, answers=[], frontier=[])
    assert names(replace(run, curves=empty)) == []
    assert names(replace(run, curves={name: {} for name in empty})) == []


def test_one_step_is_enough(make_run: MakeRun) -> None:
    run = make_run()
    short = {name: {column: values[-1:] for column, values in curve.items()} for name, curve in run.curves.items()}
    short["reward_calibration"] = {name: values[:1] for name, values in run.curves["reward_calibration"].items()}
    assert len(names(replace(run, curves=short, samples=run.samples[:1]))) == len(PICTURES) - len(OF_ENSEMBLES)


def lines_of(monkeypatch: pytest.MonkeyPatch, make: Callable[[Run], Picture | None], run: Run) -> tuple[Picture, Lines]:
    """A picture, and the lines of its panels: (label, line style, x, y)."""
    figures: list[Figure] = []
    monkeypatch.setattr(comparison_figures, "png", lambda figure: figures.append(figure) or png(figure))
    with styled():
        picture = make(run)
    assert picture is not None
    drawn = [
        [(str(line.get_label()), line.get_linestyle(), list(line.get_xdata()), list(line.get_ydata()))  # type: ignore[arg-type]
         for line in axes.get_lines()]
        for axes in figures[0].axes
    ]  # fmt: skip
    return picture, drawn


def test_with_a_judge_that_only_compares_the_win_rate_is_drawn(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(judge=False, pairs=True)
    picture, _ = lines_of(monkeypatch, comparison_figures.frontier, run)
    assert "Win rate against KL to SFT: SFT 50.0% at 0.00 nats; " in picture.alt
    assert "Best of 4" not in picture.alt
    run = make_run(judge=False, pairs=True)
    picture, panels = lines_of(monkeypatch, comparison_figures.overoptimisation, run)
    snapshots = next(y for label, _, _, y in panels[1] if label == "snapshots")
    assert snapshots == [row["win_rate"] for row in run.snapshots]
    assert "proxy rises and the win rate against SFT falls" in picture.caption
    assert "win rate against SFT highest at step" in picture.alt


def test_the_frontier_is_the_majorant_of_all_of_ppos_points(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Straight in KL, through the interpolated policy, flat from the best point to the largest KL."""
    run = make_run()
    own = [row for row in run.frontier if row["family"] in ("sft", "ppo", "interpolated")]
    kls, scores = [row["kl"] for row in own], [row["gold"] for row in own]
    picture, (lines,) = lines_of(monkeypatch, comparison_figures.frontier, run)
    x, y = next((x, y) for _, style, x, y in lines if len(x) == 101 and style == "-")
    assert (x[0], x[-1]) == (0.0, pytest.approx(math.sqrt(max(kls))))
    assert y == pytest.approx([majorant_at(min(each * each, max(kls)), kls, scores) for each in x])
    assert max(y) == pytest.approx(max(scores)) == pytest.approx(y[-1])
    assert "concave majorant (straight in KL)" in picture.caption
    assert "PPO, step 60" in picture.alt
    assert "step 5 " in picture.alt


def test_where_the_policy_is_an_interpolation_no_snapshot_has_its_name(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    select = run.metrics["select"]
    for eta, named in ((1.0, True), (0.5, False)):
        of = replace(run, metrics=run.metrics | {"select": select | {"eta": eta}})
        assert ("PPO, step 60" in comparison_figures.frontier(of).alt) == named
        _, panels = lines_of(monkeypatch, comparison_figures.overoptimisation, of)
        assert any(label == "the policy" for panel in panels for label, *_ in panel) == named


def test_the_ceiling_is_dashed_from_sfts_score(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    for make, panels in ((comparison_figures.frontier, 1), (comparison_figures.overoptimisation, 2)):
        _, found = lines_of(monkeypatch, make, run)
        dashed = [(x, y) for panel in found for label, _, x, y in panel if label == "the optimum"]
        assert len(dashed) == panels
        starts = {y[0] for _, y in dashed}
        assert starts == ({1.7123} if panels == 1 else {1.7123, -0.2013})
        assert all(list(x) == [0.0, 0.5, 1.0, 1.5, 2.0] for x, _ in dashed)
    assert "Dashed: the optimum" in lines_of(monkeypatch, comparison_figures.frontier, run)[0].caption
    without = replace(run, metrics=run.metrics | {"evaluate": run.evaluation | {"optimum": []}})
    assert "optimum" not in lines_of(monkeypatch, comparison_figures.frontier, without)[0].caption


def test_the_captions_name_the_answers_of_one_sampling_seed(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    for make in (comparison_figures.frontier, comparison_figures.overoptimisation):
        assert "only the first of the table’s 3 sampling seeds." in lines_of(monkeypatch, make, run)[0].caption


def test_fitted_curves_have_their_start_and_are_drawn_only_with_positive_beta(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    _, panels = lines_of(monkeypatch, comparison_figures.overoptimisation, run)
    curves = [[(x[0], y[0]) for label, _, x, y in panel if label.startswith("fitted")] for panel in panels]
    assert curves == [[(0.0, -0.1987)], [(0.0, 1.7301)]]
    gold = next((x, y) for label, _, x, y in panels[1] if label.startswith("fitted"))
    assert gold[1][-1] == pytest.approx(1.7301 + gold[0][-1] * (1.5 - 0.4 * math.log(gold[0][-1])))
    for beta in (0.0, -0.1):
        fits = run.evaluation["fits"]
        straight = fits | {"ppo_gold": fits["ppo_gold"] | {"beta": beta}, "ppo_reward": None}
        changed = replace(run, metrics=run.metrics | {"evaluate": run.evaluation | {"fits": straight}})
        _picture, panels = lines_of(monkeypatch, comparison_figures.overoptimisation, changed)
        assert not [label for panel in panels for label, *_ in panel if label.startswith("fitted")]


def test_every_model_has_a_colour_of_its_own() -> None:
    names = [*LABELS, *(name for name in BY_NAME if name != "best_of_n"), "best_of_4", "a model of the user's"]
    assert len({colour_of(name) for name in names}) == len(names)
    assert colour_of("best_of_16") == colour_of("best_of_4")


@pytest.mark.parametrize(
    ("names", "crowd"), [(5, []), (4, [(4 + x / 15, 3.5 + y / 10) for x in range(28) for y in range(20)])]
)
def test_labels_of_points_do_not_overlap(names: int, crowd: list[tuple[float, float]]) -> None:
    """Also if other points cover the whole panel."""
    with styled():
        _, (axes,) = canvas("x")
        axes.set(xlim=(0, 10), ylim=(0, 10))
        name_points(axes, [(5 + place / 10, 5.0, f"model {place}", "#000000") for place in range(names)], crowd)
        axes.get_figure().draw_without_rendering()  # type: ignore[union-attr]
        boxes = [text.get_window_extent() for text in axes.texts]
    assert not [1 for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]


def test_wording_of_numbers() -> None:
    assert [number(value) for value in (-0.001, -1.005, 1234.5, None, math.nan, True, "1")] == [
        "0.00", "−1.00", "1,234.50", "–", "–", "–", "–",
    ]  # fmt: skip
    assert number(0.5, 1, sign=True) == "+0.5"
    assert percent(0.8825) == "88.2%"
    assert (percent_interval(None), percent_interval((0.85, 0.9))) == ("–", "85.0% to 90.0%")
    assert points(-0.015) == "−1.5 points"
