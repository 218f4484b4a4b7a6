"""A stage as its module sees it, without DVC around it, on tiny models in a folder of the test's own."""

import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.models.hf import save_checkpoint
from tasks.params.runtime import RuntimeParams
from tasks.stage.interrupts import Interrupts
from tasks.stage.outputs import Outputs
from tasks.stage.stage import Common, Stage

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
            blocks=more.get("blocks", {}),
            state_dir=state,
            outputs=Outputs(tmp_path, outs),
            tracker=None,
            label=f"[{name}]",
            rows=rows or {},
            hashes={},
            conclude=lambda: None,
            interrupts=Interrupts(),
        )

    return make


@pytest.fixture
def asked() -> list[dict[str, Any]]:
    """Ten prompts of different lengths, as rows of a dataset of prompts."""
    from rlhf_core.data.chat import prompt_id

    return [{"prompt_id": prompt_id(prompt), "prompt": prompt} for prompt in TINY.tiny_prompts()]
