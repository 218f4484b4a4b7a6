"""Does PPO work on this machine's GPU, how fast, and in how much memory?

    python benchmarks/gpu_check.py [--minutes 8] [--out gpu_check] [--only NAME …]

Each check of the table below is a process of its own with a time limit. They run in this order until the minutes are
over, on a CPU two side by side; what failed or did not run is a row with its reason. Plan and measurement of memory are
compared after the last check. The models have random weights, of real
sizes on a GPU and of toy size on a CPU. Needs `rlhf_core` and its libraries only, and no network. Writes
gpu_check.json, gpu_check.md and a log of each check to the folder --out. Exit code 1 if a check failed.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))  # the processes of the checks import this module before rlhf_core
PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"
SIDE_BY_SIDE = 2
"""Checks at a time on a CPU, where their speed says nothing; on a GPU one after another."""
SHORTEST = 10.0
"""Seconds below which no check is started."""
PLAN_TOLERANCE = 0.2
"""Largest relative difference between planned and measured peak memory."""
PHASES = ("sampling", "reading", "scoring", "update")
"""Of a PPO step. `reading`: log-probabilities and values of the responses by policy, reference and critic."""


@dataclass(frozen=True)
class Case:
    """A check: a row of the table."""

    name: str
    model: str = "0.5B"
    """Shape of the policy, and of the separate critic: a name of `gpu_trainer.SHAPES`."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the block `ppo` that differ from those of `setups.py`."""
    check: str = "step"
    """What is run: a name of `gpu_case.CHECKS`."""
    seconds: float = 90.0
    """Time limit."""
    reward: str = ""
    """Shape of the reward model, if it is not the policy's."""
    needs: str = ""
    """A package, or a package with its version, without which the check does not run."""

    @property
    def log(self) -> str:
        """Name of the file with what its process prints."""
        return f"{self.name.replace(',', '').replace(':', '').replace(' ', '-')}.log"


BF16 = {"precision": "bfloat16"}
SHARED = {"critic": {"kind": "shared"}}
LORA = {"lora": {"rank": 16}}
GRPO = {
    "advantage": "grpo",
    "samples_per_prompt": 4,
    "whiten_advantages": False,
    "kl": {"penalty": "loss", "estimator": "k3"},
}

CASES = (
    Case("float32"),
    Case("bfloat16", changes=BF16),
    Case("gradient, bfloat16", changes=BF16, check="gradient"),
    Case("same bytes", changes=SHARED, check="bytes", seconds=200),
    Case("same bytes, bfloat16", changes=SHARED | BF16, check="bytes", seconds=200),
    Case("8B, LoRA", "8B", {**BF16, **SHARED, **LORA, "gradient_checkpointing": True}, seconds=150, reward="0.5B"),
    Case("gradient, checkpointing", changes={"gradient_checkpointing": True}, check="gradient"),
    Case("1.5B, shared critic", "1.5B", SHARED | BF16),
    Case("LoRA", changes=LORA | BF16),
    Case("GRPO", changes=GRPO | BF16),
    Case("deterministic: false", changes=BF16 | {"deterministic": False}),
    Case("nf4, LoRA", changes=BF16 | SHARED | {"lora": {"rank": 16, "quantize": "nf4"}}, needs="bitsandbytes"),
)
"""The most important first."""


def main() -> int:
    """Run the checks, and print and write their table. Returns the exit code."""
    options = arguments().parse_args()
    chosen = [case for case in CASES if options.only is None or case.name in options.only]
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    until = time.monotonic() + 60.0 * options.minutes
    print("\n".join(RESULTS_HEAD), flush=True)
    gpu = on_gpu()
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        each = map if gpu else pool.map
        for row in each(lambda case: run_case(case, until - time.monotonic(), out), chosen):
            rows.append(row)
            print(result_line(row), flush=True)
            write(out, rows)
    for case, row in zip(chosen, rows, strict=True):
        if "peak_bytes" in row["figures"] and add_plan(row, plan_of(case, gpu), gpu):
            print(result_line(row), flush=True)
    write(out, rows)
    print("\n" + "\n".join(speed_table(rows)) + "\n\n" + summary(rows))
    return int(any(row["result"] == FAILED for row in rows))


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all checks together")
    parser.add_argument("--out", default="gpu_check", help="folder of the results")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[case.name for case in CASES], help="these checks")
    return parser


def run_case(case: Case, seconds_left: float, out: Path) -> dict[str, Any]:
    """The row of a check: name, result, seconds, reason (empty where it passed), figures and environment."""
    row = {"name": case.name, "result": NOT_RUN, "seconds": 0.0, "reason": "", "figures": {}, "environment": {}}
    if reason := missing(case.needs):
        return row | {"reason": reason}
    if seconds_left < SHORTEST:
        return row | {"reason": "no time left; use --minutes or --only"}
    since, limit = time.monotonic(), min(case.seconds, seconds_left)
    with tempfile.TemporaryDirectory(dir=out, prefix=".") as folder:
        code = run_child(case, Path(folder), limit, out / case.log)
        result = Path(folder) / "result.json"
        found = json.loads(result.read_text(encoding="utf-8")) if code == 0 and result.exists() else {}
    row["seconds"] = time.monotonic() - since
    if code is None and limit < case.seconds:
        return row | {"reason": f"stopped after {limit:.0f} s, when the minutes were over; use --minutes or --only"}
    if not found:
        reason = f"stopped at its limit of {limit:.0f} s" if code is None else last_line(out / case.log, code)
        return row | {"result": FAILED, "reason": f"{reason}; see {case.log}"}
    result_of = {"result": FAILED if found["problem"] else PASSED, "reason": one_line(found["problem"] or "")}
    return row | result_of | {"figures": found["figures"], "environment": found["environment"]}


