"""`leash read` on files that TRL wrote (trainer_state.json, here with a record a line): GRPO and RLOO of 1.16.0, PPO of
1.12.0, with the demo's model and 128 answers a step. The mild runs have 40 steps, a learning rate of 2e-4 and β 0.1,
the ill ones 25 steps, 1e-2 and β 0.001."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from flows.commands.read.libraries import TRL_GROUPS, TRL_PPO
from flows.commands.read.read import read

LOGS = Path(__file__).parent / "logs"


def findings(name: str, library: str, rows: int) -> list[dict[str, Any]]:
    found, _ = read([str(LOGS / f"{name}.json")])
    assert (found["library"], found["rows"]) == (library, rows)
    return found["findings"]


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_mild_runs_with_groups(method: str) -> None:
    assert findings(f"{method}-mild", TRL_GROUPS.name, 40) == []


def test_a_mild_run_of_ppo() -> None:
    """Its KL rises slowly to five nats, and no judge is there: answers are to be read."""
    (found,) = findings("ppo-mild", TRL_PPO.name, 40)
    assert (found["name"], found["step"]) == ("reward_hacking", 34)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_ill_runs_with_groups(method: str) -> None:
    """Answers without an end as soon as five rows are there, then a jump of the KL."""
    found = findings(f"{method}-ill", TRL_GROUPS.name, 25)
    assert [(one["name"], one["step"]) for one in found[:2]] == [("missing_ends", 5), ("length_drift", 6)]
    assert {"kl_spike", "reward_hacking"} <= {one["name"] for one in found[2:]}
    assert all(one["remedy"] == TRL_GROUPS.remedies[one["name"]] for one in found)


def test_an_ill_run_of_ppo() -> None:
    """The KL is 157 nats after one step. `kl_spike` compares windows: without the number of prompts it is found at step
    10, with it at step 2. It ends where the KL stays; the last figure shows it."""
    found, text = read([str(LOGS / "ppo-ill.json")])
    assert [(one["name"], one["step"], one["at_end"]) for one in found["findings"]] == [("kl_spike", 10, False)]
    kl = found["figures"]["kl"]
    assert (kl["first"], kl["last"]) == (pytest.approx(0, abs=1e-6), pytest.approx(271, abs=1))
    assert "kl             0      271    objective/kl" in text
    found, _ = read([str(LOGS / "ppo-ill.json")], prompts=128)
    assert (found["findings"][0]["name"], found["findings"][0]["step"]) == ("kl_spike", 2)


def test_first_and_last_figure_are_those_that_are_recorded(tmp_path: Path) -> None:
    """A figure that comes later than the others, and one that is NaN in the last step."""
    content = json.loads((LOGS / "grpo-mild.json").read_text())
    rows = [row for row in content["log_history"] if "kl" in row]
    del rows[0]["clip_ratio/region_mean"]
    rows[1]["clip_ratio/region_mean"], rows[-1]["entropy"] = 0.25, math.nan
    (tmp_path / "trainer_state.json").write_text(json.dumps(content))
    found, _ = read([str(tmp_path / "trainer_state.json")])
    assert found["figures"]["clip_fraction"]["first"] == 0.25
    assert found["figures"]["entropy"]["last"] == rows[-2]["entropy"]
