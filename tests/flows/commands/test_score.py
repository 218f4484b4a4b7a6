"""`leash score`: the columns that it adds to a file, and what it refuses, with models that were made, not trained."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from flows.cli import app
from flows.commands import score as command
from rlhf_core.config.base import ScratchConfig
from rlhf_core.data.tokenizer import encode_prompt, encode_response, load_tokenizer, train_bpe
from rlhf_core.models.ensemble import JUDGE, Ensemble, member_folder
from rlhf_core.models.hf import build_llama, load_scalar_model, save_checkpoint, scalar_model_from
from tests.elsewhere import save_classifier

TINY = Path(__file__).resolve().parents[3] / "examples" / "tiny.yaml"
EXACT = Path(__file__).resolve().parents[3] / "rewards" / "exact.py"
ROWS = [
    {"prompt": "what shall i eat?", "response": "an egg", "answer": "an egg", "id": 7},
    {"prompt": "and then?", "response": "tea", "answer": "a fig", "id": 8},
    {"prompt": "and then? " * 3, "response": "tea and a fig", "answer": "rest", "id": 9},
]
ALONE = [{"term": "exact.py", "weight": 1.0}]
BOTH = [{"term": "reward_model", "weight": 2.0}, {"term": "exact.py", "weight": -1.0}]
Score = Callable[..., Result]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What scoring reads of a finished project."""
    root = tmp_path / "project"
    tokenizer = train_bpe([row["prompt"] for row in ROWS], 300, "<|pad|>", "<|end|>", 96)
    config = ScratchConfig(vocabulary=300, context=96, layers=1, hidden=16, intermediate=16, heads=2)
    save_checkpoint(root / "models/sft", build_llama(config, tokenizer, 0), tokenizer)
    add_reward_model(root, root / "models/reward", 1)
    (root / "rewards").mkdir()
    (root / "rewards/exact.py").write_text(EXACT.read_text())
    (root / "dvc.yaml").write_text("stages: {}\n")
    (root / "params.yaml").write_text(TINY.read_text())
    return root


def add_reward_model(root: Path, folder: Path, seed: int) -> None:
    """A model with a head large enough that answers differ."""
    model = scalar_model_from(root / "models/sft", seed)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(seed))
    save_checkpoint(folder, model, load_tokenizer(root / "models/sft"))


def change(project: Path, **values: Any) -> None:
    """Set keys of params.yaml; `__` is a dot: ppo__critic__init="sft"."""
    yaml = YAML()
    content = yaml.load(project / "params.yaml")
    for name, value in values.items():
        *above, last = name.split("__")
        block = content
        for part in above:
            block = block[part]
        block[last] = value
    yaml.dump(content, project / "params.yaml")


@pytest.fixture
def score(project: Path, monkeypatch: pytest.MonkeyPatch) -> Score:
    """score("answers.jsonl", …): what `leash score` prints, at the root of the project."""
    monkeypatch.chdir(project)
    return lambda *arguments: CliRunner().invoke(app, ["score", *arguments])


def write(path: Path, rows: list[Any]) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def expected(folder: Path, prompt: Any, response: str) -> float:
    """The logit of prompt and response, alone and unpadded."""
    model, tokenizer = load_scalar_model(folder), load_tokenizer(folder)
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    ids = encode_prompt(tokenizer, turns) + encode_response(tokenizer, response)
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits)


def refused(result: Result, *words: str) -> None:
    """Exit code 2, and one line with all the words."""
    assert result.exit_code == 2, result.output
    line = result.stderr.strip()
    assert line.startswith("error: ")
    assert "\n" not in line
    for word in words:
        assert word in line


def test_every_row_gets_the_reward_models_score_and_keeps_its_columns(project: Path, score: Score) -> None:
    write(project / "answers.jsonl", ROWS)
    result = score("answers.jsonl")
    assert result.exit_code == 0, result.output
    out = project / "answers.scored.jsonl"
    assert f"{out}: 3 rows; new columns: score" in result.stdout
    assert "row 3/3" in result.stdout
    found = read(out)
    assert [{name: row[name] for name in row if name != "score"} for row in found] == ROWS
    for row in found:
        assert row["score"] == pytest.approx(expected(project / "models/reward", row["prompt"], row["response"]))
    assert len({row["score"] for row in found}) == 3
    assert read(project / "answers.jsonl") == ROWS


def test_a_model_from_elsewhere_scores_a_file_without_a_model_of_the_run(project: Path, score: Score) -> None:
    shutil.rmtree(project / "models")
    save_classifier(project / "models/judges/mood")
    term = {"model": "mood", "label": "POSITIVE", "weight": 1.0}
    change(project, scorer=[term | {"reads": "answer"}], ppo__critic__init="sft", dpo__enabled=False)
    write(project / "answers.jsonl", ROWS)
    result = score("answers.jsonl")
    assert result.exit_code == 0, result.output
    found = read(project / "answers.scored.jsonl")
    assert len({round(row["score"], 4) for row in found}) == 3
    write(project / "long.jsonl", [ROWS[0], ROWS[0] | {"response": "tea " * 600}])
    refused(score("long.jsonl"), "long.jsonl, row 2: mood: a prompt with its answer has", "its context holds 512")