def missing(needs: str) -> str:
    """Why a package, or its version, is not there; empty where it is."""
    if not needs:
        return ""
    requirement = Requirement(needs)
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is not installed"
    return "" if requirement.specifier.contains(found, prereleases=True) else f"needs {needs}; installed is {found}"


def on_gpu() -> bool:
    """Whether there is a GPU."""
    from torch.cuda import is_available

    return is_available()


def plan_of(case: Case, gpu: bool) -> dict[str, Any]:
    """The planned peak memory of a check: `bytes`, None where it is not planned, with a `reason`."""
    if case.check != "step":
        return {"bytes": None, "reason": "not planned"}
    from gpu_plan import planned_bytes

    from rlhf_core.errors import UserError

    try:
        return {"bytes": planned_bytes(case, gpu), "reason": ""}
    except UserError as error:
        return {"bytes": None, "reason": str(error)}


def add_plan(row: dict[str, Any], plan: Mapping[str, Any], gpu: bool) -> bool:
    """Add the planned memory to the figures of a check. On a GPU a check that passed fails if its peak does not fit;
    returns whether it does. The memory of a process with a toy model is mostly that of its libraries."""
    figures = row["figures"]
    figures |= {"planned_bytes": plan["bytes"], "not_planned": one_line(plan["reason"])}
    problem = memory_problem(figures["peak_bytes"], plan["bytes"]) if gpu and row["result"] == PASSED else None
    if problem is not None:
        row |= {"result": FAILED, "reason": problem}
    return problem is not None


def memory_problem(peak: int, planned: int | None) -> str | None:
    """Why the peak does not fit its plan; None where it does, or is not compared."""
    if planned is None or abs(peak - planned) <= PLAN_TOLERANCE * planned:
        return None
    return f"the peak of memory is {peak / planned:.2f} times the planned one, allowed is 1 ± {PLAN_TOLERANCE:g}"


def run_child(case: Case, folder: Path, limit: float, log: Path) -> int | None:
    """Run a check in a process group of its own; its exit status, None where it was killed at the limit, in seconds."""
    command = [sys.executable, str(HERE.with_name("gpu_case.py")), json.dumps(asdict(case)), str(folder)]
    with log.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            return child.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def last_line(log: Path, code: int | None) -> str:
    """How a process ended, with the last line that it printed."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"the process ended with status {code}: {one_line(lines[-1] if lines else 'it printed nothing')}"


def one_line(text: str) -> str:
    """The text without line breaks, cut after 300 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:299] + "…"


RESULTS_HEAD = ["| check | result | seconds | finding |", "|---|---|---|---|"]


def result_line(row: Mapping[str, Any]) -> str:
    """A row of the table of results."""
    finding = (row["reason"] or row["figures"].get("finding", "")).replace("|", "\\|")
    return f"| {row['name']} | {row['result']} | {row['seconds']:.0f} | {finding} |"


MEASURED_HEAD = ("check", "model", "precision", "peak GiB (reserved)", "planned GiB")


def speed_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Peak memory and tokens per second of the checks that measured them, in lines of Markdown."""
    head = [*MEASURED_HEAD, *(f"{phase}, tokens/s" for phase in PHASES)]
    lines = [table_line(head), "|---" * len(head) + "|"]
    for row in rows:
        figures = row["figures"]
        if "phases" in figures:
            phases = [speed(figures["phases"][phase]) for phase in PHASES]
            about = [row["name"], figures["model"], figures["precision"]]
            lines.append(table_line([*about, *memory(figures), *phases]))
    return lines


def table_line(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def memory(figures: Mapping[str, Any]) -> tuple[str, str]:
    """Peak with reserved memory, and planned peak."""
    peak, reserved, planned = (figures.get(name) for name in ("peak_bytes", "reserved_bytes", "planned_bytes"))
    return gib(peak) + (f" ({gib(reserved)})" if reserved else ""), gib(planned) if planned else "not compared"


def gib(size: float) -> str:
    """Bytes in GiB, with two significant digits where it is small."""
    return f"{size / 2**30:.1f}" if size >= 2**30 else f"{size / 2**30:.2g}"


def speed(phase: Mapping[str, float | None]) -> str:
    """Tokens per second of a phase, with its share of the GPU's peak where that is known."""
    share = phase["share_of_peak"]
    return f"{phase['tokens_per_s']:,.0f}" + (f" ({share:.1%})" if share is not None else "")


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many checks passed, failed and did not run."""
    results = [row["result"] for row in rows]
    return ", ".join(f"{results.count(result)} {result.lower()}" for result in (PASSED, FAILED, NOT_RUN))


def environment_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the first check that ended by itself has run on."""
    return next((dict(row["environment"]) for row in rows if row["environment"]), {})


def write(out: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows so far: gpu_check.json, and gpu_check.md for readers."""
    found = environment_of(rows)
    bare = [{key: value for key, value in row.items() if key != "environment"} for row in rows]
    content = json.dumps({"environment": found, "rows": bare}, indent=1, ensure_ascii=False)
    (out / "gpu_check.json").write_text(content + "\n", encoding="utf-8")
    where = ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)
    parts = [["# GPU check", where], [*RESULTS_HEAD, *map(result_line, rows)], speed_table(rows), [summary(rows)]]
    (out / "gpu_check.md").write_text("\n\n".join("\n".join(part) for part in parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
