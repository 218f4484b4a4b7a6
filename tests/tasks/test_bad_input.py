"""Bad input: one line on stderr that says what is wrong, exit code 2, and nothing of an earlier run lost."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from rlhf_core.data.chat import prompt_id
from rlhf_core.data.tokenizer import encode_prompt, load_tokenizer

if TYPE_CHECKING:
    from tests.conftest import Ended, Project

Main = Callable[["Project", str], "Ended"]

BAD_PARAMETERS = [
    ("ppo.clip_ration", 0.2, "ppo", "params.yaml: ppo.clip_ration: unknown parameter; did you mean clip_ratio?"),
    ("ppo.steps", "four", "ppo", "params.yaml: ppo.steps: Input should be a valid integer (got 'four')"),
    ("ppo.clip_ratio", -1, "ppo", "params.yaml: ppo.clip_ratio: Input should be greater than 0 (got -1)"),
    ("ppo.top_p", 0.9, "ppo", "params.yaml: ppo: top_p is refused in rollouts: "),
    (
        "preferences.samples_per_prompt",
        1,
        "preferences",
        "params.yaml: preferences.samples_per_prompt: Input should be",
    ),
    (
        "evaluate.max_prompts",
        0,
        "evaluate",
        "params.yaml: evaluate.max_prompts: Input should be greater than or equal to 1",
    ),
    ("base.pad_token", "<|end|>", "base", "params.yaml: base: pad_token must differ from eos_token"),
]


def one_line(ended: Any, stage: str, says: str) -> None:
    """Exit 2 and exactly one line, which begins with the stage and names what is wrong; on a busy machine MLflow may be
    late, and that is said besides."""
    code = ended.returncode if isinstance(ended, subprocess.CompletedProcess) else ended.code
    said = "".join(line for line in ended.stderr.splitlines(keepends=True) if not line.startswith("tracking: "))
    assert code == 2, ended.stderr
    assert said.startswith(f"{stage}: {says}"), ended.stderr
    assert said.count("\n") == 1
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("name", "value", "stage", "says"), BAD_PARAMETERS, ids=lambda part: str(part)[:20])
def test_a_bad_parameter_stops_its_stage_and_check(
    project: "Project", stage_main: Main, name: str, value: Any, stage: str, says: str
) -> None:
    project.set(name, value)
    one_line(stage_main(project, stage), stage, says)
    one_line(stage_main(project, "check"), "check", says)


@pytest.mark.slow
def test_the_command_prints_it(project: "Project") -> None:
    """The other tests run a stage's main function within this process, to import torch once."""
    project.set("ppo.clip_ratio", -1)
    ended = project.stage("ppo")
    one_line(ended, "ppo", "params.yaml: ppo.clip_ratio: Input should be greater than 0 (got -1)")
    assert ended.stdout == ""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_dvc_repro_with_a_bad_parameter_keeps_every_output(finished: "Project") -> None:
    before = finished.outputs()
    assert len(before) > 50
    for name, value, _, says in BAD_PARAMETERS[:5:2]:
        good = (finished.root / "params.yaml").read_bytes()
        finished.set(name, value)
        done = finished.run(sys.executable, "-m", "dvc", "repro")
        assert done.returncode != 0
        assert f"check: {says}" in done.stderr
        assert finished.outputs() == before, name
        (finished.root / "params.yaml").write_bytes(good)


def test_dvc_repro_without_a_block_keeps_every_output(finished: "Project") -> None:
    before = finished.outputs()
    content = (finished.root / "params.yaml").read_text(encoding="utf-8")
    (finished.root / "params.yaml").write_text(content.replace("\nppo:\n", "\nppi:\n"), encoding="utf-8")
    done = finished.run(sys.executable, "-m", "dvc", "repro")
    assert done.returncode != 0
    assert "check: params.yaml: ppo: missing parameter" in done.stderr
    assert finished.outputs() == before
    (finished.root / "params.yaml").write_text(content, encoding="utf-8")
    assert finished.repro() == []


@pytest.fixture
def raw(project: "Project") -> Callable[[str], "Project"]:
    """A project whose data are a file of the user's: `raw(text)` writes it."""

    def write(text: str) -> "Project":
        (project.root / "data/raw/set").mkdir(parents=True)
        (project.root / "data/raw/set/train.jsonl").write_text(text, encoding="utf-8")
        project.use_files()
        return project

    return write


