"""The pictures: their order, bytes and texts; pictures without numbers are left out."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure

from rlhf_core.evaluation.majorant import majorant_at
from tasks.page import figures as module
from tasks.page.canvas import Picture, canvas, colour_of, png, styled
from tasks.page.comparison_table import LABELS
from tasks.page.figures import PICTURES, draw, frontier, ppo_curves
from tasks.page.inputs import Run
from tasks.page.labels import name_points
from tasks.page.wording import number, percent, percent_interval, points
from tasks.params.methods import BY_NAME

MakeRun = Callable[..., Run]
Lines = list[list[tuple[str, object, list[float], list[float]]]]
Drawn = dict[bool, list[Picture]]


def names(run: Run) -> list[str]:
    return [picture.name for picture in draw(run)]


def test_all_pictures_are_there_in_order(pictures: Drawn) -> None:
    for drawn in pictures.values():
        assert [picture.name for picture in drawn] == ["frontier", "ppo", "reward_calibration"]


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
    assert differ == ["ppo"]


def test_alternative_text_has_the_ends_of_a_curve(make_run: MakeRun, pictures: Drawn) -> None:
    run = make_run()
    alt = {picture.name: picture.alt for picture in pictures[True]}["ppo"]
    kl, critic = run.curves["ppo"]["kl"], run.curves["ppo"]["explained_variance"]
    assert f"KL to SFT, nats per answer from {kl[0]:.2f} to {kl[-1]:.2f}" in alt
    assert "coefficient β of the KL from 0.0502 to 0.0600" in alt
    assert math.isnan(critic[0])
    assert f"from {critic[1]:.3f} to {critic[-1]:.3f}".replace("-", "−") in alt


def test_fixed_coefficient_is_not_drawn(make_run: MakeRun) -> None:
    run = make_run()
    ppo = run.curves["ppo"]
    fixed = replace(run, curves=run.curves | {"ppo": ppo | {"kl_coef": [0.05] * len(ppo["kl"])}})
    drawn = ppo_curves(fixed)
    assert drawn is not None
    assert "β" not in drawn.alt


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
    assert len(names(replace(run, curves=short, samples=run.samples[:1]))) == len(PICTURES)


def lines_of(monkeypatch: pytest.MonkeyPatch, make: Callable[[Run], Picture | None], run: Run) -> tuple[Picture, Lines]:
    """A picture, and the lines of its panels: (label, line style, x, y)."""
    figures: list[Figure] = []
    monkeypatch.setattr(module, "png", lambda figure: figures.append(figure) or png(figure))
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
    picture, panels = lines_of(monkeypatch, frontier, run)
    assert "Win rate against SFT against KL to SFT: SFT 50.0% at 0.00 nats; " in picture.alt
    assert "Best of 4" not in picture.alt
    steps = [row["win_rate"] for row in sorted(run.frontier, key=lambda row: row["kl"]) if row["family"] == "ppo"]
    assert steps in [y for _, _, _, y in panels[0]]


def test_the_frontier_is_the_majorant_of_all_of_ppos_points(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Straight in KL, through the interpolated policy, flat from the best point to the largest KL."""
    run = make_run()
    own = [row for row in run.frontier if row["family"] in ("sft", "ppo", "interpolated")]
    kls, scores = [row["kl"] for row in own], [row["gold"] for row in own]
    picture, (lines,) = lines_of(monkeypatch, frontier, run)
    x, y = next((x, y) for _, style, x, y in lines if len(x) == 101 and style == "-")
    assert (x[0], x[-1]) == (0.0, pytest.approx(math.sqrt(max(kls))))
    assert y == pytest.approx([majorant_at(min(each * each, max(kls)), kls, scores) for each in x])
    assert max(y) == pytest.approx(max(scores)) == pytest.approx(y[-1])
    assert "concave majorant (straight in KL)" in picture.caption
    assert "PPO, step 60" in picture.alt
    assert "step 5 " in picture.alt


def test_where_the_policy_is_an_interpolation_no_snapshot_has_its_name(make_run: MakeRun) -> None:
    run = make_run()
    select = run.metrics["select"]
    for eta, named in ((1.0, True), (0.5, False)):
        of = replace(run, metrics=run.metrics | {"select": select | {"eta": eta}})
        picture = frontier(of)
        assert picture is not None
        assert ("PPO, step 60" in picture.alt) == named


def test_few_snapshots_are_all_labelled(make_run: MakeRun) -> None:
    run = make_run()
    few = [row for row in run.frontier if row["family"] != "ppo" or row["point"] in (12, 20, 25, 60)]
    few = [row | {"point": 12 if row["point"] == 20 else row["point"]} for row in few]
    picture = frontier(replace(run, frontier=few))
    assert picture is not None
    assert all(f"step {step} " in picture.alt for step in (12, 25, 60))


def test_the_ceiling_is_dashed_from_sfts_score(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    _, (lines,) = lines_of(monkeypatch, frontier, run)
    ((x, y),) = [(x, y) for label, _, x, y in lines if label == "the optimum"]
    assert y[0] == 1.7123
    assert list(x) == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert "Dashed: the optimum" in lines_of(monkeypatch, frontier, run)[0].caption
    without = replace(run, metrics=run.metrics | {"evaluate": run.evaluation | {"optimum": []}})
    assert "optimum" not in lines_of(monkeypatch, frontier, without)[0].caption


def test_the_captions_name_the_answers_of_one_sampling_seed(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    assert "only the first of the table’s 3 sampling seeds." in lines_of(monkeypatch, frontier, run)[0].caption


def test_the_disagreement_of_several_reward_models_is_a_panel(make_run: MakeRun) -> None:
    run = make_run()
    ppo = run.curves["ppo"]
    for curves, shown in ((ppo, False), (ppo | {"reward/std": [0.3] * len(ppo["step"])}, True)):
        picture = ppo_curves(replace(run, curves=run.curves | {"ppo": curves}))
        assert picture is not None
        assert ("disagreement of the reward models from 0.30 to 0.30" in picture.alt) == shown


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
