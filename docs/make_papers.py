"""Makes the tables and pictures of docs/papers.md from the studies of examples/papers/.

python docs/make_papers.py gao xu     # of these studies: docs/papers/NAME.csv from the finished trials, and pictures
python docs/make_papers.py            # all pictures, from the CSV files that are there

Both write all tables of the page from the CSV files.

The page has a pair of marks around each table; a test compares the tables with the CSV files.
"""

import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from flows import isolated  # noqa: E402
from flows.commands.study.file import read_study  # noqa: E402
from flows.commands.study.picture import mean_line  # noqa: E402
from flows.commands.study.study import find  # noqa: E402
from flows.commands.study.tables import Summary, markdown, summarise, text  # noqa: E402
from rlhf_core.evaluation.optimum import share_of_optimum  # noqa: E402
from tasks.page.canvas import INK, MUTED, canvas, colour_of, label_axes, png, styled  # noqa: E402
from tasks.records.recorded import read_results  # noqa: E402

PAGE, FOLDER = HERE / "papers.md", HERE / "papers"
KEPT = ["family", "point", "kl", "gold", "reward"]
"""Columns of plots/frontier.csv: a model or snapshot, its n or step, KL to SFT in nats, and mean scores on the held-out
prompts. Rows of the family `optimum` are from metrics/evaluate.json, with their β as `point`."""

MORE = {"ensembles": ("ensembles-rules",)}
"""Of a study that is longer than an evening: the others with its other cases."""


def export(name: str) -> None:
    """Write docs/papers/NAME.csv: a row for each point of the frontier of each trial. It has the setting and seed of
    the trial and the accuracy of its reward model, too, where it has one. Settings that have not finished with all
    seeds are left out."""
    _, call = read_study(ROOT, ROOT / "examples" / "papers" / f"{name}.yaml")
    study = find(ROOT, call, name, "HEAD")
    ended = [(trial, isolated.find(ROOT, study.commit, trial.name)) for trial in study.trials]
    unfinished = {trial.setting: trial.name for trial, found in ended if found is None}
    for trial_name in unfinished.values():
        print(f"{trial_name} is not finished: its setting is left out")
    parts = []
    for trial, found in ended:
        if found is None or trial.setting in unfinished:
            continue
        files = read_results(ROOT, found, "metrics/reward.json", "metrics/evaluate.json", "plots/frontier.csv")
        rows = pd.read_csv(io.BytesIO(files["plots/frontier.csv"]))[KEPT].dropna(subset=["kl"])
        optimum = pd.DataFrame(json.loads(files["metrics/evaluate.json"])["optimum"]).rename(columns={"beta": "point"})
        if len(optimum):
            rows = pd.concat([rows, optimum.assign(family="optimum")[KEPT]])
        setting = {key.rsplit(".", 1)[-1]: value for key, value in trial.setting}
        accuracy = json.loads(files.get("metrics/reward.json", b"{}")).get("heldout_accuracy")
        parts.append(rows.assign(**setting, seed=trial.params["seed"], accuracy=accuracy))
    if not parts:
        sys.exit(f"{name}: no setting is finished; run leash study examples/papers/{name}.yaml")
    FOLDER.mkdir(exist_ok=True)
    table = pd.concat(parts)
    table = table[[*(column for column in table if column not in KEPT), *KEPT]]
    table.to_csv(FOLDER / f"{name}.csv", index=False, float_format="%.4g", lineterminator="\n")


def read(name: str) -> pd.DataFrame:
    """What `export` wrote. `d` is √KL and `gain` the gold score less that of SFT, of the same trial: of best of n with
    n = 1, the mean of many answers, where there is one, else of one answer to each prompt."""
    files = filter(Path.is_file, (FOLDER / f"{part}.csv" for part in (name, *MORE.get(name, ()))))
    missing = {"gold": [""], "accuracy": [""]}
    table = pd.concat(
        [pd.read_csv(file, keep_default_na=False, na_values=missing) for file in files], ignore_index=True
    )
    keys = [str(column) for column in table if column not in [*KEPT, "accuracy"]]
    many = (table.family == "best_of_n") & (table.point.astype(str).isin(["1", "1.0"]))
    start = table[many].set_index(keys).gold.combine_first(table[table.family == "sft"].set_index(keys).gold)
    table = table.join(start.rename("start"), on=keys)
    return table.assign(d=np.sqrt(table.kl.clip(lower=0)), gain=table.gold - table.start)


