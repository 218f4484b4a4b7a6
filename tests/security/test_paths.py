"""Names in params.yaml and links below data/raw/ do not lead out of it; data sets contain data and nothing else."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from rlhf_core.errors import UserError
from tasks.datasets.raw import below_raw
from tasks.datasets.sources import files, huggingface
from tasks.params.all import Params
from tasks.params.ingest import FilesParams, HuggingFaceParams
from tasks.params.loader import parse, read_yaml

if TYPE_CHECKING:
    from tests.conftest import Ended, Project

Main = Callable[["Project", str], "Ended"]
ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0" * 40
ROW = '{"prompt": "q", "response": "a"}\n'
STOLEN = '{"prompt": "q", "response": "stolen"}\n'

OUTSIDE = [
    "../../secret",
    "a/../../../secret",
    "/etc/passwd",
    "~/.ssh",
    "C:\\secret",
    "a\0b",
    "a\nb",
    "",
    "..",
    "\\\\x",
]
KEYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "ingest.files": lambda value: {"path": value},
    "ingest.huggingface": lambda value: {"dataset": value, "revision": COMMIT},
    "base.pretrained": lambda value: {"model": value, "revision": COMMIT},
    "ppo.ptx": lambda value: {"coef": 1.0, "file": value},
}


@pytest.mark.parametrize("block", KEYS)
@pytest.mark.parametrize("value", OUTSIDE)
def test_a_name_that_leads_out_is_refused_by_its_value_alone(block: str, value: str) -> None:
    content = read_yaml(ROOT / "examples" / "tiny.yaml")
    above, last = block.split(".")
    content[above][last] = KEYS[block](value)
    refused(lambda: parse(Params, content), rf"params\.yaml: {block}\.\w+: must .*below data/raw/")


@pytest.mark.parametrize("block", KEYS)
def test_the_stage_check_refuses_it(project: "Project", stage_main: Main, block: str) -> None:
    project.set(block, KEYS[block]("../../secret"))
    ended = stage_main(project, "check")
    assert ended.code == 2
    assert ended.stderr.startswith(f"check: params.yaml: {block}.")
    assert "must stay below data/raw/" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """An empty data/raw, and a secret beside it."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "train.jsonl").write_text(STOLEN, encoding="utf-8")
    folder = tmp_path / "data" / "raw"
    folder.mkdir(parents=True)
    return folder