def test_conversations_completions_and_cut_answers_are_read_with_their_end(project: Path, score: Score) -> None:
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    asked = [*turns, {"role": "user", "content": "what shall i eat?"}]
    same = [
        {"messages": [*asked, {"role": "assistant", "content": "an egg"}]},
        {"prompt": asked, "response": "an egg"},
        {"prompt": asked, "completion": "an egg"},
        {"prompt": asked, "response": "an egg", "ended": False},
    ]
    found = []
    for number, row in enumerate(same):
        write(project / f"{number}.jsonl", [row])
        assert score(f"{number}.jsonl").exit_code == 0
        found.append(read(project / f"{number}.scored.jsonl")[0]["score"])
    assert found == pytest.approx([expected(project / "models/reward", asked, "an egg")] * 4)


def test_white_space_around_an_answer_changes_no_score(project: Path, score: Score) -> None:
    """`evaluate` reads the answers that a model has sampled without it."""
    write(project / "spaced.jsonl", [{"prompt": "hello", "response": text} for text in ("an egg", " an egg\n")])
    assert score("spaced.jsonl").exit_code == 0
    first, second = (row["score"] for row in read(project / "spaced.scored.jsonl"))
    assert first == second


def test_a_parquet_file_keeps_its_types(project: Path, score: Score) -> None:
    texts = {name: [row[name] for row in ROWS] for name in ("prompt", "response", "answer")}
    table = pyarrow.table(
        {**texts, "id": pyarrow.array([7, 8, 9], pyarrow.uint8()), "vector": pyarrow.array([b"\x00", None, b"\x01"])}
    ).replace_schema_metadata({"source": "somewhere"})
    pyarrow.parquet.write_table(table, project / "answers.parquet", row_group_size=2)
    write(project / "answers.jsonl", ROWS)
    assert score("answers.parquet", "--out", "below/out.parquet").exit_code == 0
    assert score("answers.jsonl").exit_code == 0
    found = pyarrow.parquet.read_table(project / "below/out.parquet")
    assert found.select(table.column_names).equals(table, check_metadata=True)
    assert found.schema.field("score").type == pyarrow.float64()
    assert found["score"].to_pylist() == [row["score"] for row in read(project / "answers.scored.jsonl")]


def test_functions_alone_need_no_model(project: Path, score: Score) -> None:
    (project / "models").rename(project / "elsewhere")
    change(project, scorer=ALONE, ppo__critic__init="sft", dpo__enabled=False)
    write(project / "answers.jsonl", ROWS)
    result = score("answers.jsonl")
    assert result.exit_code == 0, result.output
    assert read(project / "answers.scored.jsonl") == [row | {"score": float(i == 0)} for i, row in enumerate(ROWS)]


def test_several_terms_have_a_column_each_before_their_weights(project: Path, score: Score) -> None:
    change(project, scorer=BOTH, ppo__critic__init="sft")
    write(project / "answers.jsonl", ROWS)
    assert score("answers.jsonl").exit_code == 0
    for place, row in enumerate(read(project / "answers.scored.jsonl")):
        model = expected(project / "models/reward", row["prompt"], row["response"])
        assert row["score/reward_model"] == pytest.approx(model)
        assert row["score/exact.py"] == float(place == 0)
        assert row["score"] == pytest.approx(2 * model - float(place == 0))


