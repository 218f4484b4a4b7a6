"""A stage as its module sees it, without DVC around it, on tiny models in a folder of the test's own."""

import json
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlhf_core.models.hf import save_checkpoint
from tasks.params.runtime import RuntimeParams
from tasks.params.scorer import DEFAULT
from tasks.stage import rounds
from tasks.stage.interrupts import Interrupts
from tasks.stage.outputs import Outputs
from tasks.stage.stage import Common, Stage
from tasks.training.pairs import PREFERENCES
from tasks.training.ratings import RATINGS

TINY: Any = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "rlhf_core" / "conftest.py")))


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny models/sft and models/reward; the current folder of the test."""
    save_checkpoint(tmp_path / "models/sft", TINY.tiny_lm(seed=1), TINY.tiny_tokenizer())
    save_checkpoint(tmp_path / "models/reward", TINY.tiny_scalar(seed=3), TINY.tiny_tokenizer())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def make_stage(tmp_path: Path) -> Callable[..., Stage[Any]]:
    """make_stage("dpo", params, outs, rows={path: rows}, state="name") -> a stage in the test's folder, seed 3."""

    def make(
        name: str, params: Any, outs: Sequence[str], rows: dict[str, list[dict[str, Any]]] | None = None, **more: Any
    ) -> Stage[Any]:
        state = tmp_path / "work" / more.get("state", name)
        state.mkdir(parents=True, exist_ok=True)
        return Stage(
            name=name,
            key="key",
            root=tmp_path,
            params=params,
            common=Common(threads=1, seed=3, long_rows="refuse", runtime=RuntimeParams(tracking=False)),
            blocks={"scorer": DEFAULT, "reward_model": True, "ingest": {"source": "files"}} | more.get("blocks", {}),
            state_dir=state,
            outputs=Outputs(tmp_path, outs),
            live=None,
            label=f"[{name}]",
            rows=rows or {},
            hashes={},
            interrupts=Interrupts(),
        )

    return make


@pytest.fixture
def asked() -> list[dict[str, Any]]:
    """Ten prompts of different lengths, as rows of a dataset of prompts."""
    from rlhf_core.data.chat import prompt_id

    return [{"prompt_id": prompt_id(prompt), "prompt": prompt} for prompt in TINY.tiny_prompts()]


@pytest.fixture
def pairs(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two pairs to each of ten prompts, the last three of them for validation: three sampled answers, of which the one
    with token 30 wins; the second prompt's were brought by the data."""
    rows = []
    for place, row in enumerate(asked):
        answers = [[30, 10 + place, 1], [11 + place, 12, 13, 1], [40 - place, 1]]
        for worse in (1, 2):
            sampled = place != 1
            rows.append(
                {
                    **row,
                    "chosen": "eat oats",
                    "rejected": f"rest {worse}",
                    "chosen_ids": answers[0] if sampled else None,
                    "rejected_ids": answers[worse] if sampled else None,
                    "chosen_ended": True,
                    "rejected_ended": True,
                    "source": "judge" if sampled else "dataset",
                    "split": "train" if place < 7 else "validation",
                }
            )
    return rows


@pytest.fixture
def run_pair_stage(
    workshop: Path, make_stage: Callable[..., Stage[Any]], pairs: list[dict[str, Any]]
) -> Callable[..., dict[str, Any]]:
    """run_pair_stage(tasks.dpo, config, rows=…, state=…) -> the metrics that the stage wrote."""

    def call(
        module: ModuleType, config: Any, rows: list[dict[str, Any]] | None = None, state: str = ""
    ) -> dict[str, Any]:
        name = module.__name__.rpartition(".")[2]
        outs = [f"models/{name}", f"metrics/{name}.json", f"plots/{name}.csv"]
        chosen = {PREFERENCES: pairs if rows is None else rows, RATINGS: []}
        stage = make_stage(name, config, outs, chosen, state=state or name)
        module.execute(stage)
        stage.outputs.commit()
        metrics: dict[str, Any] = json.loads((workshop / f"metrics/{name}.json").read_text())
        return metrics

    return call


@pytest.fixture
def close_round() -> Callable[[Path, int], None]:
    """close_round(root, 1): a closed round as `leash round` leaves it, without model and pairs."""

    def close(root: Path, number: int) -> None:
        folder = root / rounds.ROUNDS / str(number)
        (folder / rounds.POLICY).mkdir(parents=True)
        (folder / rounds.NOTE).write_text(json.dumps({"round": number, "commit": "c" * 40}))
        (root / rounds.ROUNDS / f"{number}.dvc").touch()

    return close