LINES = [json.dumps({"prompt": f"Question {number}?", "response": "Answer."}) for number in range(1, 31)]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([*LINES[:16], LINES[16][:-2], *LINES[17:]], "data/raw/set/train.jsonl, row 17: broken JSON"),
        ([*LINES[:16], "[1, 2]", *LINES[17:]], "data/raw/set/train.jsonl, row 17: expected a JSON object"),
        ([*LINES[:16], '{"question": "?"}', *LINES[17:]], "data/raw/set/train.jsonl, row 17: "),
        ([], "data/raw/set/train.jsonl: "),
    ],
    ids=["broken JSON", "no object", "missing column", "empty"],
)
def test_bad_rows_of_the_users(raw: Callable[[str], "Project"], stage_main: Main, lines: list[str], says: str) -> None:
    project = raw("".join(line + "\n" for line in lines))
    for stage in ("check_data", "ingest"):
        one_line(stage_main(project, stage), stage, says)


def test_a_folder_of_the_users_that_is_missing(raw: Callable[[str], "Project"], stage_main: Main) -> None:
    project = raw("")
    shutil.rmtree(project.root / "data/raw/set")
    for stage in ("check_data", "ingest"):
        one_line(stage_main(project, stage), stage, "data/raw/set: not found; data/raw is empty. Set ingest.files.path")


DEMONSTRATIONS = "data/ingest/demonstrations.jsonl"
PPO_PROMPTS = "data/ingest/ppo_prompts.jsonl"
HELDOUT = "data/ingest/heldout.jsonl"


def break_row_17(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:16], lines[16][:-3] + "\n", *lines[17:]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (break_row_17, "demonstrations.jsonl, row 17: broken JSON"),
        (lambda text: text.replace('"response"', '"reply"'), "response: missing column (180 rows: 1, 2, 3, 4, 5, …)"),
        (lambda text: text.replace('"response"', '"reply"', 1), "response: missing column (1 row: 1)"),
        (lambda text: "", "demonstrations.jsonl: empty data set, and SFT imitates its answers"),
        (lambda text: text.replace('"user"', '"assistant"'), "prompt: must be a conversation of non-empty turns"),
    ],
    ids=["broken JSON", "missing column", "missing in one row", "empty", "no user"],
)
def test_a_bad_dataset_between_stages(
    finished: "Project", stage_main: Main, edit: Callable[[str], str], says: str
) -> None:
    path = finished.root / DEMONSTRATIONS
    before = finished.outputs()
    path.write_text(edit(path.read_text(encoding="utf-8")), encoding="utf-8")
    ended = stage_main(finished, "sft")
    one_line(ended, "sft", "")
    assert says in ended.stderr
    after = finished.outputs()
    assert after | {DEMONSTRATIONS: before[DEMONSTRATIONS]} == before


@pytest.mark.parametrize("path", [DEMONSTRATIONS, "models/base", "data/check.ok", "tasks/sft.py"])
def test_a_missing_file(finished: "Project", stage_main: Main, path: str) -> None:
    before = finished.outputs()
    (finished.root / path).rename(finished.root / "elsewhere")
    one_line(stage_main(finished, "sft"), "sft", f"{path}: file not found; `dvc repro sft` makes what the stage needs")
    assert finished.outputs().keys() <= before.keys()


@pytest.mark.parametrize(("stage", "path"), [("ppo", PPO_PROMPTS), ("base", DEMONSTRATIONS)])
def test_failure_04_a_leaked_heldout_prompt(finished: "Project", stage_main: Main, stage: str, path: str) -> None:
    leaked = finished.rows("data/ingest/heldout.jsonl")[3]
    rows = finished.rows(path)[:5]
    rows[4] |= {"prompt_id": leaked["prompt_id"], "prompt": leaked["prompt"]}
    finished.write_rows(path, rows)
    before = finished.outputs()
    ended = stage_main(finished, stage)
    one_line(ended, stage, "leaked held-out prompt: ")
    assert f"is also in {path}, row 5 (1 such rows)" in ended.stderr
    assert finished.outputs() == before


def with_long_prompt(project: "Project") -> "Project":
    prompt = [{"role": "user", "content": "What is a good breakfast? " * 40}]
    rows = project.rows(PPO_PROMPTS)[:8]
    rows.insert(2, {"prompt_id": prompt_id(prompt), "prompt": prompt})
    project.write_rows(PPO_PROMPTS, rows)
    return project


def test_a_prompt_longer_than_the_context(finished: "Project", stage_main: Main) -> None:
    before = with_long_prompt(finished).outputs()
    ended = stage_main(finished, "ppo")
    one_line(ended, "ppo", f"{PPO_PROMPTS}, row 3: ")
    assert "and 24 new ones are longer than the 96 that fit; " in ended.stderr
    assert finished.outputs() == before


