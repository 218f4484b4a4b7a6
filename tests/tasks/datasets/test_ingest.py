"""The stage as a whole: raw data in, five datasets out that fit their schemas and share no prompt."""

import importlib
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest

from rlhf_core.errors import UserError
from tasks import ingest
from tasks.check_data import require_ratings
from tasks.datasets.jsonl import read_jsonl, write_jsonl
from tasks.datasets.prepare import prepare
from tasks.datasets.raw import PRETRAINED, REWARD_BASE
from tasks.datasets.raw import TEXTS as PTX
from tasks.params.ingest import IngestParams
from tasks.schemas.validation import load
from tasks.stage.outputs import Outputs
from tests.tasks.datasets.conftest import SPLIT

DATASETS = ("demonstrations", "pairs", "preference_prompts", "ppo_prompts", "heldout")
PAIRS = [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(100)]


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Run the stage's own work in an empty repository; returns the rows of each dataset and the metrics."""
    monkeypatch.chdir(tmp_path)

    def call(params: IngestParams, prompts=None, texts=(), pretrained=None, reward_base=None, sft=True, rewarded=True):
        metrics = {}
        named = {"prompts": prompts, "texts": texts, "pretrained": pretrained, "reward_base": reward_base}
        names = (*DATASETS, "ratings", "evaluation_prompts", "dropped")
        outputs = Outputs(tmp_path, [*(f"data/ingest/{name}.jsonl" for name in names), PTX, PRETRAINED, REWARD_BASE])
        stage = SimpleNamespace(
            params=params,
            blocks={"raw_files": named, "sft_enabled": sft, "reward_model": rewarded},
            out=outputs.path,
            state_dir=tmp_path / "work",
            outputs=outputs,
            write_metrics=metrics.update,
            log=print,
        )
        ingest.execute(stage)
        outputs.commit()
        rows = load(tmp_path, [f"data/ingest/{name}.jsonl" for name in (*DATASETS, "ratings", "evaluation_prompts")])
        return SimpleNamespace(
            **{Path(path).stem: found for path, found in rows.items()},
            dropped=read_jsonl(tmp_path / "data/ingest/dropped.jsonl"),
            metrics=metrics,
        )

    return call


def prompts_of(rows):
    return {row["prompt_id"] for row in rows}


def test_pairs_alone_fill_every_share(execute, params, raw):
    raw(train=PAIRS)
    made = execute(params())
    assert [len(getattr(made, name)) for name in DATASETS] == [45, 27, 27, 18, 10]
    assert made.ratings == []
    sides = [
        prompts_of(getattr(made, name)) for name in ("demonstrations", "preference_prompts", "ppo_prompts", "heldout")
    ]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 100
    assert prompts_of(made.pairs) == prompts_of(made.preference_prompts)
    assert all(row["response"].startswith("good") for row in made.demonstrations + made.heldout)
    parts = {row["prompt_id"]: row["split"] for row in made.preference_prompts}
    assert all(row["split"] == parts[row["prompt_id"]] for row in made.pairs)
    assert set(parts.values()) == {"train", "validation"}


def test_what_later_stages_name_is_copied_and_nothing_else(execute, params, raw, tmp_path):
    folder = tmp_path / "data/raw"
    raw(train=PAIRS)
    made = execute(params())
    assert made.evaluation_prompts == made.heldout
    assert [path.name for path in (tmp_path / PTX).iterdir()] == ["README.md"]
    assert json.loads((tmp_path / PRETRAINED).read_text()) == {}
    assert json.loads((tmp_path / REWARD_BASE).read_text()) == {}
    before = {path: path.read_bytes() for path in (tmp_path / "data/ingest").rglob("*") if path.is_file()}
    (folder / "README.md").write_text("a page")
    (folder / "unnamed.jsonl").write_text('{"prompt": "other?"}\n')
    execute(params())
    assert {path: path.read_bytes() for path in (tmp_path / "data/ingest").rglob("*") if path.is_file()} == before
    (folder / "deep").mkdir()
    (folder / "deep/text.txt").write_bytes(b"a text\r\n")
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    made = execute(params(), prompts="unnamed.jsonl", texts=["deep/text.txt"], pretrained="model")
    assert [row["prompt"][0]["content"] for row in made.evaluation_prompts] == ["other?"]
    assert (tmp_path / PTX / "deep/text.txt").read_bytes() == b"a text\r\n"
    assert list(json.loads((tmp_path / PRETRAINED).read_text())) == ["config.json"]


