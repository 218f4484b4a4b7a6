"""`leash annotate --model`: a model's answers to prompts of the data become tasks, and their labels pairs."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flows.commands.annotate.annotate import Call, annotate, database, export_labels
from flows.commands.annotate.sampling import FILES, sample_answers
from flows.commands.annotate.store import Store
from rlhf_core.config.base import ScratchConfig
from rlhf_core.data.tokenizer import train_bpe
from rlhf_core.errors import UserError
from rlhf_core.models.hf import build_llama, save_checkpoint
from rlhf_core.models.sampling import Sampled, sample
from tests.flows.commands.annotate.conftest import write_rows

if TYPE_CHECKING:
    from tests.conftest import Ended, Project

CALL = Call(
    source=None, model=None, answers=2, pairs=4, ask="random", rewards=(), overlap=1, gold=None, gold_every=10,
    guidelines=None, share=False, annotators=("anna",), port=0, name="labels", seed=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _served_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of a call in this process ends at once, as after Ctrl-C."""
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)


def prompt_rows(first: int, count: int, split: str = "train") -> list[dict[str, Any]]:
    return [
        {"prompt_id": f"{i:016x}", "prompt": [{"role": "user", "content": f"egg {i}?"}], "split": split}
        for i in range(first, first + count)
    ]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with a random model of 64 tokens; eight prompts to train on (two of them too long for it), one for
    validation, and a held-out one."""
    tokenizer = train_bpe(["egg 1? egg 2? bread"], 300, "<|pad|>", "<|end|>", 64)
    config = ScratchConfig(vocabulary=300, context=64, layers=1, hidden=16, intermediate=16, heads=2)
    save_checkpoint(tmp_path / "models/policy", build_llama(config, tokenizer, 1), tokenizer)
    (tmp_path / "params.yaml").write_text("ppo: {temperature: 0.7, max_new_tokens: 6}\n")
    (tmp_path / "data/ingest").mkdir(parents=True)
    preference, ppo = (tmp_path / f"data/ingest/{name}.jsonl" for name in FILES)
    long = [row | {"prompt": [{"role": "user", "content": "bread " * 80}]} for row in prompt_rows(20, 2)]
    write_rows(preference, [*prompt_rows(0, 3), *prompt_rows(6, 1, "validation"), *long])
    ppo_rows = [{name: row[name] for name in ("prompt_id", "prompt")} for row in prompt_rows(2, 4)]
    write_rows(ppo, ppo_rows)  # prompt 2 is in both; without splits
    write_rows(tmp_path / "data/ingest/heldout.jsonl", prompt_rows(30, 5))
    return tmp_path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_two_answers_to_each_prompt_that_fits(root: Path) -> None:
    """Each prompt once, whichever file has it, and no held-out one; the seed decides."""
    path = root / "work/answers.jsonl"
    sample_answers(root, root / "models/policy", 50, 2, 1, path)
    found = rows_of(path)
    asked = [row["prompt"][0]["content"] for row in found]
    assert sorted(set(asked)) == [f"egg {i}?" for i in range(7)]
    assert all(asked.count(text) <= 2 for text in asked)
    assert len({row["response"] for row in found}) > 6
    assert not any(row["ended"] for row in found), "six tokens of a random model"
    before = path.read_bytes()
    sample_answers(root, root / "models/policy", 50, 2, 1, path)
    assert path.read_bytes() == before
    sample_answers(root, root / "models/policy", 50, 2, 2, path)
    assert path.read_bytes() != before


def test_a_session_takes_so_many_prompts_as_its_pairs_need(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = replace(CALL, model=root / "models/policy")
    annotate(root, call)
    assert "new session" in capsys.readouterr().out
    store = Store(database(root, "labels"))
    assert len(store.tasks) == 4
    assert store.settings["model"] == "models/policy"
    store.close()
    answers = root / "work/annotate/labels.answers.jsonl"
    before = answers.stat().st_mtime_ns
    annotate(root, call)  # continues, and samples nothing
    assert "continues" in capsys.readouterr().out
    assert answers.stat().st_mtime_ns == before
    for other in (CALL, replace(CALL, source=answers)):
        with pytest.raises(UserError, match="started with --model models/policy, not none"):
            annotate(root, other)
    weights = root / "models/policy/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\2\3\4")  # as after another run
    annotate(root, call)
    assert "note: models/policy has changed since; the answers are still the old ones" in capsys.readouterr().out


def test_ppos_settings_of_sampling(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "ppo: {temperature: 0.7, max_new_tokens: 6, sampler_rows: 3, stop_tokens: [egg], max_prompt_tokens: 40}\n"
    (root / "params.yaml").write_text(text)
    seen: list[dict[str, Any]] = []

    def spy(model: Any, prompts: Any, keys: Any, **settings: Any) -> Sampled:
        seen.append(settings | {"keys": keys})
        return sample(model, prompts, keys, **settings)

    monkeypatch.setattr("flows.commands.annotate.sampling.sample", spy)
    sample_answers(root, root / "models/policy", 2, 4, 1, root / "work/answers.jsonl")
    (found,) = seen
    assert (found["temperature"], found["max_new_tokens"], found["batch_size"]) == (0.7, 6, 3)
    assert len(found["stop_ids"]) == 2
    assert len(set(found["keys"])) == 8


def test_reward_models_choose_among_more_answers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And are missed before a model answers, as is a file of gold questions."""
    call = replace(CALL, model=root / "models/policy", pairs=1, ask="margin", rewards=(root / "models/reward",))
    with pytest.raises(UserError, match="no reward model here"):
        annotate(root, call)
    shutil.copytree(root / "models/policy", root / "models/reward")
    with pytest.raises(UserError, match="at least twice"):
        annotate(root, replace(call, ask="disagreement"))
    with pytest.raises(UserError, match=r"gold\.jsonl"):
        annotate(root, replace(call, ask="random", gold=root / "gold.jsonl"))
    assert not (root / "work").exists() or not list((root / "work/annotate").glob("*.jsonl"))
    monkeypatch.setattr("flows.commands.annotate.annotate.reward_models", lambda *_: [])
    monkeypatch.setattr("flows.commands.annotate.annotate.most_uncertain", lambda tasks, *_: tasks)
    annotate(root, call)
    assert len(rows_of(root / "work/annotate/labels.answers.jsonl")) == 8