def test_members_and_the_judging_reward_model(project: Path, score: Score) -> None:
    folder = project / "models/reward"
    for seed, path in enumerate((member_folder(folder, 2), folder / JUDGE), start=2):
        add_reward_model(project, path, seed)
    Ensemble("mean", 1.0, [0.5, 0.25]).write(folder)
    write(project / "answers.jsonl", ROWS)
    assert score("answers.jsonl").exit_code == 0
    for row in read(project / "answers.scored.jsonl"):
        paths = (folder, member_folder(folder, 2), folder / JUDGE)
        first, second, judge = (expected(path, row["prompt"], row["response"]) for path in paths)
        assert row["score"] == pytest.approx((first - 0.5 + second - 0.25) / 2)
        assert row["score/std"] == pytest.approx(abs(first - 0.5 - second + 0.25) / 2)
        assert row["score/judge"] == pytest.approx(judge)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_large_file_is_read_in_parts(
    project: Path, score: Score, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Each row gets its own score."""
    monkeypatch.setattr(command, "CHUNK", 2)
    change(project, scorer=ALONE, ppo__critic__init="sft", dpo__enabled=False)
    rows = [{"prompt": f"{i}?", "response": str(i), "answer": str(i if i % 3 else "")} for i in range(1, 8)]
    if ending == "jsonl":
        write(project / "answers.jsonl", rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), project / "answers.parquet", row_group_size=3)
    result = score(f"answers.{ending}")
    assert result.exit_code == 0, result.output
    assert "row 7/7  mean 0.7143  done" in result.stdout
    out = project / f"answers.scored.{ending}"
    found = read(out) if ending == "jsonl" else pyarrow.parquet.read_table(out).to_pylist()
    assert found == [row | {"score": float(bool(row["answer"]))} for row in rows]


BAD = {
    "broken JSON": ("{", "row 2: broken JSON"),
    "pair": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "row 2: missing column response"),
    "empty": ({"prompt": "a", "response": "  "}, "row 2: empty (`ingest` leaves such rows out)"),
    "null": ({"prompt": "a", "response": None}, "row 2: empty"),
    "type": ({"prompt": 3, "response": "b"}, "row 2: prompt: expected text or a list of messages, got int"),
    "conversation": ({"prompt": [{"role": "assistant", "content": "a"}], "response": "b"}, "row 2: bad_conversation"),
    "half a pair": ({"prompt": "a", "response": "\ud800"}, "row 2: bad_text"),
    "scored": ({"prompt": "a", "response": "b", "score": 1}, "row 2: has the column score already"),
    "too long": (
        {"prompt": "a", "response": "long " * 90},
        "row 2: prompt and response have",
        "the reward model's context holds 96; shorten the row",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_and_nothing_is_written(project: Path, score: Score, name: str) -> None:
    bad, *words = BAD[name]
    write(project / "answers.jsonl", [ROWS[0], bad])
    before = set(project.iterdir())
    refused(score("answers.jsonl"), str(project / "answers.jsonl"), *words)
    assert set(project.iterdir()) == before


def test_rows_of_pairs_and_of_prompts_are_refused(project: Path, score: Score) -> None:
    for row in ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a"}):
        write(project / "answers.jsonl", [row])
        refused(score("answers.jsonl"), "row 1: expected a prompt with one answer")


def test_a_failing_function_names_the_rows(project: Path, score: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was written before is removed."""
    monkeypatch.setattr(command, "CHUNK", 2)
    change(project, scorer=ALONE, ppo__critic__init="sft", dpo__enabled=False)
    write(project / "answers.jsonl", [*ROWS[:2], {"prompt": "a", "response": "b"}])
    before = set(project.iterdir())
    refused(score("answers.jsonl"), "answers.jsonl, rows 3 to 3: scorer: exact.py: answer 1 of 1", "KeyError: 'answer'")
    assert set(project.iterdir()) == before


def test_what_cannot_be_read_or_written_is_refused(project: Path, score: Score) -> None:
    write(project / "answers.jsonl", ROWS)
    write(project / "there.jsonl", [])
    write(project / "table.csv", ["prompt,response", "a,b"])
    raw = project / "data/raw/set"
    raw.mkdir(parents=True)
    write(raw / "train.jsonl", ROWS)
    for arguments, words in {
        ("nowhere.jsonl",): "nowhere.jsonl: file not found",
        ("models",): "is a folder; name a file in it",
        ("table.csv",): "scores are added to *.jsonl and *.parquet files",
        ("there.jsonl",): "there.jsonl: no rows, so there is nothing to score",
        ("answers.jsonl", "--out", "there.jsonl"): "there.jsonl: is there already; remove it",
        ("answers.jsonl", "--out", "answers.jsonl"): "answers.jsonl: is there already",
        ("answers.jsonl", "--out", "out.parquet"): "the name must end in .jsonl",
        ("answers.jsonl", "--out", "there.jsonl/out.jsonl"): "cannot be written",
        ("data/raw/set/train.jsonl",): "stages depend on all of data/raw",
    }.items():
        refused(score(*arguments), words)
    assert read(project / "there.jsonl") == []


def test_a_missing_reward_model_is_refused(project: Path, score: Score) -> None:
    """Also where the stage `reward` was switched off."""
    write(project / "answers.jsonl", ROWS)
    (project / "models/reward").rename(project / "elsewhere")
    refused(score("answers.jsonl"), "models/reward: no reward model here; `leash run reward` makes it")
    (project / "models/reward").mkdir()
    (project / "models/reward/README.md").write_text("There is no model here.\n")
    refused(score("answers.jsonl"), "models/reward: no reward model here")


def test_a_reward_model_of_other_parameters_is_refused(project: Path, score: Score) -> None:
    write(project / "answers.jsonl", ROWS)
    block = YAML(typ="safe").load(project / "params.yaml")["reward"]
    record = dict.fromkeys(("stage", "command", "inputs", "code", "versions", "exemptions"), "") | {
        "params": {"reward": block}
    }
    (project / "models/reward.provenance.json").write_text(json.dumps(record))
    change(project, reward__members=1)
    assert score("answers.jsonl").exit_code == 0, "one member is the default"
    change(project, reward__members=3)
    refused(
        score("answers.jsonl", "--out", "other.jsonl"),
        "models/reward: was made with other parameters than those of params.yaml (reward.members: 1, now 3)",
        "`leash run reward` makes it again",
    )