@pytest.mark.slow
def test_all_long_rows_are_named_before_anything_is_trained(finished: "Project", stage_main: Main) -> None:
    """By `base`, for every dataset: a prompt or an answer that the context does not hold."""
    finished.set("runtime.tracking", False)
    good = {path: (finished.root / path).read_bytes() for path in (DEMONSTRATIONS, PPO_PROMPTS, HELDOUT)}
    for path, column in ((DEMONSTRATIONS, "response"), (PPO_PROMPTS, "prompt"), (HELDOUT, "prompt")):
        rows = finished.rows(path)
        for number in (3, 7, 8):
            text = f"What is a good breakfast {number}? " * 40
            row = rows[number - 1]
            row[column] = text if column == "response" else [{"role": "user", "content": text}]
            row["prompt_id"] = prompt_id(row["prompt"])
        finished.write_rows(path, rows)
        before = finished.outputs()
        ended = stage_main(finished, "base")
        one_line(ended, "base", f"{path}, row 3: ")
        assert f"are longer than the 96 that fit (first of 3 such rows of {len(rows)}); shorten" in ended.stderr
        listed = [line.split(f"{path}, ")[1].split(":")[0] for line in ended.stdout.splitlines() if f"{path}, " in line]
        assert listed == ["row 3", "row 7", "row 8"]
        assert finished.outputs() == before
        (finished.root / path).write_bytes(good[path])


def test_a_prompt_longer_than_the_context_is_dropped_on_demand(finished: "Project", stage_main: Main) -> None:
    finished.set("runtime.tracking", False)
    with_long_prompt(finished)
    finished.set("long_rows", "drop")
    finished.set("ppo.steps", 1)
    assert stage_main(finished, "ppo").code == 0
    assert finished.json("metrics/ppo.json")["prompts_too_long"] == 1


def test_prompts_longer_than_max_prompt_tokens_are_refused_or_left_out(finished: "Project", stage_main: Main) -> None:
    """By PPO, by `select` with PPO's key, and by `evaluate` with its own."""
    finished.set("runtime.tracking", False)
    tokenizer = load_tokenizer(finished.root / "models/sft")
    lengths = sorted(len(encode_prompt(tokenizer, row["prompt"])) for row in finished.rows(PPO_PROMPTS))
    limit = lengths[len(lengths) // 2]
    longer = sum(length > limit for length in lengths)
    assert 0 < longer < len(lengths)
    finished.set("ppo.max_prompt_tokens", limit)
    finished.set("ppo.steps", 1)
    before = finished.outputs()
    ended = stage_main(finished, "ppo")
    one_line(ended, "ppo", f"{PPO_PROMPTS}, row ")
    assert f"longer than the {limit} that fit (first of {longer} such rows" in ended.stderr
    assert "enlarge max_prompt_tokens, or set long_rows: drop" in ended.stderr
    assert finished.outputs() == before
    finished.set("long_rows", "drop")
    assert stage_main(finished, "ppo").code == 0
    assert finished.json("metrics/ppo.json")["prompts_too_long"] == longer
    prompts = finished.json("metrics/select.json")["prompts"]
    assert stage_main(finished, "select").code == 0
    assert finished.json("metrics/select.json")["prompts"] < prompts
    finished.set("evaluate.max_prompt_tokens", 1)
    ended = stage_main(finished, "evaluate")
    one_line(ended, "evaluate", f"{HELDOUT}: none of its ")
    assert "fits into 1 tokens; enlarge max_prompt_tokens" in ended.stderr


def test_a_diverging_run_is_no_crash_to_try_again(finished: "Project", stage_main: Main) -> None:
    finished.set("runtime.tracking", False)
    finished.set("ppo.learning_rate", 1e30)
    before = finished.outputs()
    ended = stage_main(finished, "ppo")
    one_line(ended, "ppo", "")
    assert "lower the learning rate" in ended.stderr
    assert finished.outputs() == before


def test_prompts_that_all_are_too_long(finished: "Project", stage_main: Main) -> None:
    finished.set("runtime.tracking", False)
    finished.set("long_rows", "drop")
    finished.set("ppo.max_new_tokens", 95)
    one_line(stage_main(finished, "ppo"), "ppo", f"{PPO_PROMPTS}: none of its 72 rows fits into 96 tokens")


def test_failure_11_a_tokenizer_whose_pad_is_its_eos(finished: "Project", stage_main: Main) -> None:
    path = finished.root / "models/sft/tokenizer_config.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"pad_token": "<|pad|>"', '"pad_token": "<|end|>"'), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != text
    ended = stage_main(finished, "preferences")
    one_line(ended, "preferences", "")
    assert "pad token equals eos token" in ended.stderr


@pytest.mark.slow
def test_leash_run_reports_the_same_and_keeps_every_output(finished: "Project", prefect_api: str) -> None:
    """A bad parameter; bad data are in tests/faults/test_data.py."""
    before = finished.outputs()
    name, value, _, says = BAD_PARAMETERS[2]
    finished.set(name, value)
    one_line(finished.run(sys.executable, "-m", "flows.cli", "run", PREFECT_API_URL=prefect_api), "error", says)
    assert finished.outputs() == before
