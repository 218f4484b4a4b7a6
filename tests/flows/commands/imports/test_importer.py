"""`leash import`: whole or not at all, tracked by DVC, and never over other data unasked."""

import shutil
import subprocess
import sys

import pytest

from flows.commands.imports import importer
from flows.commands.imports.importer import import_data
from flows.commands.imports.trial import small_values
from rlhf_core.errors import UserError
from tasks.datasets.jsonl import write_jsonl

ROWS = [{"prompt": f"question {i}", "response": "a"} for i in range(20)]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    root = tmp_path_factory.mktemp("template")
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=root, check=True)
    return root


@pytest.fixture
def root(template, tmp_path):
    return shutil.copytree(template, tmp_path / "repo")


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "chats"
    write_jsonl(folder / "train.jsonl", ROWS)
    (folder / "LICENSES").mkdir()
    (folder / "LICENSES/mit.txt").write_text("free")
    (folder / "README.md").write_text("about")
    (folder / "notes.py").write_text("print()")
    return folder


@pytest.fixture
def added(monkeypatch):
    """Replaces `dvc add` where the test is not about it."""
    calls = []
    monkeypatch.setattr(importer, "dvc_add", lambda target, root: calls.append(target.name))
    return calls


def tree(root):
    return sorted(p.relative_to(root).as_posix() for p in (root / "data").rglob("*") if p.is_file())


IMPORTED = ["data/raw/chats/LICENSES/mit.txt", "data/raw/chats/README.md", "data/raw/chats/train.jsonl"]


def test_folder_is_copied_and_tracked(source, root):
    assert import_data(source, root)[0] == root / "data/raw/chats"
    assert tree(root) == ["data/raw/chats.dvc", *IMPORTED]
    assert (root / "data/raw/chats/train.jsonl").read_bytes() == (source / "train.jsonl").read_bytes()
    assert "nfiles: 3" in (root / "data/raw/chats.dvc").read_text()
    assert sorted(p.name for p in (root / "data").iterdir()) == ["raw"]


def test_a_file_alone(source, root, added):
    assert import_data(source / "train.jsonl", root)[0] == root / "data/raw/train.jsonl"
    assert tree(root) == ["data/raw/train.jsonl"]
    import_data(source / "train.jsonl", root)
    assert added == ["train.jsonl", "train.jsonl"]
    (source.parent / "latest.jsonl").symlink_to(source / "train.jsonl")
    (source.parent / "blob").write_bytes((source / "train.jsonl").read_bytes())
    (source.parent / "hub.jsonl").symlink_to(source.parent / "blob")
    for name in ("latest.jsonl", "hub.jsonl"):
        assert import_data(source.parent / name, root)[0] == root / "data/raw" / name
        assert not (root / "data/raw" / name).is_symlink()


def test_data_that_a_quick_try_cannot_use_are_not_copied(source, root, added):
    with pytest.raises(UserError, match="the data have no pairs"):
        import_data(source, root, check=small_values)
    assert (added, tree(root)) == ([], [])


def test_read_only_sources_give_writable_copies(source, root, added):
    for path in [*source.rglob("*"), source]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    import_data(source, root)
    assert (root / "data/raw/chats/train.jsonl").stat().st_mode & 0o200
    for path in [source, *source.rglob("*")]:
        path.chmod(0o755)


def test_broken_rows_leave_nothing(source, root):
    with (source / "train.jsonl").open("a") as file:
        file.write('{"prompt": "x"}\n')
    with pytest.raises(UserError, match=r"train\.jsonl, row 21: missing column response"):
        import_data(source, root)
    assert not (root / "data").exists()


def test_other_data_of_the_same_name_need_force(source, root, added):
    import_data(source, root)
    import_data(source, root)
    write_jsonl(source / "train.jsonl", ROWS[:-1])
    (source / "README.md").unlink()
    with pytest.raises(UserError, match="holds other data; use --force"):
        import_data(source, root)
    assert tree(root) == IMPORTED
    import_data(source, root, force=True)
    assert tree(root) == [IMPORTED[0], IMPORTED[2]]
    assert (root / "data/raw/chats/train.jsonl").read_text().count("\n") == 19


def test_failing_dvc_add_restores_what_was_there(source, root, monkeypatch, added):
    import_data(source, root)
    before = (source / "train.jsonl").read_bytes()
    write_jsonl(source / "train.jsonl", ROWS[:-1])

    def fail(target, root):
        raise UserError("dvc add failed")

    monkeypatch.setattr(importer, "dvc_add", fail)
    with pytest.raises(UserError, match="dvc add failed"):
        import_data(source, root, force=True)
    assert tree(root) == IMPORTED
    assert (root / "data/raw/chats/train.jsonl").read_bytes() == before
    shutil.rmtree(root / "data")
    with pytest.raises(UserError, match="dvc add failed"):
        import_data(source, root)
    assert tree(root) == []