def over_seeds(values: Iterable[float]) -> Summary | None:
    """Mean and 95% interval over training seeds."""
    found = [value for value in values if not math.isnan(value)]
    return summarise(found, [None] * len(found))


def cell(values: Iterable[float], form: str = ".2f") -> str:
    """`over_seeds` in words."""
    return text(over_seeds(values), form)


def by_seed(table: pd.DataFrame, value: Callable[[pd.DataFrame], float]) -> list[float]:
    """The value of each seed's rows, in the order of the seeds."""
    return [value(rows) for _, rows in table.groupby("seed")]


def method_rows(table: pd.DataFrame, family: str) -> pd.DataFrame:
    """The row of each trial: PPO's last snapshot, the best of the most answers, or the method's model."""
    rows = table[table.family == family]
    if family not in FAMILIES:
        return rows
    points = rows.point.astype(float)
    trials = [rows[column] for column in rows if column not in [*KEPT, "accuracy", "start", "d", "gain"]]
    return rows[points == points.groupby(trials).transform("max")]


def shares(rows: pd.DataFrame, table: pd.DataFrame) -> list[float]:
    """The gain in reward of each row of a method, as a share of the optimum's at the same KL and of the same trial; NaN
    where it is not estimated."""
    found = []
    for row in rows.to_dict("records"):
        trial = table[(table.seed == row["seed"]) & (table.case == row["case"])]
        start, optimum = trial[trial.family == "sft"].reward.iloc[0], trial[trial.family == "optimum"].sort_values("kl")
        share = share_of_optimum(row["reward"] - start, row["kl"], list(optimum.kl), list(optimum.reward - start))
        found.append(math.nan if share is None else share)
    return found


# Gao, Schulman, Hilton 2022


def fit(d: "pd.Series[float]", gain: "pd.Series[float]", rl: bool) -> tuple[float, float]:
    """α and β of gain = d·(α − β·d) for best of n, and d·(α − β·log d) for RL, by least squares."""
    x, y = d.to_numpy()[d > 0], gain.to_numpy()[d > 0]
    features = np.stack([x, -x * np.log(x) if rl else -x * x], axis=1)
    alpha, beta = np.linalg.lstsq(features, y, rcond=None)[0]
    return float(alpha), float(beta)


FAMILIES = {"best_of_n": False, "ppo": True}
"""Family of the frontier, and whether its form is that of RL."""


def peak(rows: pd.DataFrame) -> float:
    """The highest gain; 0, of SFT itself, where none is above."""
    return max(0.0, float(rows.gain.max()))


def peak_place(rows: pd.DataFrame) -> float:
    """√KL at the highest gain."""
    return float(rows.d.iloc[int(rows.gain.to_numpy().argmax())]) if peak(rows) else 0.0


def final(rows: pd.DataFrame) -> "pd.Series[Any]":
    """The row of the last step, or of the most answers."""
    return rows.iloc[int(rows.point.astype(float).to_numpy().argmax())]


def last(rows: pd.DataFrame) -> float:
    """The gain of the last step, or of the most answers."""
    return float(final(rows).gain)


def highest_before(rows: pd.DataFrame) -> list[float]:
    """For each seed of one setting, the gain where the mean of the other seeds is highest, of all points but the last:
    the highest of a seed's own points is too high by chance."""
    gains = rows.assign(point=rows.point.astype(float)).pivot(index="seed", columns="point", values="gain")
    before = gains.iloc[:, :-1]
    return [float(mine[before.drop(index=seed).mean().idxmax()]) for seed, mine in before.iterrows()]


def above_before(rows: pd.DataFrame) -> list[float]:
    """For each seed, the last gain less `highest_before`."""
    return [end - before for end, before in zip(by_seed(rows, last), highest_before(rows), strict=True)]


def reward_models(table: pd.DataFrame) -> pd.DataFrame:
    """The rows with the millions of weights and the number of pairs of a case, such as 0.2m-3000."""
    parts = table.case.str.extract(r"(.+)m-(.+)")
    return table.assign(weights=parts[0].astype(float), pairs=parts[1].astype(int))


