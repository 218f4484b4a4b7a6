"""Reward functions of the user, each in a process of its own with limits on time and memory. The process starts with
the first call and is kept."""

import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_core.data.chat import Conversation, as_text, prompt_id
from rlhf_core.data.scorer import Answers, Scored
from rlhf_core.errors import UserError
from rlhf_core.functions import child

AT_ONCE = 64
"""Answers in a call at most: the limit of time is for so many."""
SHOWN = 60
"""Characters of a prompt in a message."""
MEBIBYTE = 2**20
FIXED = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
"""Environment of the process: the same order of sets in each run, no cache of bytecode beside the file, one thread."""


class _Failed(Exception):
    """A call that gave no scores; `at`: the place of the answer that it concerns, where it is known."""

    def __init__(self, what: str, at: int | None = None) -> None:
        super().__init__(what)
        self.at = at


class _NotLoaded(_Failed):
    """The file gave no function."""


class RewardFunction:
    """The function `score(prompts, responses, rows)` of the file `file` in `folder`, as a `Scorer`.

    Its process has at most `seconds` for loading the file and for each call, and `memory_mb` MiB of address space: the
    limits change no result unless they are reached. `key`: the parameter that names the file, for messages. Raises
    UserError for a link that leads out of the folder."""

    def __init__(self, folder: Path, file: str, seconds: float, memory_mb: int, key: str = "scorer") -> None:
        self.path, self.file, self.key = (folder / file).resolve(), file, key
        self.seconds, self.memory_mb = seconds, memory_mb
        self.name = f"{folder.name}/{file}"
        if not self.path.is_relative_to(folder.resolve()):
            raise UserError(f"{key}: {file}: a link that leads out of {folder.name}/; put the file itself there")
        self._process: _Process | None = None

    def __call__(self, answers: Answers) -> Scored:
        """One finite number for each answer. Raises UserError, naming the answer, where the function fails or reaches
        a limit."""
        scores: list[float] = []
        count = len(answers.texts)
        for start in range(0, max(1, count), AT_ONCE):
            part = answers.at(range(start, min(start + AT_ONCE, count)))
            try:
                scores += self._call(part)
            except _Failed as failure:
                found = self._locate(failure, part)
                self.close()
                raise UserError(self._describe(found, answers, start)) from None
        return Scored(scores)

    def close(self) -> None:
        """End the process, and the processes that it has started."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _describe(self, failure: _Failed, answers: Answers, start: int) -> str:
        """The message for a call whose first answer has the place `start`."""
        about, advice, prompts = f"{self.key}: {self.file}", f"correct {self.name}", answers.prompts
        if failure.at is not None:
            place = start + failure.at
            return f"{about}: answer {place + 1} of {len(prompts)}, to {_shown(prompts[place])}: {failure}; {advice}"
        if isinstance(failure, _NotLoaded) or not prompts:
            return f"{about}: {failure}; {advice}"
        return (
            f"{about}: {failure} in a call, the first answer to {_shown(prompts[start])}; each alone gets a score, "
            f"which must not depend on the others: {advice}"
        )

    def _locate(self, failure: _Failed, answers: Answers) -> _Failed:
        """The failure of the first answer that fails alone: they are scored one by one, within one limit of time. The
        failure itself where none does, or where no function was loaded."""
        if isinstance(failure, _NotLoaded) or failure.at is not None:
            return failure
        until = time.monotonic() + self.seconds
        for place in range(len(answers.texts)):
            try:
                self._call(answers.at([place]), until)
            except _Failed as alone:
                return _Failed(str(alone), place)
        return failure

    def _call(self, answers: Answers, until: float | None = None) -> list[float]:
        """Scores of one call; the process is ended when it does not answer. Raises _Failed."""
        try:
            if self._process is None:
                self._process = _Process(self.path, self.seconds, self.memory_mb)
            rows = [{} for _ in answers.texts] if answers.rows is None else [dict(row) for row in answers.rows]
            request = {"prompts": list(answers.prompts), "responses": list(answers.texts), "rows": rows}
            reply = self._process.exchange(request, until)
        except BaseException:
            self.close()
            raise
        if "error" in reply:
            raise _Failed(reply["error"], reply.get("at"))
        scores: list[float] = reply["scores"]
        return scores


class _Process:
    """A running child: one line of JSON for each line."""

    def __init__(self, path: Path, seconds: float, memory_mb: int) -> None:
        """Start it and load the function. Raises _Failed where that is not possible."""
        if not path.is_file():
            raise _NotLoaded("the file does not exist")
        self.seconds = seconds
        child_reads, self.requests = os.pipe()
        self.replies, child_writes = os.pipe()
        command = [sys.executable, child.__file__, *map(str, (path, child_reads, child_writes, memory_mb * MEBIBYTE))]
        self.process = subprocess.Popen(
            command,
            env=os.environ | FIXED,
            stdin=subprocess.PIPE,
            stdout=2,  # what the function prints must not mix with the stage's own output
            pass_fds=(child_reads, child_writes),
            start_new_session=True,
        )
        os.close(child_reads)
        os.close(child_writes)
        self.end = weakref.finalize(self, _end, self.process, (self.requests, self.replies))
        try:
            ready = self._receive(None)
            if "error" in ready:
                raise _NotLoaded(ready["error"])
        except _Failed as error:
            self.end()
            raise _NotLoaded(str(error)) from None

    def exchange(self, request: Mapping[str, Any], until: float | None) -> dict[str, Any]:
        """The reply to a request. Raises _Failed at the end of the process, or of the time."""
        left = memoryview(json.dumps(request).encode() + b"\n")
        with suppress(BrokenPipeError):  # what has happened to the process is found when it is read
            while left:
                left = left[os.write(self.requests, left) :]
        return self._receive(until)

    def _receive(self, until: float | None) -> dict[str, Any]:
        deadline = time.monotonic() + self.seconds if until is None else until
        poll = select.poll()
        poll.register(self.replies, select.POLLIN)
        data = bytearray()
        while not data.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(1000 * left):
                raise _Failed(f"no result within {self.seconds:g} s (runtime.functions.timeout_seconds)")
            part = os.read(self.replies, MEBIBYTE)
            if not part:
                raise _Failed(self._death())
            data += part
        reply: dict[str, Any] = json.loads(data)
        return reply

    def _death(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(timeout=5)
            if code > 128:
                return f"its process was killed by {signal.Signals(code - 128).name}"
            return f"its process ended with exit code {code}"
        return "its process closed its connection"


def _end(process: "subprocess.Popen[bytes]", pipes: tuple[int, ...]) -> None:
    """Kill the group of the process."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in pipes:
        os.close(pipe)
    if process.stdin is not None:
        process.stdin.close()


def _shown(prompt: Conversation) -> str:
    text = " ".join(as_text(prompt).split())
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
    return f"prompt {prompt_id(prompt)} ({shown!r})"
