"""The demo for several seeds, each in a fresh clone of what is committed, and a table of the results.

    python benchmarks/seeds.py --seeds 1 2 3

Prints Markdown (the README's table), each run's seconds, and whether the run with the committed parameters made the
committed dvc.lock again. Not part of the tests: three whole runs take a while.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]

COLUMNS = {
    "reward model accuracy": lambda m: m["reward"]["heldout_accuracy"],
    "gold SFT": lambda m: m["evaluate"]["gold_sft"],
    "gold policy": lambda m: m["evaluate"]["gold_policy"],
    "win rate": lambda m: m["evaluate"]["win_rate"],
    "95% interval": lambda m: m["evaluate"]["win_rate_ci95"],
    "KL, nats": lambda m: m["evaluate"]["kl_per_sequence"],
    "without eos": lambda m: m["evaluate"]["missing_eos_share"],
    "prompts": lambda m: m["evaluate"]["prompts"],
}


def main() -> None:
    """Run every seed and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    seeds = parser.parse_args().seeds
    rows = []
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="leash-seed-") as folder:
            clone = Path(folder) / "clone"
            metrics, seconds = run_seed(seed, clone)
            if not _differs(clone, "params.yaml"):
                same = "differs from" if _differs(clone, "dvc.lock") else "is byte for byte"
                print(f"seed {seed}: its dvc.lock {same} the committed one", file=sys.stderr)
        rows.append((seed, metrics, seconds))
        print(f"seed {seed}: {seconds:.0f} s", file=sys.stderr, flush=True)
    print(table(rows))


def run_seed(seed: int, clone: Path) -> tuple[dict[str, dict[str, object]], float]:
    """One `dvc repro` from nothing with both seeds set; the metrics of every stage, and wall-clock seconds."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    yaml = YAML()
    path = clone / "params.yaml"
    params = yaml.load(path.read_text(encoding="utf-8"))
    if (params["seed"], params["ingest"]["seed"]) != (seed, seed):
        params["seed"] = params["ingest"]["seed"] = seed
        with path.open("w", encoding="utf-8") as file:
            yaml.dump(params, file)
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "dvc", "repro"],
        cwd=clone,
        check=True,
        env=os.environ | {"PATH": search},
        stdout=sys.stderr,
    )
    seconds = time.monotonic() - start
    return {file.stem: json.loads(file.read_text()) for file in (clone / "metrics").glob("*.json")}, seconds


def _differs(clone: Path, name: str) -> bool:
    """Whether a file of the clone is no longer what was committed."""
    return subprocess.run(["git", "diff", "--quiet", "--", name], cwd=clone).returncode != 0


def table(rows: list[tuple[int, dict[str, dict[str, object]], float]]) -> str:
    """Markdown, a row a seed."""
    head = ["seed", *COLUMNS, "seconds"]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for seed, metrics, seconds in rows:
        cells = [str(seed), *(_text(read(metrics)) for read in COLUMNS.values()), f"{seconds:.0f}"]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def _text(value: object) -> str:
    if isinstance(value, list):
        return " – ".join(_text(part) for part in value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