def gao_table(table: pd.DataFrame) -> str:
    """A row for each size and number of pairs."""
    cells = [["weights", "pairs", "accuracy", "best of n: highest gain", "at √KL", "PPO: highest gain", "at √KL",
              "PPO: gain at the end", "√KL"]]  # fmt: skip
    for (weights, pairs), rows in reward_models(table).groupby(["weights", "pairs"]):
        bon, ppo = (rows[rows.family == family] for family in FAMILIES)
        cells.append([
            f"{weights:g} million", f"{pairs:,}", cell(by_seed(rows, lambda r: r.accuracy.iloc[0])),
            cell(by_seed(bon, peak)), cell(by_seed(bon, peak_place)),
            cell(by_seed(ppo, peak)), cell(by_seed(ppo, peak_place)),
            cell(by_seed(ppo, last)), cell(by_seed(ppo, lambda r: final(r).d), ".1f"),
        ])  # fmt: skip
    return markdown(cells)


def gao_slopes(table: pd.DataFrame) -> str:
    """How α and β of the two forms change with ten times the weights or the pairs: least squares over the reward models
    of a seed, then the mean of the seeds. –: this size does not vary."""
    cells = [["", "mean", "per ten times the weights", "per ten times the pairs"]]
    for family, rl in FAMILIES.items():
        per_seed: dict[str, list[Sequence[float]]] = {"α": [], "β": []}
        for _, rows in reward_models(table[table.family == family]).groupby("seed"):
            models = [part for _, part in rows.groupby("case")]
            found = np.array([fit(part.d, part.gain, rl) for part in models])
            sizes = np.log10([[part.weights.iloc[0], part.pairs.iloc[0]] for part in models])
            varied = np.ptp(sizes, axis=0) > 0
            x = np.column_stack([np.ones(len(models)), sizes[:, varied]])
            for name, column in zip(per_seed, found.T, strict=True):
                slopes = np.full(2, math.nan)
                slopes[varied] = np.linalg.lstsq(x, column, rcond=None)[0][1:]
                per_seed[name].append([fmean(column), *slopes])
        label = "PPO" if rl else "best of n"
        for name, values in per_seed.items():
            cells.append([f"{name}, {label}", *(cell(column) for column in zip(*values, strict=True))])
    return markdown(cells)


def same_gain(bon: pd.DataFrame, gain: float) -> float:
    """The least √KL at which best of n has this gain, on the straight lines between its points; NaN: at none."""
    bon = bon.sort_values("d")
    return float(np.interp(gain, np.maximum.accumulate(bon.gain), bon.d, right=math.nan))


def gao_peaks(table: pd.DataFrame) -> str:
    """How PPO's and best of n's gains differ: means over the reward models of a seed, then over the seeds.
    Where best of n never has PPO's highest gain, the row of the same gain leaves the trial out."""
    found: dict[str, list[list[float]]] = {}
    for _, rows in table.groupby("case"):
        bon, ppo = (rows[rows.family == family] for family in FAMILIES)
        trials = [(bon[bon.seed == seed], mine) for seed, mine in ppo.groupby("seed")]
        for label, values in {
            "highest gain, PPO less best of n": [peak(mine) - peak(other) for other, mine in trials],
            "its √KL, PPO less best of n": [peak_place(mine) - peak_place(other) for other, mine in trials],
            "√KL of PPO's highest gain, less best of n's with the same gain": [
                peak_place(mine) - same_gain(other, peak(mine)) for other, mine in trials
            ],
            "PPO: gain at the end less the highest before": above_before(ppo),
            "best of n: gain with 128 less the highest of fewer": above_before(bon),
        }.items():
            found.setdefault(label, []).append(values)
    cells = [[label, cell(np.nanmean(values, axis=0), "+.2f")] for label, values in found.items()]
    return markdown([["", "mean over the reward models"], *cells])


