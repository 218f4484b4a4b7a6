"""Datasets of the hub's formats from local folders, and checks of a hub id. Nothing here uses a network."""

from types import SimpleNamespace

import datasets
import pytest

from rlhf_core.errors import UserError
from tasks.datasets.sources import huggingface
from tasks.params.ingest import HuggingFaceParams

TRAIN = [{"prompt": f"question {i}", "chosen": "a", "rejected": "b", "id": i} for i in range(3)]
TEST = [{"prompt": "held out", "chosen": "a", "rejected": "b", "id": 9}]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def read(tmp_path):
    def call(**changes):
        return huggingface.read(HuggingFaceParams(**({"dataset": "set"} | changes)), tmp_path, tmp_path / "cache")

    return call


def seen(examples):
    return [(example.file, example.row, example.heldout, example.opening) for example in examples]


EXPECTED = [*[("set[train]", i + 1, False, f"question {i}") for i in range(3)], ("set[test]", 1, True, "held out")]


def saved(tmp_path, **splits):
    made = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    datasets.DatasetDict(made).save_to_disk(tmp_path / "set")


def test_folder_of_save_to_disk(tmp_path, read):
    saved(tmp_path, train=TRAIN, test=TEST)
    assert seen(read()) == EXPECTED


def test_single_saved_dataset_is_train(tmp_path, read):
    datasets.Dataset.from_list(TRAIN).save_to_disk(tmp_path / "set")
    assert seen(read(heldout_split=None)) == EXPECTED[:3]


def test_folder_of_files(tmp_path, read):
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_list(TRAIN).to_parquet(tmp_path / "set/train.parquet")
    datasets.Dataset.from_list(TEST).to_parquet(tmp_path / "set/test.parquet")
    assert seen(read()) == EXPECTED


def test_a_missing_split_is_refused_with_those_there_are(tmp_path, read):
    saved(tmp_path, train=TRAIN)
    with pytest.raises(UserError, match=r'split test: Unknown split "test".*\[\'train\'\].*heldout_split or null'):
        read()


def test_wrong_columns_are_named(tmp_path, read):
    saved(tmp_path, train=[{"body": "x"}], test=TEST)
    with pytest.raises(UserError, match=r"set\[train\], row 1: missing column prompt"):
        read()


def test_broken_files_are_a_users_error(tmp_path, read):
    (tmp_path / "set").mkdir()
    (tmp_path / "set/train.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(UserError, match=r"dataset set, split train: .*row 1"):
        read()


def test_no_code_of_a_dataset_is_run(tmp_path, read):
    (tmp_path / "set").mkdir()
    (tmp_path / "set/set.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match="scripts are no longer supported"):
        read()
    assert not (tmp_path / "ran").exists()


def test_hub_id_needs_a_revision(read):
    with pytest.raises(UserError, match=r"ingest\.huggingface\.revision, its commit hash"):
        read(dataset="someone/something")


@pytest.mark.parametrize("revision", ["main", "v1.0", COMMIT[:12], COMMIT.upper()])
def test_revision_is_a_commit(revision):
    with pytest.raises(ValueError, match="commit hash of 40"):
        HuggingFaceParams(dataset="a/b", revision=revision)


def test_unreachable_hub_is_a_users_error(read, monkeypatch):
    asked = {}

    def offline(path, name, **options):
        asked.update(options, path=path, name=name)
        raise ConnectionError("Couldn't reach 'a/b' on the Hub")

    found = SimpleNamespace(config=SimpleNamespace(data_files={"train": [f"hf://datasets/a/b@{COMMIT}/train.jsonl"]}))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *names, **options: found)
    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match="the hub cannot be reached"):
        read(dataset="a/b", revision=COMMIT, name="helpful")
    assert asked == {"path": "a/b", "name": "helpful", "split": "train", "revision": COMMIT}