def test_metrics_and_dropped_rows(execute, params, raw, capsys):
    raw(train=[*PAIRS, PAIRS[0], {"prompt": "q", "chosen": "same", "rejected": "same"}], test=PAIRS[:2])
    made = execute(params(on_leak="drop"))
    assert made.metrics == {
        "source": "files",
        "rows_read": 104,
        "rows_used": 100,
        "dropped": {
            "duplicate": 1,
            "empty": 0,
            "same_chosen_rejected": 1,
            "too_long": 0,
            "bad_text": 0,
            "bad_conversation": 0,
            "leaked": 2,
        },
        **{name: len(getattr(made, name)) for name in DATASETS},
        "rows_by_use": {
            "pair": {
                "read": 104,
                "sft_train": 44,
                "sft_validation": 5,
                "reward_train": 26,
                "reward_validation": 3,
                "ppo": 20,
                "heldout": 2,
                "left_out": {"duplicate": 1, "leaked": 2, "same_chosen_rejected": 1},
            }
        },
    }
    file = "data/raw/set/train.jsonl"
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["rows", "pairs"]
    assert printed[-1] == (
        f"left out duplicate 1, leaked 2, same_chosen_rejected 1 (first: {file}, row 101); "
        "all rows: data/ingest/dropped.jsonl"
    )
    assert made.dropped == [
        {"file": file, "row": 101, "reason": "duplicate"},
        {"file": file, "row": 102, "reason": "same_chosen_rejected"},
        {"file": file, "row": 1, "reason": "leaked"},
        {"file": file, "row": 2, "reason": "leaked"},
    ]
    assert prompts_of(made.heldout) == {row["prompt_id"] for row in made.heldout}
    assert [row["response"] for row in sorted(made.heldout, key=lambda row: row["response"])] == ["good 0", "good 1"]


def test_refusals(execute, params, raw):
    raw(train=[*PAIRS, PAIRS[0]], test=PAIRS[:1])
    with pytest.raises(UserError, match=r"on_bad_row is refuse: duplicate 1 \(first: .*, row 101\)"):
        execute(params(on_bad_row="refuse"))
    with pytest.raises(UserError, match="leaked held-out prompts: 1 training rows"):
        execute(params())


def test_nothing_left(execute, params, raw):
    raw(train=[{"prompt": "", "response": "a"}], test=[{"prompt": "q"}])
    with pytest.raises(UserError, match=r"no training rows left of 2 read: empty 1 \(first: .*train\.jsonl, row 1\)"):
        execute(params())


def test_the_order_of_rows_changes_no_byte(execute, params, raw, tmp_path):
    def outputs():
        return {name: (tmp_path / f"data/ingest/{name}.jsonl").read_bytes() for name in DATASETS}

    raw(train=PAIRS)
    execute(params())
    first = outputs()
    raw(train=PAIRS[::-1])
    execute(params())
    assert outputs() == first
    execute(params(seed=2))
    assert outputs() != first


def test_three_files_of_three_shapes(execute, params, raw):
    raw(
        demos=[
            {"messages": [{"role": "user", "content": f"d{i}"}, {"role": "assistant", "content": "a"}]}
            for i in range(10)
        ],
        pairs=PAIRS[:20],
        prompts=[{"prompt": f"x{i}"} for i in range(30)],
        heldout=[{"prompt": "h"}, {"prompt": "h2"}],
    )
    made = execute(params())
    assert [len(getattr(made, name)) for name in DATASETS] == [10, 20, 20, 30, 2]
    assert {row["response"] for row in made.heldout} == {None}


