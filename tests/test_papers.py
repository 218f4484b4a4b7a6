"""The tables of docs/papers.md are those of the committed studies, and find what a made-up study was made with."""

import itertools
import math
from pathlib import Path
from statistics import fmean
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from flows.commands.study.leaderboard import gold_within
from tasks.page.comparison_table import label
from tests.conftest import table_rows
from tests.test_docs import script

LEADERBOARD = Path(__file__).resolve().parents[1] / "docs" / "leaderboard.md"


@pytest.fixture
def papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/make_papers.py with a folder of its own."""
    maker = script("make_papers")
    monkeypatch.setattr(maker, "FOLDER", tmp_path)
    return maker


def store(papers: ModuleType, name: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    pd.DataFrame(rows).to_csv(papers.FOLDER / f"{name}.csv", index=False)
    table: pd.DataFrame = papers.read(name)
    return table


def point(family: str, place: Any, kl: float, gold: float, **setting: Any) -> dict[str, Any]:
    return {**setting, "accuracy": 0.8, "family": family, "point": place, "kl": kl, "gold": gold, "reward": 0.0}


def test_the_page_has_a_place_for_each_table_and_those_of_the_studies_that_were_run() -> None:
    maker = script("make_papers")
    text = maker.PAGE.read_text(encoding="utf-8")
    for mark in maker.TABLES:
        assert text.count(f"<!-- table {mark} -->") == text.count(f"<!-- end {mark} -->") == 1
    assert maker.page(text) == text, "python docs/make_papers.py"


@pytest.mark.parametrize("pairs", [(300, 1000, 3000, 10000), (3000,)])
def test_the_forms_of_gao_and_their_growth_are_found(papers: ModuleType, pairs: tuple[int, ...]) -> None:
    """α = 1 + 0.3·log₁₀(millions of weights) + 0.2·log₁₀(pairs / 1000), β = 0.3, for both forms and every seed. Where
    the number of pairs does not vary, nothing is said of it."""
    rows = []
    for size, number, seed in itertools.product((0.2, 1, 4), pairs, (1, 2, 3)):
        setting = {"case": f"{size}m-{number}", "seed": seed}
        alpha, start = 1 + 0.3 * math.log10(size) + 0.2 * math.log10(number / 1000), 0.5 + seed
        rows.append(point("sft", 0, 0.0, start, **setting))
        for place in range(1, 9):
            d = 0.3 * place
            rows.append(point("best_of_n", 2**place, d * d, start + d * (alpha - 0.3 * d), **setting))
            rows.append(point("ppo", place, d * d, start + d * (alpha - 0.3 * math.log(d)), **setting))
    stored = store(papers, "gao", rows)
    assert papers.gao_picture(stored).startswith(b"\x89PNG")
    table = [[cell.split()[0] for cell in row.split("|")[2:5]] for row in papers.gao_slopes(stored).splitlines()[2:]]
    by_pairs = ["0.20", "0.00"] if len(pairs) > 1 else ["–", "–"]
    for alpha, beta in (table[:2], table[2:]):
        assert alpha[1:] == ["0.30", by_pairs[0]]
        assert beta == ["0.30", "0.00", by_pairs[1]]


@pytest.mark.parametrize("moving", [(), ("moving",)])
def test_the_effects_of_xu_are_paired_and_separate(papers: ModuleType, moving: tuple[str, ...]) -> None:
    """Large batch +1, normalised advantages +0.5, a moving reference −0.1, beside a different level of each seed; with
    all eight cases, and with four of them."""
    rows = []
    choices = itertools.product(("small", "large"), ("", "normalised"), ("", *moving), (1, 2))
    for batch, whiten, ema, seed in (*choices, *(("large", "normalised", "moving", seed) for seed in (1, 2))):
        setting = {"case": "-".join(filter(None, (batch, whiten, ema))), "seed": seed}
        gold = seed + (batch == "large") + 0.5 * bool(whiten) - 0.1 * bool(ema)
        rows += [point("sft", 0, 0.0, 0.0, **setting), point("ppo", 4, 1.0, 9.0, **setting)]
        rows += [point("ppo", 28, 3.0 + 2 * bool(ema), gold, **setting), point("dpo", "", 4.0, 1.5, **setting)]
    table = store(papers, "xu", pd.DataFrame(rows).drop_duplicates().to_dict("records"))
    found = [line.split("|")[2].split()[0] for line in papers.xu_effects(table).splitlines()[2:]]
    assert found == ["+1.00", "+0.50", "−0.10"]
    assert papers.xu_effects(table).splitlines()[-1].endswith("| +0.00 (+0.00 to +0.00) | +2.00 (+2.00 to +2.00) |")
    assert "| DPO |  |  | 1.50" in papers.xu_table(table)
    assert papers.xu_picture(table).startswith(b"\x89PNG")


def test_methods_are_compared_with_the_last_step_of_ppo_and_the_largest_n(papers: ModuleType) -> None:
    """A case's row is there only for the methods that it changes."""
    rows = []
    for case, seed in itertools.product(("published", "ppo-style"), (1, 2, 3)):
        other = 0.5 * (case != "published")
        rows += [point("sft", 0, 0.0, 0.5, case=case, seed=seed), point("ppo", 4, 1.0, 9.0, case=case, seed=seed)]
        rows += [point("ppo", 28, 3.0, 3.0, case=case, seed=seed), point("dpo", 0, 3.0, 1.0, case=case, seed=seed)]
        rows += [point("rloo", 0, 3.0, 2.75 - other, case=case, seed=seed)]
        rows += [point("grpo", 0, 3.0, 2.0 + other, case=case, seed=seed)]
        rows += [point("best_of_n", n, 0.6, gold, case=case, seed=seed) for n, gold in ((4, 9.0), (16, 3.5))]
    table = store(papers, "ahmadian", rows)
    lines = papers.ahmadian_table(table).splitlines()[2:]
    assert {line.split("|")[1].strip(): line.split("|")[5].split()[0] for line in lines} == {
        "PPO": "–", "RLOO, one update of a rollout": "+0.25", "RLOO, PPO's settings": "+0.75",
        "GRPO, one update of a rollout": "+1.00", "DPO": "+2.00", "best of 16": "−0.50",
    }  # fmt: skip
    assert papers.ahmadian_picture(table).startswith(b"\x89PNG")


