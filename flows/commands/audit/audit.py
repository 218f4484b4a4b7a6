"""Measures the `ppo` block of a parameter file on problems whose optimum is known. Reads parameters, writes no file."""

import sys
import time
from pathlib import Path
from typing import Any

from rlhf_core.inspect.audit.problems import Problem
from rlhf_core.inspect.audit.run import audit
from tasks.params.all import Params
from tasks.params.loader import PARAMS_FILE, parse, read_yaml

SECONDS = 3.0
"""Between two lines of progress."""


def audit_file(path: Path = PARAMS_FILE) -> dict[str, Any]:
    """The audit of the file's block `ppo` and seed; progress goes to stderr. Raises
    UserError for a file that is no valid parameter file."""
    params = parse(Params, read_yaml(path), file=path)
    return audit(params.ppo, params.seed, _Progress())


class _Progress:
    """A line on stderr every few seconds."""

    def __init__(self) -> None:
        self.last = 0.0

    def __call__(self, problem: Problem, step: int, steps: int) -> None:
        now = time.monotonic()
        if now - self.last >= SECONDS or step == steps:
            self.last = now
            print(f"audit {problem.name} step {step}/{steps}", file=sys.stderr, flush=True)
