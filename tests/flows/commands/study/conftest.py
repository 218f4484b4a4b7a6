"""A project whose score depends on β, for studies."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, call, commit

GRAPH = """
stages:
  shared:
    cmd: python work.py shared
    deps: [work.py]
    params: [seed]
    outs: [shared.out]
  evaluate:
    cmd: python work.py evaluate
    deps: [work.py, shared.out]
    params: [seed, ppo.kl.coef, ppo.vf_coef]
    outs: [metrics/evaluate.json]
"""
WORK = """
import json, pathlib, sys, time
from ruamel.yaml import YAML

params = YAML(typ="safe").load(pathlib.Path("params.yaml"))
log = pathlib.Path(__file__).resolve().parents[4] / "log.txt"
with log.open("a") as file:
    file.write(f"{sys.argv[1]} {params['seed']} {params['ppo']['kl']['coef']}\\n")
if sys.argv[1] == "shared":
    pathlib.Path("shared.out").write_text(str(params["seed"]))
    sys.exit()
coef = params["ppo"]["kl"]["coef"]
if coef == 0.05 and not (log.parent / "go").exists():
    time.sleep(100)
assert params["ppo"]["vf_coef"] == 0.5, "this trial fails"
pathlib.Path("metrics").mkdir(exist_ok=True)
gold = -((coef - 0.2) ** 2) + 0.001 * params["seed"]
figures = {"gold_policy": gold, "kl_per_sequence": 0.5 / coef}
figures |= {"win_rate": 0.6, "win_rate_low": 0.5, "win_rate_high": 0.7}
pathlib.Path("metrics/evaluate.json").write_text(json.dumps(figures))
"""


@pytest.fixture
def home(toy: Callable[..., Path]) -> Path:
    """A committed project whose gold score depends on β: best at 0.2. β 0.05 waits for the file `go`."""
    root = toy({})
    (root / "dvc.yaml").write_text(GRAPH)
    (root / "work.py").write_text(WORK)
    params = (ROOT / "params.yaml").read_text(encoding="utf-8")
    (root / "params.yaml").write_text(params.replace("\nppo:\n", "\nppo:\n  vf_coef: 0.5\n"), encoding="utf-8")
    commit(root)
    return root


def experiments(home: Path) -> dict[str, str]:
    """Name → commit of every experiment."""
    finished = "refs/exps/??/*/*"  # not DVC's own, such as refs/exps/stash of one that is being saved
    lines = call(home, "git", "for-each-ref", "--format=%(refname) %(objectname)", finished).splitlines()
    return {name.rpartition("/")[2]: commit for name, commit in map(str.split, lines)}


def log(home: Path) -> list[str]:
    path = home / "log.txt"
    return path.read_text().splitlines() if path.exists() else []