def test_shares_are_those_of_the_optimum_of_the_same_trial(papers: ModuleType) -> None:
    """The optimum gains 2·seed in reward at 4 nats; half of it at the same KL is a share of a half."""
    rows = []
    for seed in (1, 2):
        for family, place, kl, reward in (
            ("sft", 0, 0, 5),
            ("ppo", 28, 2, 5 + seed / 2),
            ("optimum", 0.1, 4, 5 + 2 * seed),
        ):
            rows.append(point(family, place, kl, 0.0, case="published", seed=seed) | {"reward": reward})
        rows.append(point("rloo", 0, 4.5, 0.0, case="published", seed=seed) | {"reward": 9})
    table = store(papers, "ahmadian", rows)
    assert papers.shares(table[table.family == "ppo"], table) == [0.5, 0.5]
    assert all(map(math.isnan, papers.shares(table[table.family == "rloo"], table)))


def test_without_gold_the_methods_are_compared_by_the_score(papers: ModuleType) -> None:
    rows = []
    for seed in (1, 2):
        for family, place, reward in (("sft", 0, 0.4), ("ppo", 80, 0.9), ("rloo", 0, 0.7), ("best_of_n", 4, 0.8)):
            setting = {"case": "published", "seed": seed}
            rows.append(point(family, place, 1.0, "", **setting) | {"reward": reward, "accuracy": ""})
    lines = papers.ahmadian_table(store(papers, "ahmadian-arithmetic", rows), "reward").splitlines()
    assert "reward" in lines[0]
    assert [line.split("|")[5].split()[0] for line in lines[2:]] == ["–", "+0.20", "+0.10"]


def test_the_best_rate_of_each_method_is_marked(papers: ModuleType) -> None:
    rows = [
        point(family, place, 1.0, "", case=case, seed=11) | {"reward": reward}
        for family, place, rewards in (("ppo", 20, (0.9, 0.9)), ("ppo", 80, (0.5, 0.6)), ("grpo", 0, (0.7, 0.4)))
        for case, reward in zip(("low", "high"), rewards, strict=True)
    ]
    assert papers.tuning_table(store(papers, "tuning", rows), "reward").splitlines()[2:] == [
        "| PPO | 0.50 | **0.60** |",
        "| GRPO | **0.70** | 0.40 |",
    ]


def test_each_rung_is_compared_with_the_one_before(papers: ModuleType) -> None:
    rows = [
        point("ppo", place, 2.0 if case == "batch" else 3.0, gold + seed, case=case, seed=seed)
        for case, gold in zip(papers.RUNGS, (1.0, 1.5, 1.25, 2.0, 2.0, 3.0, 3.5), strict=True)
        for seed in (1, 2) for place in (4, 28)
    ]  # fmt: skip
    rows += [point("sft", 0, 0.0, 0.0, case=case, seed=seed) for case in papers.RUNGS for seed in (1, 2)]
    lines = papers.ladder_table(store(papers, "ahmadian-ppo", rows)).splitlines()[2:]
    assert [line.split("|")[4].split()[0] for line in lines] == [
        "–",
        "+0.50",
        "−0.25",
        "+0.75",
        "+0.00",
        "+1.00",
        "+0.50",
    ]
    assert [line.split("|")[5].split()[0] for line in lines] == ["–", *["+0.00"] * 3, "−1.00", "+1.00", "+0.00"]


