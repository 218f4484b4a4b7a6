"""A hundred thousand preference pairs (44 MB), exhaustively a million: memory of the stages that read them raw,
and of the reader of later stages."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rlhf_core.data.chat import Conversation, prompt_id
from tasks.datasets.jsonl import write_jsonl

if TYPE_CHECKING:
    from tests.conftest import Project

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.chosen("100000"),
    pytest.mark.parametrize(("rows", "bound"), [(100_000, 0.45), (1_000_000, 2.5)], ids=["100000", "1000000"]),
]
"""`bound` is in GiB of resident memory."""

ROOT = Path(__file__).resolve().parents[2]

STAGE = """
from tasks.stage.run import main

try:
    main(["{name}"])
except SystemExit as left:
    assert not left.code
"""
LOAD = """
from tasks.schemas.validation import load

path = "data/ingest/pairs.jsonl"
print(len(load(pathlib.Path(), [path])[path]), "rows")
"""
PEAK = """
status = pathlib.Path("/proc/self/status")
if status.exists():  # ru_maxrss would begin with what the parent held
    print(next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM")))
else:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1))
"""


def peak_gib(root: Path, work: str) -> float:
    """The most memory that a process held which did this work at the root of a project."""
    code = f"import pathlib, resource, runpy, sys\n{work}\n{PEAK}"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.splitlines()[-1]) / 2**20


def dialogues(rows: int) -> Iterator[tuple[Conversation, str, str]]:
    """Prompt of three turns, chosen and rejected answer; each prompt another one."""
    draw = random.Random(7)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(4000)]

    def say(count: int) -> str:
        return " ".join(draw.choices(words, k=count))

    for row in range(rows):
        turns = zip(("user", "assistant", "user"), (f"{say(10)} {row}?", say(8), say(5)), strict=True)
        yield [{"role": role, "content": text} for role, text in turns], say(15), say(15)


def transcript(prompt: Conversation) -> str:
    """The prompt in the form of Anthropic's HH data."""
    speakers = {"user": "Human", "assistant": "Assistant"}
    return "".join(f"\n\n{speakers[turn['role']]}: {turn['content']}" for turn in prompt) + "\n\nAssistant:"


@pytest.fixture
def many(project: "Project", rows: int) -> "Project":
    """A project with so many pairs of the user's."""
    file = project.root / "data/raw/set/train.jsonl"
    file.parent.mkdir(parents=True)
    pairs = dialogues(rows)
    write_jsonl(
        file, ({"prompt": transcript(p), "chosen": f" {good}", "rejected": f" {bad}"} for p, good, bad in pairs)
    )
    project.use_files()
    return project


def lines_of(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def test_the_stages_that_read_raw_data_stay_lean(many: "Project", rows: int, bound: float) -> None:
    checked, peak = (peak_gib(many.root, STAGE.format(name=name)) for name in ("check_data", "ingest"))
    shares = {"demonstrations": 0.45, "preference_prompts": 0.27, "pairs": 0.27, "ppo_prompts": 0.18, "heldout": 0.1}
    found = {name: lines_of(many.root / f"data/ingest/{name}.jsonl") for name in (*shares, "dropped")}
    assert found == {name: round(rows * part) for name, part in shares.items()} | {"dropped": 0}
    assert max(checked, peak) < bound, f"{checked:.2f} and {peak:.2f} GiB"


def test_the_next_reader_stays_lean(tmp_path: Path, rows: int, bound: float) -> None:
    """What each stage does with each of its datasets, pandera's checks among it."""
    pairs = (
        {"prompt_id": prompt_id(prompt), "prompt": prompt, "chosen": good, "rejected": bad, "split": "train"}
        for prompt, good, bad in dialogues(rows)
    )
    write_jsonl(tmp_path / "data/ingest/pairs.jsonl", pairs)
    peak = peak_gib(tmp_path, f"sys.path.insert(0, {str(ROOT)!r})\n{LOAD}")
    assert peak < bound, f"{peak:.2f} GiB"