def refused(call: Callable[[], object], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        call()
    assert "\n" not in str(error.value)


def test_links_that_lead_out_are_refused(raw: Path) -> None:
    secret = raw.parents[1] / "secret"
    (raw / "whole").symlink_to(secret)
    (raw / "set").mkdir()
    (raw / "set" / "train.jsonl").symlink_to(secret / "train.jsonl")
    (raw / "deep" / "er").mkdir(parents=True)
    (raw / "deep" / "er" / "folder").symlink_to(secret)
    for name in ("whole", "whole/train.jsonl", "set", "set/train.jsonl", "deep"):
        refused(
            lambda name=name: files.read(FilesParams(path=name), raw), r"ingest\.files\.path: .* leads out of data/raw/"
        )
    for name in ("whole", "set", "deep"):
        params = HuggingFaceParams(dataset=name, heldout_split=None)
        refused(lambda params=params: huggingface.read(params, raw), r"huggingface\.dataset: .* leads out of data/raw/")


def test_links_within_and_links_of_dvc_are_followed(raw: Path) -> None:
    """`cache.type symlink` puts links into DVC's cache in the place of the files."""
    cache = raw.parents[1] / ".dvc" / "cache" / "files" / "md5" / "ab" / ("0" * 30)
    cache.parent.mkdir(parents=True)
    cache.write_text(ROW, encoding="utf-8")
    (raw / "set").mkdir()
    (raw / "set" / "train.jsonl").symlink_to(cache)
    (raw / "again").symlink_to(raw / "set")
    assert len(files.read(FilesParams(path="set"), raw)) == 1
    assert below_raw(raw, "again", "key") == raw / "again"


@pytest.mark.parametrize("place", ["{secret}/train.jsonl", "../../../secret/train.jsonl", "../../../secret/*"])
def test_the_readme_of_a_dataset_cannot_name_files_elsewhere(raw: Path, tmp_path: Path, place: str) -> None:
    (raw / "set").mkdir()
    (raw / "set" / "train.jsonl").write_text(ROW, encoding="utf-8")
    named = place.format(secret=raw.parents[1] / "secret")
    settings = [{"config_name": "default", "data_files": [{"split": "train", "path": named}]}]
    (raw / "set" / "README.md").write_text(f"---\nconfigs: {json.dumps(settings)}\n---\n", encoding="utf-8")
    params = HuggingFaceParams(dataset="set", heldout_split=None)
    refused(lambda: huggingface.read(params, raw, tmp_path / "cache"), "leads out of data/raw/")


def test_a_saved_dataset_cannot_name_files_elsewhere(raw: Path) -> None:
    import datasets

    rows = [{"prompt": "q", "response": "stolen"}]
    datasets.Dataset.from_list(rows).save_to_disk(raw.parents[1] / "secret" / "saved")
    datasets.Dataset.from_list(rows).save_to_disk(raw / "saved")
    state = json.loads((raw / "saved" / "state.json").read_text(encoding="utf-8"))
    name = state["_data_files"][0]["filename"]
    state["_data_files"][0]["filename"] = str(raw.parents[1] / "secret" / "saved" / name)
    (raw / "saved" / "state.json").write_text(json.dumps(state), encoding="utf-8")
    refused(
        lambda: huggingface.read(HuggingFaceParams(dataset="saved", heldout_split=None), raw), "leads out of data/raw/"
    )


@pytest.mark.parametrize("name", ["text", "pandas", "json", "secret", "secret/inner"])
def test_a_builder_or_a_folder_of_the_project_is_no_id_of_the_hub(
    raw: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`text` would read every file at the root of the repository."""
    monkeypatch.chdir(raw.parents[1])
    (raw.parents[1] / "secret" / "inner").mkdir()
    params = HuggingFaceParams(dataset=name, revision=COMMIT, heldout_split=None)
    refused(lambda: huggingface.read(params, raw), "is neither a folder below data/raw/ nor an id of the hub")


def test_a_dataset_of_the_hub_cannot_name_files_of_this_machine(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    named = {"train": [str(raw.parents[1] / "secret" / "train.jsonl")]}
    found = SimpleNamespace(config=SimpleNamespace(data_files=named))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *names, **options: found)
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: pytest.fail("it was read"))
    params = HuggingFaceParams(dataset="owner/name", revision=COMMIT, heldout_split=None)
    refused(
        lambda: huggingface.read(params, raw), "its README names the data file .* of somewhere else; nothing was read"
    )


def test_no_code_of_a_dataset_runs(raw: Path, tmp_path: Path) -> None:
    mark = tmp_path / "owned"
    (raw / "set").mkdir()
    (raw / "set" / "train.jsonl").write_text(ROW, encoding="utf-8")
    (raw / "set" / "set.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n", encoding="utf-8")
    params = HuggingFaceParams(dataset="set", heldout_split=None)
    refused(lambda: huggingface.read(params, raw, tmp_path / "cache"), "Dataset scripts are no longer supported")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["models/sft", "tests"])
def test_base_takes_no_model_from_elsewhere_in_the_project(finished: "Project", stage_main: Main, name: str) -> None:
    """DVC would not track it: transformers takes any folder of that name."""
    finished.set("runtime.tracking", False)
    finished.set("base.source", "pretrained")
    finished.set("base.pretrained", {"model": name, "revision": COMMIT})
    ended = stage_main(finished, "base")
    assert ended.code == 2
    assert f"{name} is neither a folder below data/raw/ nor an id of the hub" in ended.stderr


def test_a_link_to_a_model_elsewhere_is_refused(finished: "Project", stage_main: Main) -> None:
    (finished.root / "data/raw/own").symlink_to(finished.root / "models/sft")
    finished.set("runtime.tracking", False)
    finished.set("base.source", "pretrained")
    finished.set("base.pretrained", {"model": "own"})
    ended = stage_main(finished, "base")
    assert ended.code == 2
    assert "base.pretrained.model: " in ended.stderr
    assert "leads out of data/raw/" in ended.stderr


def test_a_link_to_a_text_elsewhere_is_refused(finished: "Project", stage_main: Main, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("words " * 200, encoding="utf-8")
    (finished.root / "data/raw/text.txt").symlink_to(tmp_path / "secret.txt")
    finished.set("runtime.tracking", False)
    finished.set("ppo.ptx", {"coef": 1.0, "file": "text.txt"})
    ended = stage_main(finished, "ingest")
    assert ended.code == 2
    assert "leads out of data/raw/" in ended.stderr


ODD_NAMES = [
    "$(touch owned).jsonl", "`touch owned`.jsonl", "a;touch owned;.jsonl", "-rf.jsonl", "--help.jsonl",
    "it's \"odd\".jsonl", "line\nbreak.jsonl", "a && touch owned.jsonl", "%s %d {0}.jsonl", "${owned}.jsonl",
]  # fmt: skip


def test_odd_file_names_are_names(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(raw.parents[1])
    (raw / "set").mkdir()
    for number, name in enumerate(ODD_NAMES):
        (raw / "set" / name).write_text(json.dumps({"prompt": f"q{number}", "response": "a"}) + "\n", encoding="utf-8")
    assert len(files.read(FilesParams(path="set"), raw)) == len(ODD_NAMES)
    assert not (raw.parents[1] / "owned").exists()


@pytest.mark.slow
def test_leash_import_takes_an_odd_name_as_a_name(project: "Project", tmp_path: Path) -> None:
    source = tmp_path / "-x $(touch owned) `touch owned` 'q';touch owned"
    source.mkdir()
    for number, name in enumerate(ODD_NAMES):
        (source / name).write_text(json.dumps({"prompt": f"q{number}", "response": "a"}) + "\n", encoding="utf-8")
    done = project.run(sys.executable, "-m", "flows.cli", "import", "--", str(source))
    assert done.returncode in (0, 2), done.stderr
    assert "Traceback" not in done.stderr
    assert not list(project.root.rglob("owned"))
    if done.returncode == 0:
        assert (project.root / "data/raw" / source.name).is_dir()