def test_rows_by_use_add_up_and_are_those_of_the_datasets(execute, params, raw, capsys):
    """Prompts that have demonstrations and pairs, equal answers, bare prompts of the same question, bad rows."""
    raw(
        demos=[{"prompt": f"question {i}", "response": f"good {i}"} for i in range(50, 90)]
        + [{"prompt": f"d{i}", "response": f"a{k}"} for i in range(40) for k in range(2)]
        + [{"prompt": "", "response": "a"}],
        pairs=PAIRS,
        prompts=[{"prompt": f"question {i}"} for i in range(20)] + [{"prompt": f"d{i}"} for i in range(20)],
        talks=[{"messages": [{"role": "user", "content": "u"}]}],
    )
    made = execute(params())
    table = made.metrics["rows_by_use"]
    for column in table.values():
        uses = {name: count for name, count in column.items() if name not in {"read", "left_out"}}
        assert sum(uses.values()) + sum(column["left_out"].values()) == column["read"]
    assert {kind: column["read"] for kind, column in table.items()} == {
        "demonstration": 122,
        "pair": 100,
        "prompt": 40,
    }
    assert table["demonstration"]["left_out"]["bad_conversation"] == table["demonstration"]["left_out"]["empty"] == 1

    def total(*uses):
        return sum(column[use] for column in table.values() for use in uses)

    assert total("sft_train", "sft_validation") == len(made.demonstrations)
    assert total("reward_train", "reward_validation") == len(made.pairs)
    assert total("ppo") == len(made.ppo_prompts)
    assert total("heldout") == len(made.heldout)
    assert all(column["left_out"]["used_elsewhere"] for kind, column in table.items() if kind != "pair")
    assert table["pair"]["left_out"]["repeated"], "a pair's chosen answer that a demonstration has already"
    printed = [line.rsplit(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert ["rows", "demonstrations", "pairs", "prompts"] in printed
    assert ["all", "122", "100", "40"] in printed


def test_labels_in_the_metrics_and_the_log(execute, params, raw, tmp_path, capsys):
    raw(train=PAIRS)
    rows = [{**PAIRS[i], "prompt": f"new {i}", "annotator": name} for i in range(3) for name in ("anna", "ben")]
    write_jsonl(
        tmp_path / "data/raw/people.jsonl", [*rows, {**PAIRS[3], "prompt": "x", "annotator": "ben", "tie": True}]
    )
    made = execute(params(labels="people.jsonl"))
    assert made.metrics["labels"] == {
        "annotators": {"anna": 3, "ben": 3},
        "ties": 1,
        "pairs_by_several": 3,
        "alpha": None,
        "agreement": {"anna": 1.0, "ben": 1.0},
    }
    assert (made.metrics["rows_read"], made.metrics["rows_used"]) == (107, 106)
    column = made.metrics["rows_by_use"]["pair"]
    assert column["left_out"] == {"tie": 1}
    assert sum(value for value in column.values() if isinstance(value, int)) - column["read"] == column["read"] - 1
    assert len(made.pairs) == column["reward_train"] + column["reward_validation"] == 33
    assert {row["annotator"] for row in made.pairs} == {None, "anna", "ben"}
    printed = capsys.readouterr().out
    assert "labels: anna 3, ben 3; 1 ties, 3 pairs by several annotators" in printed
    assert "left out: tie, only for agreement" in printed


def test_demonstrations_alone_give_no_pairs(execute, params, raw):
    raw(train=[{"prompt": f"q{i}", "response": f"a{i}"} for i in range(50)])
    made = execute(params())
    assert made.pairs == []
    assert len(made.preference_prompts) > 1


def test_equal_prompts_are_written_once_where_they_are_only_prompts(execute, params, raw):
    raw(train=[{"prompt": f"q{i}", "response": f"a{k}"} for i in range(50) for k in range(3)])
    made = execute(params())
    assert len(made.ppo_prompts) == len(prompts_of(made.ppo_prompts)) == 9
    assert len(made.heldout) == 5
    assert len(made.demonstrations) == 3 * 23


def test_demo_world(execute, params):
    made = execute(
        params(source="demo", demo={"prompts": 400, "domains": 4, "needs": 7, "demonstrations_per_prompt": 1})
    )
    assert [len(getattr(made, name)) for name in DATASETS] == [180, 0, 108, 72, 40]
    assert made.metrics["rows_read"] == made.metrics["rows_used"] == 400
    assert all(row["response"] for row in made.heldout)


def test_huggingface_source_reads_below_raw(execute, params, raw):
    datasets = importlib.import_module("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(PAIRS)}).save_to_disk(raw(train=PAIRS) / "hub")
    made = execute(params(source="huggingface", huggingface={"dataset": "hub", "heldout_split": None}))
    assert len(made.pairs) == 27


def shared_data() -> Path | None:
    default = Path(__file__).parents[3] / ".." / "shared" / "data"
    folder = Path(os.environ.get("LEASH_SHARED_DATA", default)) / "hh-helpful"
    return folder.resolve() if folder.is_dir() else None


def test_real_human_preferences(execute, params, tmp_path):
    source = shared_data()
    if source is None:
        pytest.skip("the shared data set hh-helpful is not here; set LEASH_SHARED_DATA to its parent folder")
    (tmp_path / "data/raw").mkdir(parents=True)
    shutil.copytree(source, tmp_path / "data/raw/set")
    made = execute(params())
    assert [len(getattr(made, name)) for name in DATASETS] == [939, 563, 563, 375, 286]
    assert made.metrics["rows_used"] == 2163
    text = json.dumps(made.pairs + made.demonstrations)
    assert not re.search(r"\\n\\n(Human|Assistant): ", text)
    assert all(row["response"] == row["response"].strip() for row in made.demonstrations)


def test_further_columns_are_kept_with_the_prompts(execute, params, raw):
    """Of rows with one prompt those that agree."""
    rows = [{"prompt": f"{i} + 1?", "response": f"it is {i + 1}", "answer": str(i + 1), "by": "a"} for i in range(100)]
    raw(train=[*rows, *({**row, "response": "other", "by": "b", "only": 1} for row in rows)])
    made = execute(params())
    for name in ("preference_prompts", "ppo_prompts", "heldout"):
        for row in getattr(made, name):
            number = int(row["prompt"][0]["content"].split()[0])
            assert row["extra"] == {"answer": str(number + 1), "only": 1}
    assert not any("extra" in row for row in made.demonstrations)


def test_data_without_further_columns_have_no_such_column(execute, params, raw):
    raw(train=PAIRS)
    made = execute(params())
    assert not any("extra" in row for name in DATASETS for row in getattr(made, name))


def test_a_row_without_further_columns_has_an_empty_object_beside_others(execute, params, raw):
    rows = [{"prompt": f"{i} + 1?", "response": f"it is {i + 1}"} for i in range(100)]
    raw(train=[*rows[:50], *({**row, "answer": 1} for row in rows[50:])])
    made = execute(params())
    found = [row["extra"] for name in ("preference_prompts", "ppo_prompts", "heldout") for row in getattr(made, name)]
    assert {"answer": 1} in found
    assert {} in found


def test_further_columns_of_parquet_files(execute, params, raw, tmp_path):
    folder = raw(train=[]) / "set"
    (folder / "train.jsonl").unlink()
    table = {"prompt": [f"{i}?" for i in range(100)], "response": [str(i) for i in range(100)], "answer": range(100)}
    pandas.DataFrame(table | {"image": [b"x"] * 100}).to_parquet(folder / "train.parquet")
    with pytest.raises(UserError, match=r"row 1: has prompt, response and image, which is not read beside them"):
        execute(params())
    pandas.DataFrame(table | {"vector": [b"x"] * 100}).to_parquet(folder / "train.parquet")
    made = execute(params())
    assert all(row["extra"] == {"answer": int(row["prompt"][0]["content"][:-1])} for row in made.ppo_prompts)


TEXTS = [{"text": f"Film {i} was  really {word} {i}.", "label": i % 2} for i in range(100) for word in ("good", "bad")]


def test_texts_are_openings_and_continuations_split_by_opening(execute, params, raw):
    """Joined, each prompt and response is a text of the data; without a column of ratings there are none."""
    raw(train=[*TEXTS, {"text": "Film 7 was"}])
    made = execute(params(opening_words=3))
    for row in made.demonstrations + made.heldout:
        assert row["prompt"][0]["content"] + row["response"] in {text["text"] for text in TEXTS}
        assert row["response"].startswith("  really ")
    sides = [
        prompts_of(getattr(made, name)) for name in ("demonstrations", "preference_prompts", "ppo_prompts", "heldout")
    ]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 100
    assert made.metrics["dropped"]["too_short"] == 1
    assert made.dropped == [{"file": "data/raw/set/train.jsonl", "row": 201, "reason": "too_short"}]
    assert made.ratings == []
    assert "ratings" not in made.metrics
    assert all(row["extra"]["label"] in (0, 1) for row in made.ppo_prompts)


def test_a_held_out_file_of_texts_is_compared_by_opening(execute, params, raw):
    raw(train=TEXTS, test=[{"text": "film 3 WAS really dull", "label": 0}])
    with pytest.raises(UserError, match=r"2 training rows open like a held-out row.*\('film 3 was'\)"):
        execute(params(opening_words=3))
    assert len(execute(params(opening_words=3, on_leak="drop")).heldout) == 1


def test_ratings_are_the_demonstrations_of_the_reward_models_share(execute, params, raw):
    """Every rated row is used or left out once; a row without a rating is not used by the reward model."""
    rows = [*TEXTS[:-1], {"text": "Film 99 was really odd"}]
    raw(train=rows)
    made = execute(params(opening_words=3, rating_column="label"))
    label = {row["text"]: row.get("label") for row in rows}
    assert {row["prompt_id"] for row in made.ratings} <= prompts_of(made.preference_prompts)
    for row in made.ratings:
        assert row["rating"] == label[row["prompt"][0]["content"] + row["response"]]
        assert isinstance(row["rating"], float)
    assert made.metrics["ratings"] == len(made.ratings)
    use = made.metrics["rows_by_use"]["demonstration"]
    assert use["reward_train"] + use["reward_validation"] == len(made.ratings)
    assert {row["split"] for row in made.ratings} == {"train", "validation"}
    counts = [count for name, count in use.items() if name not in ("read", "left_out")]
    assert sum(counts) + sum(use["left_out"].values()) == use["read"] == 200
    seeds = [execute(params(opening_words=3, rating_column="label", seed=seed)) for seed in range(1, 9)]
    unrated = [made for made in seeds if len(made.ratings) % 2]
    assert all(made.metrics["rows_by_use"]["demonstration"]["left_out"]["used_elsewhere"] == 1 for made in unrated)
    assert unrated, "the row without a rating is in the reward model's share for some seed"


@pytest.mark.parametrize("value", ["good", [1], {"a": 1}])
def test_a_rating_that_is_no_number_is_named(execute, params, raw, value):
    raw(train=[*TEXTS, {"text": "Film 7 was not bad", "label": value}])
    with pytest.raises(
        UserError, match=r"train\.jsonl, row 201: label is .*, not a number; correct it, or name another"
    ):
        execute(params(opening_words=3, rating_column="label"))


def test_numbers_as_text_and_truth_values_are_ratings(execute, params, raw):
    """As CSV files have them."""
    raw(train=[{**row, "label": "2.5" if row["label"] else True} for row in TEXTS])
    assert {row["rating"] for row in execute(params(opening_words=3, rating_column="label")).ratings} == {2.5, 1.0}


@pytest.mark.parametrize("column", ["lable", "same"])
def test_ratings_that_do_not_differ_are_refused_before_anything_runs(params, raw, monkeypatch, tmp_path, column):
    monkeypatch.chdir(tmp_path)
    raw(train=[{**row, "label": place % 2, "same": 1} for place, row in enumerate(TEXTS)])
    prepared = prepare(params(opening_words=3, rating_column="label"))
    require_ratings(prepared, "label")
    require_ratings(prepared, None)
    with pytest.raises(UserError, match=rf"rating_column is {column}, but the reward model's train split has no two"):
        require_ratings(prepared, column)


def test_shared_prompts_serve_sft_reward_model_and_ppo(execute, params, raw, capsys):
    """A row has several uses; training, validation, held out and left out sum to the rows read."""
    doubled = {**PAIRS[7], "chosen": "another good one"}
    raw(train=[*PAIRS, doubled, {"prompt": "q", "chosen": "same", "rejected": "same"}])
    made = execute(params(split={**SPLIT, "share": True}))
    training = {row["prompt_id"] for row in made.pairs if row["split"] == "train"}
    validation = {row["prompt_id"] for row in made.pairs if row["split"] == "validation"}
    assert (len(training), len(validation)) == (81, 9)
    for rows in (made.demonstrations, made.preference_prompts):
        assert {row["prompt_id"] for row in rows if row["split"] == "train"} == training
        assert {row["prompt_id"] for row in rows if row["split"] == "validation"} == validation
    assert prompts_of(made.ppo_prompts) == training
    assert prompts_of(made.heldout).isdisjoint(training | validation)
    column = made.metrics["rows_by_use"]["pair"]
    parts = column["training"] + column["validation"] + column["heldout"]
    assert parts + sum(column["left_out"].values()) == column["read"] == 102
    assert (column["reward_train"], column["reward_validation"]) == (len(made.pairs) - 9, 9)
    assert column["ppo"] == len(made.ppo_prompts)
    assert column["sft_train"] + column["sft_validation"] == len(made.demonstrations)
    assert made.metrics["shared_prompts"] is True
    printed = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in printed[:8]] == [
        "rows pairs",
        "training 82",
        "of these SFT 82",
        "of these reward model 82",
        "of these PPO prompts 81",
        "validation 9",
        "of these SFT 9",
        "of these reward model 9",
    ]
    assert any(line.startswith("prompts are shared (ingest.split.share)") for line in printed)


def test_few_prompts_are_shared_by_default(execute, params, raw):
    raw(train=PAIRS)
    assert execute(params(split={})).metrics["shared_prompts"] is True
    assert "shared_prompts" not in execute(params()).metrics


def test_prompts_alone_without_sft(execute, params, raw, capsys):
    """PPO has the training prompts, `select` the validation prompts, and without a reward model none is its."""
    raw(train=[{"prompt": f"question {i}"} for i in range(100)])
    with pytest.raises(UserError, match=r"SFT needs demonstrations.*; or set sft\.enabled: false"):
        execute(params(split={}))
    capsys.readouterr()
    made = execute(params(split={}), sft=False, rewarded=False)
    assert (made.demonstrations, made.pairs) == ([], [])
    assert (len(made.ppo_prompts), len(made.heldout)) == (81, 10)
    assert sum(row["split"] == "validation" for row in made.preference_prompts) == 9
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:6] == [
        "rows prompts",
        "training 81",
        "of these PPO prompts 81",
        "validation 9",
        "held out 10",
        "all 100",
    ]
    apart = execute(params(), sft=False)
    assert len(apart.ppo_prompts) == 36, "0.2 of 0.5"
    assert len(apart.preference_prompts) == 54
