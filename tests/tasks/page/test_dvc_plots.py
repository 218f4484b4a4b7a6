"""`dvc plots`: the frontier's template, rendered as by DVC."""

import json
from pathlib import Path
from typing import Any

import pytest
from dvc_render.vega import VegaRenderer
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[3]
PLOTS: dict[str, Any] = {
    name: plot for entry in YAML(typ="safe", pure=True).load(ROOT / "dvc.yaml")["plots"] for name, plot in entry.items()
}


@pytest.mark.parametrize("name", [name for name in PLOTS if name.startswith("Frontier")])
def test_the_frontier_tells_families_apart(name: str) -> None:
    plot = PLOTS[name]
    column = plot["y"]["plots/frontier.csv"]
    rows = [{"family": family, plot["x"]: 1.0, column: 2.0, "rev": "workspace"} for family in ("sft", "ppo", "dpo")]
    renderer = VegaRenderer(
        rows, name, template=plot["template"], template_dir=str(ROOT / ".dvc/plots"), x=plot["x"], y=column,
        x_label=plot["x_label"], y_label=plot["y_label"], title=name,
    )  # fmt: skip
    filled = json.loads(renderer.partial_html())
    assert filled["encoding"]["color"]["field"] == "family"
    assert filled["encoding"]["shape"]["field"] == "rev"
    assert (filled["encoding"]["x"]["field"], filled["encoding"]["y"]["field"]) == ("sqrt_kl", column)
    assert [row["family"] for row in filled["data"]["values"]] == ["sft", "ppo", "dpo"]
    assert "<DVC" not in json.dumps(filled)


def test_every_score_of_the_frontier_has_a_plot() -> None:
    columns = {plot["y"]["plots/frontier.csv"] for plot in PLOTS.values() if "plots/frontier.csv" in plot["y"]}
    assert columns == {"gold", "reward", "win_rate"}


@pytest.mark.parametrize("name", ["SFT loss", "Rejection SFT loss"])
def test_a_loss_that_is_measured_at_few_steps_has_no_zeros_between_them(name: str) -> None:
    """Vega reads an empty cell as 0."""
    plot = PLOTS[name]
    rows = [
        {"step": "1", "validation_loss": "", "rev": "workspace"},
        {"step": "2", "validation_loss": "0.7", "rev": "a"},
    ]
    renderer = VegaRenderer(rows, name, template=plot["template"], template_dir=str(ROOT / ".dvc/plots"), x="step",
                            y="validation_loss")  # fmt: skip
    filled = json.loads(renderer.partial_html())
    assert filled["transform"] == [{"filter": "datum['validation_loss'] !== ''"}]
    assert filled["encoding"]["y"]["field"] == "validation_loss"
    assert "<DVC" not in json.dumps(filled)