def test_fewer_pairs_than_asked_for_are_said(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    annotate(root, replace(CALL, model=root / "models/policy", pairs=50))
    assert "pairs in place of 50" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda root: (root / "params.yaml").write_text("ppo: {max_new_tokens: 62}\n"),
            "which leave room for ppo.max_new_tokens",
        ),
        (lambda root: [(root / f"data/ingest/{name}.jsonl").unlink() for name in FILES], "call `leash run ingest`"),
        (lambda root: (root / "models/policy/config.json").unlink(), "holds no model"),
    ],
    ids=["context", "prompts", "model"],
)
def test_what_cannot_be_sampled_is_one_line(root: Path, change: Callable[[Path], object], says: str) -> None:
    change(root)
    with pytest.raises(UserError, match=says) as caught:
        annotate(root, replace(CALL, model=root / "models/policy"))
    assert "\n" not in str(caught.value)
    assert not database(root, "labels").exists()


def test_a_file_or_a_model(root: Path) -> None:
    with pytest.raises(UserError, match="--from and --model"):
        annotate(root, replace(CALL, source=root / "x.jsonl", model=root / "models/policy"))


def test_labels_of_the_policys_answers_are_pairs_of_the_next_run(
    project: "Project", root: Path, stage_main: "Callable[[Project, str], Ended]"
) -> None:
    """From `--model` to data/ingest/pairs.jsonl; `preferences.source` stays `dataset`."""
    project.use_files()
    pairs = [{"prompt": f"egg {i}?", "chosen": "bread", "rejected": "no"} for i in range(40)]
    (project.root / "data/raw/set").mkdir(parents=True)
    write_rows(project.root / "data/raw/set/train.jsonl", pairs)
    assert stage_main(project, "ingest").code == 0
    assert not any(row.get("from_labels") for row in project.rows("data/ingest/pairs.jsonl"))
    annotate(project.root, replace(CALL, model=root / "models/policy"))
    store = Store(database(project.root, "labels"))
    while (one := store.view("anna", 1.0).task) is not None:
        store.judge("anna", one.id, "rank", [0, 1], 2.0)
    store.close()
    export_labels(project.root, "labels", project.root / "data/raw/labels.jsonl")
    project.set("ingest.labels", "labels.jsonl")
    ended = stage_main(project, "ingest")
    assert ended.code == 0, ended.stderr
    labelled = {row["chosen"] for row in project.rows("data/raw/labels.jsonl")}
    found = {row["chosen"] for row in project.rows("data/ingest/pairs.jsonl") if row.get("from_labels")}
    assert found
    assert found <= labelled  # ingest drops texts that a random model may write
    splits = {row["split"] for row in project.rows("data/ingest/preference_prompts.jsonl")}
    assert splits == {"train", "validation"}
