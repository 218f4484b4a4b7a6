"""The parameters of the quick try: valid, small, fitted to the data, and no edit of the user's is lost."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flows.commands.imports.trial import small_values, write_trial
from flows.text import dotted
from rlhf_core.errors import UserError
from tasks.datasets.sources.example import Example
from tasks.params.all import Params
from tasks.params.loader import parse, read_yaml

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def project(tmp_path):
    """A git repository with examples/ and a committed params.yaml."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copyfile(ROOT / "params.yaml", tmp_path / "params.yaml")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    return tmp_path


def rows(count, characters, kind="pair", **more):
    """Rows of a prompt and a longest answer with so many characters together; a tenth of them are the
    answer's."""
    answer = more.pop("answer", characters // 10)
    prompt = [{"role": "user", "content": "p" * (characters - answer)}]
    answers = {"response": "r" * answer}
    if kind == "pair":
        answers = {"chosen": "r" * answer, "rejected": "r"}
    return [Example("a.jsonl", row, False, prompt, **answers, **more) for row in range(1, count + 1)]


def try_out(project, names=("my-data",), examples=None):
    lines = []
    write_trial(project, list(names), examples or rows(2000, 300), lines.append)
    return lines


def test_the_file_is_valid_and_differs_from_the_full_one_in_the_small_values_only(project):
    full = dotted(read_yaml(project / "examples/own-data.yaml"))
    lines = try_out(project)
    content = read_yaml(project / "params.yaml")
    parse(Params, content)
    assert {name: value for name, value in dotted(content).items() if value != full.get(name)} == {
        "base.scratch.vocabulary": 1024,
        "base.scratch.layers": 2,
        "base.scratch.hidden": 64,
        "base.scratch.intermediate": 128,
        "base.scratch.heads": 2,
        "base.pretrain.steps": 20,
        "base.pretrain.learning_rate": 0.004,
        "sft.learning_rate": 0.004,
        "sft.warmup_steps": 5,
        "sft.batch_size": 16,
        "sft.epochs": 0.89,  # 100 steps of 16 rows, of 0.9 · 2,000
        "reward.batch_size": 8,
        "reward.epochs": 0.19,  # 30 steps of 8 rows, of 0.63 · 2,000
        "ppo.steps": 6,
        "evaluate.max_prompts": 40,
    }
    assert "now: leash run" in lines


def test_comments_stay(project):
    full = (project / "examples/own-data.yaml").read_text()
    try_out(project, ["people #1"])
    written = (project / "params.yaml").read_text()
    for comment in re.findall("# .*", full):
        assert comment in written


@pytest.mark.parametrize(("names", "path"), [(["my-data"], "my-data"), (["a", "b"], ["a", "b"])])
def test_one_name_is_text_and_several_are_a_list(project, names, path):
    try_out(project, names)
    assert read_yaml(project / "params.yaml")["ingest"]["files"]["path"] == path


@pytest.mark.parametrize(
    ("examples", "context", "answer", "batch"),
    [
        (rows(30, 960), 384, 96, 16),  # 2.5 bytes a token
        (rows(40, 961) + rows(20, 960), 384, 96, 16),
        (rows(41, 961) + rows(19, 960), 768, 192, 8),
        (rows(30, 1921), 1536, 384, 4),
        (rows(30, 300) + rows(30, 961, "demonstration"), 768, 192, 8),
        (rows(30, 300) + rows(30, 9000, tie=True), 384, 96, 16),
        (rows(30, 900, answer=250), 384, 128, 16),  # 1.25 times 100 tokens, in steps of 32
        (rows(30, 900, answer=800), 384, 192, 16),
    ],
)
def test_lengths_follow_the_data(project, examples, context, answer, batch):
    try_out(project, examples=examples)
    params = parse(Params, read_yaml(project / "params.yaml"))
    assert params.base.scratch.context == params.sft.max_tokens == params.reward.max_tokens == context
    assert params.ppo.max_new_tokens == params.evaluate.max_new_tokens == answer
    assert (params.sft.batch_size, params.reward.batch_size) == (batch, batch // 2)


def test_steps_do_not_depend_on_the_number_of_rows():
    assert small_values(rows(20, 300))["sft.epochs"] == 89, "18 rows are more than one batch"
    assert small_values(rows(200_000, 300))["sft.epochs"] == 0.018, "100 steps of 16 rows, of 90,000"
    found = small_values(rows(400, 300) + rows(2000, 300, "demonstration"))
    assert (found["sft.epochs"], found["reward.epochs"]) == (0.89, 0.95), "SFT takes the demonstrations"
    found = small_values(rows(1400, 300) + rows(2000, 300, "demonstration"))
    assert (found["sft.epochs"], found["reward.epochs"]) == (1.8, 0.86), "many prompts are not shared"


@pytest.mark.parametrize(
    ("examples", "says"),
    [
        (rows(30, 300, "demonstration"), "the data have no pairs"),
        (rows(30, 300, tie=True), "the data have no pairs"),
        (rows(19, 300), "19 pairs are too few for --try: 20 that fit into 384 tokens are needed"),
        (rows(21, 3841) + rows(9, 300), "more than two thirds of the rows have more than about 1,536 tokens"),
    ],
)
def test_data_for_which_a_quick_try_makes_no_sense_are_refused_in_one_line(project, examples, says):
    before = (project / "params.yaml").read_bytes()
    with pytest.raises(UserError, match=says) as refusal:
        try_out(project, examples=examples)
    assert "\n" not in str(refusal.value)
    assert (project / "params.yaml").read_bytes() == before


def test_an_edit_that_git_does_not_have_is_kept(project):
    path = project / "params.yaml"
    edited = path.read_text().replace("seed: 1", "seed: 2", 1)
    path.write_text(edited)
    with pytest.raises(UserError, match=r"params\.yaml: has changes that are not in git.*git checkout params\.yaml"):
        try_out(project)
    assert path.read_text() == edited
    subprocess.run(["git", "-C", str(project), "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qam", "b"])
    try_out(project)
    assert path.read_text() != edited


def test_an_edited_quick_try_is_kept_and_another_one_is_replaced(project):
    path = project / "params.yaml"
    try_out(project, ["monday"])
    try_out(project, ["tuesday"])
    assert read_yaml(path)["ingest"]["files"]["path"] == "tuesday"
    edited = path.read_text().replace("steps: 6 ", "steps: 60")
    assert edited != path.read_text()
    path.write_text(edited)
    with pytest.raises(UserError, match="has changes that are not in git"):
        try_out(project)
    assert path.read_text() == edited


def test_files_of_examples_and_a_missing_file_are_replaced_also_without_git(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for name in (None, "own-data.yaml", "tiny.yaml"):
        if name:
            shutil.copyfile(ROOT / "examples" / name, tmp_path / "params.yaml")
        try_out(tmp_path)
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    with pytest.raises(UserError, match="has changes that are not in git"):
        try_out(tmp_path)
