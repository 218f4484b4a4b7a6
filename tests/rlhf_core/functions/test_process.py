"""Reward functions in their process: what they receive and return, every way in which they fail, and how they end."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_core.data.chat import Conversation, prompt_id
from rlhf_core.data.scorer import Answers
from rlhf_core.errors import UserError
from rlhf_core.functions.process import AT_ONCE, RewardFunction

Make = Callable[..., RewardFunction]
ONE_BY_ONE = "def score(prompts, responses, rows):\n    return [one(r) for r in responses]\n"
"""The text of a file that defines `one(response)` besides."""


def asked(count: int) -> list[Conversation]:
    return [[{"role": "user", "content": f"What is {number} + 1?"}] for number in range(count)]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """make(text, name="mine.py", seconds=…, memory_mb=…) -> the function of a file with this text."""
    made: list[RewardFunction] = []

    def write(text: str, name: str = "mine.py", seconds: float = 20.0, memory_mb: int = 1024) -> RewardFunction:
        path = tmp_path / "rewards" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        made.append(RewardFunction(tmp_path / "rewards", name, seconds, memory_mb))
        return made[-1]

    yield write
    for function in made:
        function.close()


def call(function: RewardFunction, responses: list[str], rows: list[dict[str, Any]] | None = None) -> list[float]:
    return function(Answers(asked(len(responses)), responses, rows=rows)).total


def test_a_function_receives_prompts_texts_and_rows_and_its_numbers_come_back_exactly(make: Make) -> None:
    text = (
        "def score(prompts, responses, rows):\n"
        "    assert prompts[0] == [{'role': 'user', 'content': 'What is 0 + 1?'}]\n"
        "    return [len(r) / 3 + row['weight'] for r, row in zip(responses, rows)]\n"
    )
    assert call(make(text), ["a", "ü\ud800"], [{"weight": 0.1}, {"weight": -2}]) == [1 / 3 + 0.1, 2 / 3 - 2]


@pytest.mark.parametrize("count", [0, 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE])
def test_scores_are_in_the_order_of_the_answers_for_any_number_of_them(make: Make, count: int) -> None:
    function = make("def score(prompts, responses, rows):\n    return tuple(int(r) for r in responses)\n")
    assert call(function, [str(number) for number in range(count)]) == list(range(count))


def test_true_and_numbers_of_numpy_are_numbers(make: Make) -> None:
    text = "import numpy\ndef score(prompts, responses, rows):\n    return [True, *numpy.float32([0.5, 2])]\n"
    assert call(make(text), ["a", "b", "c"]) == [1.0, 0.5, 2.0]


def test_the_process_starts_once_and_is_kept(make: Make) -> None:
    function = make("import os\ndef score(prompts, responses, rows):\n    return [os.getpid()] * len(responses)\n")
    first = call(function, ["a"])
    started = time.monotonic()
    assert all(call(function, ["a"]) == first for _ in range(100))
    assert time.monotonic() - started < 2, "a call does not start an interpreter"


def test_prints_go_to_stderr_and_standard_input_is_empty(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    text = (
        "import sys\n"
        "def score(prompts, responses, rows):\n"
        "    print('{\"scores\": [9]}', flush=True)\n"
        "    return [len(sys.stdin.read())] * len(responses)\n"
    )
    assert call(make(text), ["a"]) == [0.0]
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", '{"scores": [9]}\n')


def test_sets_are_in_the_same_order_in_every_process_and_no_bytecode_is_left(make: Make, tmp_path: Path) -> None:
    text = "def score(prompts, responses, rows):\n    return [hash(r) % 1000 for r in responses]\n"
    first = call(make(text), ["one", "two"])
    assert call(make(text), ["one", "two"]) == first
    assert [path.name for path in (tmp_path / "rewards").iterdir()] == ["mine.py"]


def test_a_file_can_import_a_file_beside_it_and_torch_is_not_loaded(make: Make) -> None:
    make("ONE = 1.0\n", "helpers.py")
    text = (
        "import sys\nfrom helpers import ONE\n"
        "def score(p, responses, r): return [ONE + ('torch' in sys.modules)] * len(responses)\n"
    )
    assert call(make(text), ["a"]) == [1.0]


FAILURES = {
    "def one(r): return 1 / (r != 'bad')": r"ZeroDivisionError: division by zero \(line 1\)",
    "def one(r): return float('nan') if r == 'bad' else 1": "returned nan, not a finite number",
    "def one(r): return 10 ** 400 if r == 'bad' else 1": "OverflowError: int too large to convert to float",
    "def one(r): return None if r == 'bad' else 1": r"returned NoneType \(None\), not a number",
    "def one(r): return 'a' if r == 'bad' else 1": r"returned str \('a'\), not a number",
    "import os\ndef one(r): return os._exit(3) if r == 'bad' else 1": "its process ended with exit code 3",
    "import os\ndef one(r): return os.abort() if r == 'bad' else 1": "its process was killed by SIGABRT",
    "import sys\ndef one(r): return sys.exit() if r == 'bad' else 1": "SystemExit",
    "def one(r): return len(bytearray(2 ** 33)) if r == 'bad' else 1": "needs more memory than runtime.functions",
    "def one(r): return {}['x'] if r == 'bad' else 1": r"KeyError: 'x' \(line 1\); the columns of its row: none",
}


@pytest.mark.parametrize("definition", FAILURES)
def test_a_failure_names_term_answer_prompt_and_what_to_do(make: Make, definition: str) -> None:
    function = make(f"{definition}\n{ONE_BY_ONE}")
    responses = ["good"] * (AT_ONCE + 5)
    responses[AT_ONCE + 2] = "bad"
    name = prompt_id(asked(AT_ONCE + 3)[-1])
    place = rf"answer {AT_ONCE + 3} of {AT_ONCE + 5}, to prompt {name} \('What is {AT_ONCE + 2} \+ 1\?'\)"
    where = f"^scorer: mine.py: {place}: "
    with pytest.raises(UserError, match=f"{where}{FAILURES[definition]}.*; correct rewards/mine.py$") as caught:
        call(function, responses)
    assert "\n" not in str(caught.value)
    assert call(function, ["good"]) == [1.0], "the next call starts a new process"


@pytest.mark.parametrize("loop", ["while True: pass", "import re; re.match('(a+)+$', 'a' * 40 + 'b')"])
def test_a_call_that_takes_too_long_is_ended_and_names_the_answer(make: Make, loop: str) -> None:
    function = make(f"def one(r):\n    if r == 'bad':\n        {loop}\n    return 1\n{ONE_BY_ONE}", seconds=1)
    started = time.monotonic()
    with pytest.raises(
        UserError, match=r"answer 2 of 3, .* no result within 1 s \(runtime.functions.timeout_seconds\)"
    ):
        call(function, ["good", "bad", "good"])
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("return []", "answer 1 of 3, .* returned 0 scores for 1 answer;"),
        ("return 1.0", "answer 1 of 3, .* returned float, not a list of numbers"),
        ("return [1.0] * min(2, len(responses))", "returned 2 scores for 3 answers in a call, .* must not depend"),
    ],
)
def test_another_number_of_scores_is_refused(make: Make, text: str, said: str) -> None:
    with pytest.raises(UserError, match=f"^scorer: mine.py: .*{said}"):
        call(make(f"def score(p, responses, r): {text}"), ["a", "b", "c"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def score(:", r"cannot be imported: SyntaxError: invalid syntax \(line 1\)"),
        ("import nothing_of_this_name", r"cannot be imported: ModuleNotFoundError: .* \(line 1\)"),
        ("raise SystemExit(0)", "cannot be imported: SystemExit"),
        ("while True: pass", "no result within 1 s"),
        ("x = bytearray(2 ** 33)", "cannot be imported: needs more memory than runtime.functions.memory_mb"),
        ("score = 3", r"has no function `score\(prompts, responses, rows\)`"),
    ],
)
@pytest.mark.parametrize("responses", [[], ["a"]])
def test_a_file_that_gives_no_function_is_refused(make: Make, text: str, said: str, responses: list[str]) -> None:
    with pytest.raises(UserError, match=f"^scorer: mine.py: {said}.*; correct rewards/mine.py$"):
        call(make(text, seconds=1), responses)


def test_a_missing_file_and_a_link_that_leads_out_are_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "rewards").mkdir()
    with pytest.raises(UserError, match=r"scorer: none\.py: the file does not exist"):
        RewardFunction(tmp_path / "rewards", "none.py", 5, 512)(Answers([], []))
    (tmp_path / "out.py").write_text("")
    (tmp_path / "rewards/link.py").symlink_to(tmp_path / "out.py")
    with pytest.raises(UserError, match=r"link.py: a link that leads out of rewards/"):
        RewardFunction(tmp_path / "rewards", "link.py", 5, 512)


CHILDREN = """
import subprocess, sys
started = []
def score(prompts, responses, rows):
    started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]))
    return [started[0].pid] * len(responses)