def leash_table(table: pd.DataFrame) -> str:
    """PPO's gain with a KL penalty less that of `gao` without one, of the same case and seed and at the same √KL: on
    the straight lines between its snapshots. At the end, and mean of the snapshots that both reach."""
    free = read("gao")
    cells = [
        ["weights", "√KL at the end", "gain at the end", "less the gain without a penalty", "mean of the snapshots"]
    ]
    for case, rows in table[table.family == "ppo"].groupby("case", sort=False):
        found = []
        for seed, mine in rows.groupby("seed"):
            other = free[(free.case == case) & (free.seed == seed) & (free.family == "ppo")].sort_values("d")
            end = final(mine)
            less = mine.gain - np.interp(mine.d, other.d, other.gain, left=math.nan, right=math.nan)
            found.append([end.d, end.gain, less[end.name], less.mean()])
        forms = (".1f", ".2f", "+.2f", "+.2f")
        columns = zip(zip(*found, strict=True), forms, strict=True)
        cells.append([f"{str(case).partition('m-')[0]} million", *(cell(values, form) for values, form in columns)])
    return markdown(cells)


def mean_path(rows: pd.DataFrame) -> tuple["pd.Series[float]", "pd.Series[float]"]:
    """√KL and gain of each step or n in their order, means of the seeds."""
    means = rows.assign(point=rows.point.astype(float)).groupby("point")[["d", "gain"]].mean()
    return means.d, means.gain


def draw_optimum(axes: Any, table: pd.DataFrame, height: str) -> None:
    """The optimum of the reward model over √KL, mean of the seeds of one setting; nothing without it."""
    lines = [
        list(zip(rows.d, rows[height], strict=True))
        for _, rows in table[table.family == "optimum"].sort_values("kl").groupby("seed")
    ]
    if lines:
        axes.plot(*mean_line(lines), color=MUTED, label="the optimum for the reward model", linestyle=(0, (5, 3)))


def draw_points(axes: Any, rows: pd.DataFrame, mark: str, name: str, **style: Any) -> None:
    """Gold over √KL: a small mark for each training seed, and a large one for their mean."""
    axes.plot(rows.d, rows.gold, mark, markersize=3, **style)
    axes.plot(rows.d.mean(), rows.gold.mean(), mark, markersize=8, label=name, **style)


def gao_picture(table: pd.DataFrame) -> bytes:
    """Gain over √KL, means of the seeds: a panel with all sizes at 3,000 pairs, and one with all numbers of pairs at a
    million weights, where there are several. The optimum is that of the last line."""
    table = reward_models(table)
    halves = [
        ("3,000 pairs, millions of weights:", "weights", table[table.pairs == 3000]),
        ("A million weights, pairs:", "pairs", table[table.weights == 1]),
    ]
    halves = [half for half in halves if half[2][half[1]].nunique() > 1]
    with styled():
        figure, panels = canvas("Gold score less SFT's over √KL: PPO without a leash, best of n dashed",
                                columns=len(halves), panels=(1,), width=8.6, height=4.4)  # fmt: skip
        for axes, (title, varied, part) in zip(panels, halves, strict=True):
            groups = list(part.groupby(varied))
            for rank, (size, rows) in enumerate(groups):
                colour: Any = (0.09, 0.41, 0.78, 0.3 + 0.7 * rank / max(1, len(groups) - 1))
                for family, style in (("ppo", "-"), ("best_of_n", "--")):
                    label = f"{size:,}" if style == "-" else None
                    axes.plot(*mean_path(rows[rows.family == family]), style, color=colour, label=label)
            draw_optimum(axes, groups[-1][1], "gain")
            axes.set_title(title, fontsize=10, loc="left")
            axes.legend(fontsize=8, loc="lower center")
            label_axes(axes, "gold less SFT's" if axes is panels[0] else "", "√KL")
        return png(figure)


# Coste et al. 2023 and Eisenstein et al. 2023


COMBINED = {"mean": "mean", "min": "lowest", "uncertainty": "mean less spread"}
BODIES = {"one-body": "four, one body", "own-bodies": "four, own bodies"}
COLOURS = dict(zip(COMBINED, map(colour_of, ("rloo", "ppo", "dpo")), strict=True))
ENSEMBLES = {"one": ("one reward model", INK, ":")} | {
    f"{body}-{rule}": (f"{bodies}: {combined}", COLOURS[rule], "--" if body == "one-body" else "-")
    for rule, combined in COMBINED.items() for body, bodies in BODIES.items()
}  # fmt: skip
"""Label, colour and line of each case."""


