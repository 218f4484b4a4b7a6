"""The reward–KL frontier over several training seeds and a few β: PPO's snapshots against the alternatives.

    python benchmarks/frontier.py --seeds 1 2 3 --betas 0.05 0.1 0.2 --out ../frontier

One clone per seed. Its first run is the whole graph; each further β changes `ppo.kl.coef` only and switches the
alternatives off, so that DVC repeats only PPO and the stages after it. A (seed, β) with results in --out is not run
again; --draw only draws. Prints Markdown (PPO's lead at equal KL for each β) and writes three pictures to --out: both
scores over √KL, and the gold score over the tokens trained on and over the samples generated.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import clones
from clones import ROOT
from frontier_pictures import draw
from frontier_points import Runs, gap_table

from tasks.params.methods import BY_NAME

Runner = Callable[[Path, Mapping[str, Any]], float]
"""Runs the graph in a clone with these parameters; seconds."""


def main() -> None:
    """Run what is missing, print the table, draw the pictures."""
    options = arguments().parse_args()
    params = clones.read_params(options.params)
    betas = ordered(options.betas, params["ppo"]["kl"]["coef"])
    runs: Runs = {}
    for seed in options.seeds:
        runs |= run_seed(seed, betas, params, options.out, None if options.draw else clones.reproduce)
    if not runs:
        raise SystemExit(f"{options.out}: no run with these parameters; leave out --draw to make them")
    if len({run.commit for run in runs.values()}) > 1:
        print("these runs are of more than one commit; run.json of each names its own", file=sys.stderr)
    print(gap_table(runs))
    for path in draw(runs, options.out):
        print(path, file=sys.stderr)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--betas", type=float, nargs="+", default=[0.05, 0.1, 0.2], help="values of ppo.kl.coef")
    parser.add_argument("--params", type=Path, default=ROOT / "params.yaml", help="another parameter file")
    parser.add_argument("--out", type=Path, required=True, help="folder of results and pictures")
    parser.add_argument("--draw", action="store_true", help="run nothing; draw what is in --out")
    return parser


def ordered(betas: Sequence[float], own: float) -> list[float]:
    """Distinct values, the parameter file's own β first: the alternatives are trained with it."""
    distinct = list(dict.fromkeys(betas))
    return sorted(distinct, key=lambda beta: beta != own)


def run_seed(seed: int, betas: Sequence[float], params: Mapping[str, Any], out: Path, reproduce: Runner | None) -> Runs:
    """The results of every β, in this order. Results in `out` are read; without `reproduce` nothing is run. The clone
    stays in `out` until all results are there, so that an interrupted sweep continues in it."""
    runs: Runs = {}
    clone = out / "clones" / f"seed-{seed}"
    for number, beta in enumerate(betas):
        wanted = settings(params, seed, beta, alternatives=number == 0)
        kept = out / f"seed-{seed}-beta-{beta:g}"
        found = clones.kept_run(kept, wanted)
        if found is None and reproduce is not None:
            out.mkdir(parents=True, exist_ok=True)
            clones.clone(clone)
            seconds = reproduce(clone, wanted)
            clones.keep(clone, wanted, seconds, kept)
            print(f"seed {seed}, β {beta:g}: {seconds:.0f} s", file=sys.stderr, flush=True)
            found = clones.kept_run(kept, wanted)
        if found is not None:
            runs[seed, beta] = found
    if reproduce is not None:
        shutil.rmtree(clone, ignore_errors=True)
    return runs


def settings(params: Mapping[str, Any], seed: int, beta: float, alternatives: bool) -> dict[str, Any]:
    """The parameters of one run."""
    off = {} if alternatives else {f"{name}.enabled": False for name in BY_NAME if name in params}
    return clones.with_seed(params, seed, {"ppo.kl.coef": beta} | off)


if __name__ == "__main__":
    main()