"""


def ended(pid: int) -> bool:
    """Within five seconds."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_closing_ends_the_processes_that_the_function_has_started(make: Make) -> None:
    function = make(CHILDREN)
    (pid,) = call(function, ["a"])
    assert psutil.pid_exists(int(pid))
    function.close()
    assert ended(int(pid))


def test_they_end_when_the_requests_end_before_the_input(make: Make) -> None:
    """A stage that is killed closes both, in either order."""
    function = make(CHILDREN)
    (pid,) = call(function, ["a"])
    assert function._process is not None
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), function._process.requests)
    assert ended(int(pid))


@pytest.mark.parametrize("how", ["sys.exit()", "os.kill(os.getpid(), 9)"])
def test_they_end_with_the_stage_even_if_it_is_killed(make: Make, tmp_path: Path, how: str) -> None:
    make(CHILDREN)
    stage = (
        "import os, sys\nfrom pathlib import Path\nfrom rlhf_core.data.scorer import Answers\n"
        "from rlhf_core.functions.process import RewardFunction\n"
        f"function = RewardFunction(Path({str(tmp_path / 'rewards')!r}), 'mine.py', 20, 1024)\n"
        "print(int(function(Answers([[]], ['a'])).total[0]), flush=True)\n"
        f"{how}\n"
    )
    with subprocess.Popen([sys.executable, "-c", stage], stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
    assert ended(pid)


def test_a_call_that_is_running_ends_with_a_stage_that_is_killed(make: Make, tmp_path: Path) -> None:
    """It does not read its requests, so only the end of the input ends it."""
    make(
        "import os, sys, time\ndef score(*_):\n"
        "    print(os.getpid(), file=sys.stderr, flush=True)\n    time.sleep(100)\n"
    )
    stage = (
        "from pathlib import Path\nfrom rlhf_core.data.scorer import Answers\n"
        "from rlhf_core.functions.process import RewardFunction\n"
        f"function = RewardFunction(Path({str(tmp_path / 'rewards')!r}), 'mine.py', 100, 1024)\n"
        "function(Answers([[]], ['a']))\n"
    )
    with subprocess.Popen([sys.executable, "-c", stage], stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stderr is not None
        pid = int(process.stderr.readline())
        process.kill()
        assert ended(pid)