def ensembles_table(table: pd.DataFrame) -> str:
    """A row for each case."""
    cells = [["reward", "best of 128: gain", "less the highest of fewer", "PPO: highest gain", "gain at the end",
              "its fall", "end less that of one"]]  # fmt: skip
    alone = by_seed(table[(table.case == "one") & (table.family == "ppo")], last)
    for case, (label, *_) in ENSEMBLES.items():
        rows = table[table.case == case]
        if not len(rows):
            continue
        bon, ppo = (rows[rows.family == family] for family in FAMILIES)
        ends, highest = by_seed(ppo, last), highest_before(ppo)
        falls = [high - end for high, end in zip(highest, ends, strict=True)]
        differences = [mine - other for mine, other in zip(ends, alone, strict=True)]
        cells.append([
            label, cell(by_seed(bon, last)), cell(above_before(bon), "+.2f"), cell(highest), cell(ends),
            cell(falls), "–" if case == "one" else cell(differences, "+.2f"),
        ])  # fmt: skip
    return markdown(cells)


def ensembles_bodies(table: pd.DataFrame) -> str:
    """What bodies of their own add to one body, for each rule that has both; paired by seed."""
    cells = [["four members, own bodies less one body", "accuracy", "best of 128: gain", "PPO: highest gain",
              "gain at the end"]]  # fmt: skip
    for rule, label in COMBINED.items():
        one, own = (table[table.case == f"{body}-{rule}"] for body in BODIES)
        if not (len(one) and len(own)):
            continue
        cells.append([label])
        for family, values, form in (
            ("sft", partial(by_seed, value=lambda rows: rows.accuracy.iloc[0]), "+.3f"),
            ("best_of_n", partial(by_seed, value=last), "+.2f"), ("ppo", highest_before, "+.2f"),
            ("ppo", partial(by_seed, value=last), "+.2f"),
        ):  # fmt: skip
            mine, other = (values(rows[rows.family == family]) for rows in (own, one))
            cells[-1].append(cell([a - b for a, b in zip(mine, other, strict=True)], form))
    return markdown(cells) if len(cells) > 1 else ""


def ensembles_picture(table: pd.DataFrame) -> bytes:
    """Gain over √KL, means of the seeds: best of n and PPO. The optimum is that of one reward model."""
    with styled():
        figure, panels = canvas("Gold score less SFT's over √KL, five training seeds", columns=2, panels=(1,),
                                width=8.6, height=4.4)  # fmt: skip
        for axes, family, title in zip(panels, FAMILIES, ("Best of n", "PPO"), strict=True):
            for case, (label, colour, line) in ENSEMBLES.items():
                rows = table[(table.case == case) & (table.family == family)]
                if len(rows):
                    axes.plot(*mean_path(rows), line, color=colour, label=label)
            draw_optimum(axes, table[table.case == "one"], "gain")
            axes.axhline(0, color=MUTED, linewidth=0.8)
            axes.set_title(title, fontsize=10, loc="left")
            label_axes(axes, "gold less SFT's" if axes is panels[0] else "", "√KL")
        figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower left", ncols=3)
        return png(figure)


# Xu et al. 2024


CHANGES = {"large": "512 answers a step", "normalised": "normalised advantages", "moving": "moving reference"}
"""Parts of a case's name, which change PPO."""


def xu_table(table: pd.DataFrame) -> str:
    """A row for each setting, and DPO."""
    cells = [["answers a step", "advantages normalised", "moving reference", "gold", "KL, nats", "less DPO"]]
    of_dpo = table[table.family == "dpo"].groupby("seed").first()
    for case, rows in table.groupby("case", sort=False):
        found, parts = method_rows(rows, "ppo").set_index("seed"), str(case).split("-")
        settings = [
            "512" if "large" in parts else "64",
            *("yes" if name in parts else "no" for name in ("normalised", "moving")),
        ]
        cells.append([*settings, cell(found.gold), cell(found.kl),
                      cell((found.gold - of_dpo.gold).dropna(), "+.2f")])  # fmt: skip
    return markdown([*cells, ["DPO", "", "", cell(of_dpo.gold), cell(of_dpo.kl), ""]])