def test_ensembles_are_compared_with_one_reward_model_and_own_bodies_with_one_body(papers: ModuleType) -> None:
    """At the end the lowest of four is 0.25 above one reward model on one body, and 0.5 on bodies of their own. Best of
    128 loses 0.3 of its highest gain with one reward model, and gains 0.2 with four. PPO's step 4 is the highest of the
    other seeds for seed 1, whose own is step 20, and step 20 for seeds 2 and 3."""
    rows = []
    for case, seed in itertools.product(("one", "one-body-min", "own-bodies-min"), (1, 2, 3)):
        setting = {"case": case, "seed": seed}
        end = -1.0 + seed + {"one": 0, "one-body-min": 0.25, "own-bodies-min": 0.5}[case]
        rows += [point("sft", 0, 0.0, seed, **setting), point("ppo", 4, 1.0, seed + 4.0, **setting)]
        rows += [point("ppo", 20, 5.0, seed + (4.5 if seed == 1 else 3.8), **setting)]
        rows += [point("ppo", 45, 9.0, seed + end, **setting)]
        for n, kl, gain in ((1, 0.0, 0.1), (16, 1.8, 1.0), (128, 3.9, 0.7 if case == "one" else 1.2)):
            rows.append(point("best_of_n", n, kl, seed + gain, **setting))
    last_case = [row for row in rows if row["case"] == "own-bodies-min"]
    store(papers, "ensembles-rules", last_case)  # the other cases may be those of another study
    table = store(papers, "ensembles", [row for row in rows if row not in last_case])
    found = {
        row[1].strip(): row for row in (line.split("|") for line in papers.ensembles_table(table).splitlines()[2:])
    }
    assert {name: row[3].split()[0] for name, row in found.items()} == {
        "one reward model": "−0.30", "four, one body: lowest": "+0.20", "four, own bodies: lowest": "+0.20",
    }  # fmt: skip
    highest = f"{(4.0 + 3.8 + 3.8) / 3 - 0.1:.2f}"
    assert {row[4].split()[0] for row in found.values()} == {highest}, "less the mean of best of 1"
    assert [row[6].split()[0] for row in found.values()] == ["2.87", "2.62", "2.37"], "the highest less the end"
    assert [row[7].split()[0] for row in found.values()] == ["–", "+0.25", "+0.50"]
    (bodies,) = papers.ensembles_bodies(table).splitlines()[2:]
    assert [text.split()[0] for text in bodies.split("|")[1:-1]] == ["lowest", "+0.000", "+0.00", "+0.00", "+0.25"]
    assert papers.ensembles_picture(table).startswith(b"\x89PNG")


def test_the_gain_with_a_kl_penalty_is_compared_at_the_same_kl(papers: ModuleType) -> None:
    """Without a penalty the gain is 2·√KL up to √KL 3. With one it is 0.2 more at √KL 1.5, and 0.5 at the end, 2.5;
    the snapshot between is further out than all without a penalty."""
    for name, places in (("gao", (1, 2, 3)), ("gao-leash", (1.5, 3.5, 2.5))):
        rows = [point("sft", 0, 0.0, 1.0, case="4m-3000", seed=seed) for seed in (1, 2)]
        for (step, d), seed in itertools.product(enumerate(places, start=8), (1, 2)):
            more = (0.2 if d == 1.5 else 0.5) * (name == "gao-leash")
            rows.append(point("ppo", step, d * d, 1.0 + 2 * d + more, case="4m-3000", seed=seed))
        table = store(papers, name, rows)
    (line,) = papers.leash_table(table).splitlines()[2:]
    cells = [cell.split()[0] for cell in line.split("|")[1:-1]]
    assert cells == ["4", "2.5", "5.50", "+0.50", "+0.35"]