def test_no_room_leaves_nothing(source, root, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(importer.shutil, "copyfile", full)
    with pytest.raises(UserError, match="No space left on device"):
        import_data(source, root)
    assert tree(root) == []


def test_dvc_add_speaks(source, root):
    (root / "data/raw").mkdir(parents=True)
    (root / "dvc.yaml").write_text("stages:\n  a:\n    cmd: x\n    outs: [data/raw/chats]\n")
    with pytest.raises(UserError, match="dvc add failed"):
        import_data(source, root)
    assert tree(root) == []


def test_what_cannot_be_imported(source, root, tmp_path):
    with pytest.raises(UserError, match="nowhere: file not found"):
        import_data(tmp_path / "nowhere", root)
    with pytest.raises(UserError, match="not a DVC repository"):
        import_data(source, tmp_path)
    with pytest.raises(UserError, match="no data file"):
        import_data(source / "LICENSES", root)
    with pytest.raises(UserError, match=r"cannot become|no data file"):
        import_data(source.rename(tmp_path / ".chats"), root)


def test_data_that_already_lie_in_raw_are_tracked_in_place(source, root, added):
    (root / "data/raw").mkdir(parents=True)
    target = source.rename(root / "data/raw/chats")
    assert import_data(target, root)[0] == target
    assert added == ["chats"]


def test_it_prints_what_was_found_and_the_lines_of_params_yaml(source, root, added, capsys):
    write_jsonl(source / "train.jsonl", [*ROWS, ROWS[0], {**ROWS[1], "score": 1}])
    write_jsonl(source / "test/test.jsonl", [{"prompt": "Question  3", "chosen": "a", "rejected": "b", "id": 1}])
    import_data(source, root)
    printed = capsys.readouterr().out.splitlines()
    assert printed[:8] == [
        "test/test.jsonl: 1 pair, held out (ingest.files.heldout_files); columns: prompt, chosen, rejected; "
        "not read, kept for reward functions: id",
        "train.jsonl: 22 demonstrations; columns: prompt, response; not read, kept for reward functions: score",
        "train.jsonl, row 21: duplicate",
        "train.jsonl, row 22: duplicate",
        "2 rows that ingest leaves out (ingest.on_bad_row: refuse stops instead): duplicate 2 (first: train.jsonl, "
        "row 21)",
        "leaked held-out prompts: 1 training rows open like a held-out row, first train.jsonl row 4 = test/test.jsonl "
        "row 1 ('question 3'); remove them, or set ingest.on_leak: drop to leave the training rows out",
        "no pairs (prompt, chosen, rejected): a reward model needs them, or ratings (ingest.rating_column); a function "
        "as reward needs none (scorer)",
        "rows                     demonstrations  pairs",
    ]
    table = [line.split() for line in printed]
    assert ["left", "out:", "duplicate", "2", "0"] in table
    assert ["left", "out:", "leaked", "1", "0"] in table
    assert ["all", "22", "1"] in table
    assert any(line.split() == ["lengths", "median", "95%", "longest"] for line in printed)
    assert "train.jsonl row 1, a demonstration, as a model from scratch reads it:" in printed
    assert printed[-5:] == [
        "data/raw/chats: tracked by DVC; for git: git add data/raw/chats.dvc",
        "to undo it: dvc remove data/raw/chats.dvc && rm -r data/raw/chats",
        "set in params.yaml (examples/own-data.yaml is a complete file to start from):",
        "  ingest.source: files",
        '  ingest.files.path: "chats"    (or a list of names)',
    ]


def test_prompts_alone_are_enough_without_sft_and_reward_model(tmp_path, root, added, capsys):
    write_jsonl(tmp_path / "questions.jsonl", [{"prompt": f"What is {number}?"} for number in range(100)])
    import_data(tmp_path / "questions.jsonl", root)
    printed = capsys.readouterr().out.splitlines()
    table = [" ".join(line.split()) for line in printed]
    assert "rows prompts" in table
    assert "of these PPO prompts 81" in table
    assert not any("reward model" in line and "of these" in line for line in printed)
    assert printed[-2:] == [
        "  sft.enabled: false    (there is no answer to imitate: the base model must answer already)",
        "  scorer: [{term: FILE.py, weight: 1.0}]    (a function below rewards/: there are no pairs)",
    ]


def test_the_printed_commands_can_be_pasted(tmp_path, root, capsys):
    source = tmp_path / "my data.jsonl"
    source.write_text('{"prompt": "x", "chosen": "a b", "rejected": "c"}\n', encoding="utf-8")
    import_data(source, root)
    printed = capsys.readouterr().out
    assert "git add 'data/raw/my data.jsonl.dvc'" in printed
    assert "dvc remove 'data/raw/my data.jsonl.dvc' && rm -r 'data/raw/my data.jsonl'" in printed


def test_every_broken_row_is_named(source, root, capsys):
    with (source / "train.jsonl").open("a") as file:
        file.write('{"prompt": "x"}\n{"prompt":\n')
    with pytest.raises(UserError, match=r"train\.jsonl, row 21: missing column response .*first of 2 problems"):
        import_data(source, root)
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"{source}/train.jsonl, row 21",
        f"{source}/train.jsonl, row 22",
    ]
    assert not (root / "data").exists()


def test_texts_are_imported_from_a_table_and_their_openings_are_compared(root, tmp_path, capsys):
    source = tmp_path / "films"
    source.mkdir()
    (source / "train.csv").write_text('text,label\nThe film is a joy.,1\n"Dull, all of it.",0\nToo short,0\n')
    write_jsonl(source / "test.jsonl", [{"text": "the FILM is a mess.", "label": 0}])
    import_data(source, root)
    lines = capsys.readouterr().out.splitlines()
    assert "train.csv: 3 demonstrations; columns: text; not read, kept for reward functions: label" in lines
    assert "texts: the first 4 words are the prompt (ingest.opening_words); set base.format: text" in lines
    assert "train.csv, row 3: too_short" in " ".join(lines)
    assert any("leaked held-out prompts: 1 training rows" in line for line in lines)