def xu_effects(table: pd.DataFrame) -> str:
    """What each change adds: the mean over the pairs of cases that differ in it alone, paired by seed."""
    cells = [["change", "gold", "reward", "KL, nats"]]
    found = {
        frozenset(str(case).split("-")) - {"small"}: method_rows(rows, "ppo").set_index("seed")
        for case, rows in table.groupby("case")
    }
    for name, label in CHANGES.items():
        pairs = [(rows, found[parts - {name}]) for parts, rows in found.items()
                 if name in parts and parts - {name} in found]  # fmt: skip
        cells.append([label])
        for score in ("gold", "reward", "kl"):
            added = pd.DataFrame([mine[score] - other[score] for mine, other in pairs])
            cells[-1].append(cell(added.dropna(axis=1).mean(), "+.2f"))
    return markdown(cells)


def xu_picture(table: pd.DataFrame) -> bytes:
    """Gold over √KL for each setting and DPO; open marks have no normalised advantages."""
    with styled():
        figure, (axes,) = canvas("Gold score over √KL, three training seeds", width=8.6, height=5.0)
        draw_optimum(axes, table[table.case == table.case.iloc[0]], "gold")
        for case, rows in method_rows(table, "ppo").groupby("case", sort=False):
            parts = str(case).split("-")
            draw_points(axes, rows, "o" if "large" in parts else "s", "PPO, " + ", ".join(parts),
                        color=colour_of("rloo" if "moving" in parts else "ppo"),
                        fillstyle="full" if "normalised" in parts else "none")  # fmt: skip
        draw_points(axes, method_rows(table, "dpo"), "D", "DPO", color=colour_of("dpo"))
        label_axes(axes, "gold score", "√KL from SFT, KL in nats per answer")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3)
        return png(figure)


# Ahmadian et al. 2024

METHODS = {"ppo": "PPO", "rloo": "RLOO", "grpo": "GRPO", "reinforce": "REINFORCE", "rejection_sft": "rejection SFT",
           "hybrid": "PPO after rejection SFT", "dpo": "DPO", "best_of_n": "best of {n}"}  # fmt: skip
UPDATES = {"published": "one update of a rollout", "ppo-style": "PPO's settings"}
"""What the cases of the studies change for the methods of `CHANGED`."""
OF_REINFORCE = ("rloo", "grpo", "reinforce")
CHANGED = {"published": tuple(METHODS), "ppo-style": ("rloo",)}


def ahmadian_table(table: pd.DataFrame, score: str = "gold") -> str:
    """A row for each method and case that differs from the others. Differences are paired by seed; a share needs the
    optimum at the KL of every seed."""
    cells = [["method", score, "KL, nats", "share of the optimum", "PPO less it", "RLOO less it"]]
    published = table[table.case == "published"]
    bases = [method_rows(published, name).set_index("seed")[score] for name in ("ppo", "rloo")]
    for family, label in METHODS.items():
        for case, meaning in UPDATES.items():
            rows = method_rows(table[table.case == case], family)
            if not len(rows) or family not in CHANGED[case]:
                continue
            found, known = rows.set_index("seed")[score], shares(rows, table)
            name = label.format(n=round(float(rows.point.iloc[0] or 0)))
            name += f", {meaning}" if family in OF_REINFORCE else ""
            less = ["–" if base.equals(found) else cell((base - found).dropna(), "+.2f") for base in bases]
            cells.append([name, cell(found), cell(rows.kl), "–" if any(map(math.isnan, known)) else cell(known), *less])
    return markdown(cells)


def ahmadian_picture(table: pd.DataFrame) -> bytes:
    """Gold over √KL: a small point for each training seed and a large one for their mean; the line is best of n."""
    with styled():
        figure, (axes,) = canvas("Gold score over √KL, five training seeds", width=8.6, height=5.0)
        published = table[table.case == "published"]
        draw_optimum(axes, published, "gold")
        for case, families in CHANGED.items():
            for family in families:
                rows, colour = method_rows(table[table.case == case], family), colour_of(family)
                if len(rows):
                    name = METHODS[family].format(n="n") + (f", {UPDATES[case]}" if family in OF_REINFORCE else "")
                    mark = {"published": "o", "ppo-style": "s"}[case]
                    draw_points(axes, rows, mark, name, color=colour)
        means = published[published.family == "best_of_n"].groupby("point")[["d", "gold"]].mean().sort_values("d")
        axes.plot(means.d, means.gold, color=colour_of("best_of_n"), linewidth=1)
        label_axes(axes, "gold score", "√KL from SFT, KL in nats per answer")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3)
        return png(figure)