def test_highest_gains_are_compared_over_the_reward_models_of_a_seed(papers: ModuleType) -> None:
    """PPO's highest gain is at step 2, and its last step comes back towards SFT; with one reward model seed 3 is
    highest at step 10 by chance, which is no peak. Best of n has PPO's gain at √KL 2/3, and 0.8."""
    rows = []
    for case, seed in itertools.product(("1m-300", "1m-1000"), (1, 2, 3)):
        setting, more = {"case": case, "seed": seed}, 0.2 * (case == "1m-300")
        chance = 0.6 * (case == "1m-1000" and seed == 3)
        rows.append(point("sft", 0, 0.0, 0.0, **setting))
        for family, place, d, gain in (
            ("best_of_n", 4, 0, 0.0), ("best_of_n", 16, 1, 1.5), ("best_of_n", 128, 2, 1.1), ("ppo", 2, 1.5, 1 + more),
            ("ppo", 10, 2.5, 0.5 + chance), ("ppo", 24, 2, 0.4),
        ):  # fmt: skip
            rows.append(point(family, place, d * d, gain, **setting))
    table = store(papers, "gao", rows)
    lines = papers.gao_peaks(table[table.seed < 3]).splitlines()[2:]
    assert [line.split("|")[2].split()[0] for line in lines] == ["−0.40", "+0.50", "+0.77", "−0.70", "−0.40"]
    ppo = table[(table.case == "1m-1000") & (table.family == "ppo")]
    assert list(papers.mean_path(ppo)[0]) == [1.5, 2.5, 2.0], "in the order of the steps"
    assert papers.above_before(ppo) == pytest.approx([-0.6, -0.6, -0.6])
    assert "| 0.40 (0.40 to 0.40) | 2.0 (2.0 to 2.0) |" in papers.gao_table(table)
    assert math.isnan(papers.same_gain(table[table.family == "best_of_n"], 1.6))


def test_a_setting_without_all_its_seeds_is_left_out(
    papers: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two cases of two seeds; a trial of the second has not finished."""
    trials = [
        SimpleNamespace(name=f"{case}-{seed}", setting=(("case", case),), params={"seed": seed})
        for case in ("whole", "begun") for seed in (1, 2)
    ]  # fmt: skip
    files = {
        "metrics/reward.json": b'{"heldout_accuracy": 0.75}',
        "metrics/evaluate.json": b'{"optimum": [{"beta": 0.1, "kl": 2.0, "gold": 1.5, "reward": 3.0}]}',
        "plots/frontier.csv": b"family,point,kl,gold,reward\nsft,0,0.0,0.5,1.0\nppo,24,1.0,1.25,2.0\n",
    }
    monkeypatch.setattr(papers, "read_study", lambda *_: ("gao", None))
    monkeypatch.setattr(papers, "find", lambda *_: SimpleNamespace(trials=trials, commit="c"))
    monkeypatch.setattr(papers.isolated, "find", lambda _root, _commit, name: None if name == "begun-2" else name)
    monkeypatch.setattr(papers, "read_results", lambda *_: files)
    papers.export("gao")
    table = papers.read("gao")
    assert [tuple(row) for row in table[["case", "seed", "family", "gain"]].itertuples(index=False)] == [
        ("whole", seed, family, gain)
        for seed in (1, 2) for family, gain in (("sft", 0.0), ("ppo", 0.75), ("optimum", 1.0))
    ]  # fmt: skip
    assert capsys.readouterr().out == "begun-2 is not finished: its setting is left out\n"
    assert set(table.accuracy) == {0.75}
    del files["metrics/reward.json"]
    papers.export("gao")
    assert papers.read("gao").accuracy.isna().all(), "without a reward model"


def test_the_leaderboard_has_the_scores_of_its_study() -> None:
    """A row of a study of examples/papers/ has the mean over seeds that the study's CSV file gives."""
    maker = script("make_papers")
    rows = [row for row in table_rows(LEADERBOARD.read_text(encoding="utf-8")) if "examples/papers/" in row[-2]]
    assert rows
    families = {label(name): name for name in ("policy", *maker.METHODS)}
    for method, setting, gold, seeds, _tokens, _commit, command, _date in rows:
        table = maker.read(Path(command.strip("`").split()[2]).stem)
        trials = table[table.case == setting.removeprefix("case ")]
        golds = [
            gold_within(SimpleNamespace(frontier=part.to_dict("records")), families[method])  # type: ignore[arg-type]
            for _, part in trials.groupby("seed")
        ]
        assert len(golds) == int(seeds)
        assert None not in golds
        assert float(gold.split()[0]) == pytest.approx(fmean(one for one in golds if one is not None), abs=0.006)


def test_the_readme_has_the_best_row_of_each_method_of_the_leaderboard() -> None:
    _heading, _line, *rows = table_rows(LEADERBOARD.read_text(encoding="utf-8"))
    rows.sort(key=lambda row: -float(row[2].split()[0]))
    best: dict[str, str] = {}
    for method, _setting, gold, *_rest in rows:
        best.setdefault(method.removesuffix(" policy"), gold)
    text = (LEADERBOARD.parents[1] / "README.md").read_text(encoding="utf-8")
    names, golds = table_rows(text.partition("**Leaderboard:**")[2].partition("\n## ")[0])
    shown = [name.partition(":")[0] for name in names]
    assert list(zip(shown, golds, strict=True)) == list(best.items())