def tuning_table(table: pd.DataFrame, score: str = "gold") -> str:
    """The score of each method at three learning rates, one seed."""
    cases = list(table.case.unique())
    cells = [[score, *cases]]
    for family, label in METHODS.items():
        rows = method_rows(table, family)
        if family != "best_of_n" and len(rows):
            found = [float(rows[rows.case == case][score].iloc[0]) for case in cases]
            cells.append([label, *(f"**{one:.2f}**" if one == max(found) else f"{one:.2f}" for one in found)])
    return markdown(cells)


def ladder_table(table: pd.DataFrame) -> str:
    """A row for each case, in the order of the study, and what it adds to the one above; paired by seed."""
    cells = [["PPO", "gold", "KL, nats", "gold: more than above", "KL: more than above"]]
    above: pd.DataFrame | None = None
    for case, rows in table.groupby("case", sort=False):
        found = method_rows(rows, "ppo").set_index("seed")[["gold", "kl"]]
        added = ["–", "–"] if above is None else [cell((found - above)[name], "+.2f") for name in found]
        cells.append([RUNGS[str(case)], cell(found.gold), cell(found.kl), *added])
        above = found
    return markdown(cells)


RUNGS = {"raw": "64 answers a step, a new critic, scores as they are", "unit": "standardised scores",
         "whitened": "normalised advantages", "warm-up": "the critic alone first", "batch": "512 answers a step",
         "from-reward-model": "the critic starts from the reward model",
         "demo": "no steps for the critic alone"}  # fmt: skip

TABLES: dict[str, tuple[str, Callable[[pd.DataFrame], str]]] = {
    "gao": ("gao", gao_table),
    "gao-slopes": ("gao", gao_slopes),
    "gao-peaks": ("gao", gao_peaks),
    "gao-leash": ("gao-leash", leash_table),
    "ensembles": ("ensembles", ensembles_table),
    "ensembles-bodies": ("ensembles", ensembles_bodies),
    "xu-tuning": ("xu-tuning", tuning_table),
    "xu": ("xu", xu_table),
    "xu-effects": ("xu", xu_effects),
    "ahmadian": ("ahmadian", ahmadian_table),
    "ahmadian-tuning": ("ahmadian-tuning", tuning_table),
    "ahmadian-arithmetic-tuning": ("ahmadian-arithmetic-tuning", partial(tuning_table, score="reward")),
    "ahmadian-arithmetic": ("ahmadian-arithmetic", partial(ahmadian_table, score="reward")),
    "ahmadian-ppo": ("ahmadian-ppo", ladder_table),
}
"""Name of a pair of marks on the page: the study and what makes the table."""
PICTURES: dict[str, Callable[[pd.DataFrame], bytes]] = {
    "gao": gao_picture,
    "ensembles": ensembles_picture,
    "xu": xu_picture,
    "ahmadian": ahmadian_picture,
}


def page(written: str) -> str:
    """The page with the tables of the studies that have a CSV file."""
    for mark, (study, make) in TABLES.items():
        if (FOLDER / f"{study}.csv").is_file():
            begin, end = f"<!-- table {mark} -->", f"<!-- end {mark} -->"
            found = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
            table = f"{begin}\n{make(read(study))}\n{end}".replace("\\", "\\\\")
            written = found.sub(table, written)
    return written


if __name__ == "__main__":
    names = set(sys.argv[1:])
    for name in sorted(names):
        export(name)
    for study, draw in PICTURES.items():
        if (FOLDER / f"{study}.csv").is_file() and (not names or names & {study, *MORE.get(study, ())}):
            (FOLDER / f"{study}.png").write_bytes(draw(read(study)))
    if PAGE.is_file():
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
