"""The promotion gate: its rules, aliases and tags, and nightly runs with a worse and with a better policy."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from mlflow.tracking import MlflowClient
from prefect.client.orchestration import get_client

from flows import deployments, promotion, workspace
from flows.cli import main
from flows.deployments import nightly, trial
from flows.promotion import Decision, decide
from flows.workspace import Workspace
from rlhf_core.errors import UserError
from rlhf_core.evaluation.intervals import bounds
from tasks.naming import model_name
from tasks.params.all import Params
from tasks.params.loader import parse, read_yaml
from tasks.params.promote import PromoteParams
from tasks.stage.dvc_adapter import apply_overrides
from tasks.tracking.registry import CHALLENGER, CHAMPION, Registry, Version
from tests.conftest import EXAMPLES, ROOT, call, commit

if TYPE_CHECKING:
    from tests.conftest import Ended

Toy = Callable[..., Path]
InProcess = Callable[[Path, Callable[[], object]], "Ended"]
GOOD = {"kl_per_sequence": 2.0, "missing_eos_share": 0.01}


def against(low: float, high: float) -> dict[str, Any]:
    """Figures where the policy wins against the champion with this interval."""
    champion = {"win_rate_vs_policy": 1 - (low + high) / 2} | bounds("win_rate_vs_policy", [1 - high, 1 - low])
    return GOOD | {"models": {CHAMPION: champion}, "judged_by": "scores"}


@pytest.mark.parametrize(
    ("params", "figures", "alerts", "broken"),
    [
        ({}, against(0.51, 0.6), [], []),
        ({}, against(0.49, 0.6), [], ["win rate against the champion"]),
        ({}, against(0.5, 0.6), [], ["win rate against the champion"]),
        ({}, against(0.6, 0.7) | {"judged_by": "reward model"}, [], ["judge"]),
        ({}, against(0.6, 0.7) | {"judged_by": None}, [], ["judge"]),
        ({}, against(0.6, 0.7) | {"judged_by": "judging reward model"}, [], []),
        ({"allow_reward_model": True}, against(0.6, 0.7) | {"judged_by": "reward model"}, [], []),
        ({"win_rate_above": 0.4}, against(0.45, 0.6), [], []),
        ({"kl_below": 2.0}, against(0.6, 0.7), [], ["KL, nats"]),
        ({"kl_below": 2.1}, against(0.6, 0.7), [], []),
        ({}, against(0.6, 0.7) | {"missing_eos_share": 0.05}, [], ["answers without an end"]),
        ({}, against(0.6, 0.7) | {"missing_eos_share": None}, [], ["answers without an end"]),
        ({}, against(0.6, 0.7), ["repetition"], ["health alerts"]),
        ({"allowed_alerts": ["repetition"]}, against(0.6, 0.7), ["repetition"], []),
        ({"allowed_alerts": ["repetition"]}, against(0.6, 0.7), ["repetition", "kl_spike"], ["health alerts"]),
    ],
)
def test_every_rule_must_hold(
    params: dict[str, Any], figures: dict[str, Any], alerts: list[str], broken: list[str]
) -> None:
    rules = decide(PromoteParams(**params), figures, alerts, compared=True)
    assert [rule.name for rule in rules if not rule.holds] == broken
    decision = Decision("2", "1", rules)
    assert decision.promoted is not bool(broken)
    assert decision.title.startswith("promoted" if not broken else "not promoted: ")
    assert all(rule.broken in decision.title for rule in rules if not rule.holds)


@pytest.mark.parametrize("file", ["params.yaml", *(str(path.relative_to(ROOT)) for path in EXAMPLES)])
def test_every_example_can_be_compared_with_a_champion(tmp_path: Path, file: str) -> None:
    shutil.copy2(ROOT / file, tmp_path / "params.yaml")
    call(tmp_path, "git", "init", "--quiet")
    commit(tmp_path)
    space = Workspace(tmp_path, "nightly", workspace.resolve(tmp_path, "HEAD"), ("seed=5",))
    assert promotion.with_champion(space, None) == space
    apply_overrides(tmp_path, promotion.with_champion(space, Version("1", "ab.dir")).overrides)
    params = parse(Params, read_yaml(tmp_path / "params.yaml"))
    assert (params.seed, params.evaluate.extra_models[-1]) == (5, CHAMPION)


def test_the_first_policy_needs_no_comparison() -> None:
    rules = decide(PromoteParams(), GOOD, [], compared=False)
    assert [rule.name for rule in rules] == ["answers without an end", "health alerts"]
    assert Decision("1", None, rules).title == "promoted: version 1 is the champion, the first one"
    unended = decide(PromoteParams(), GOOD | {"missing_eos_share": 1.0}, [], False)
    assert Decision("1", None, unended).title == "not promoted: no answer has an end (limit 5%); there is no champion"
    assert "there is no champion" in Decision("1", None, decide(PromoteParams(), GOOD, ["kl_spike"], False)).title


GRAPH = """
stages:
  ppo:
    cmd: python work.py ppo
    deps: [work.py]
    params: [quality]
    outs: [models/policy]
  evaluate:
    cmd: python work.py evaluate
    deps: [work.py, models/policy, models/extra]
    params: [evaluate]
    outs: [metrics/evaluate.json]
"""
WORK = """
import json, os, pathlib, sys
from ruamel.yaml import YAML

params = YAML(typ="safe").load(pathlib.Path("params.yaml"))
if sys.argv[1] == "ppo":
    pathlib.Path("models/policy").mkdir(parents=True, exist_ok=True)
    pathlib.Path("models/policy/weights").write_text(str(params["quality"]))
    sys.exit()
own = float(pathlib.Path("models/policy/weights").read_text())
models = {}
for name in params["evaluate"].get("extra_models", []):
    other = float(pathlib.Path("models/extra", name, "weights").read_text())
    rate = 0.5 + 0.1 * (other - own)
    ends = {"win_rate_vs_policy_low": rate - 0.05, "win_rate_vs_policy_high": rate + 0.05}
    models[name] = {"win_rate_vs_policy": rate, **ends}
figures = {"judged_by": "scores", "kl_per_sequence": 1.0, "missing_eos_share": 0.0, "models": models}
pathlib.Path("metrics").mkdir(exist_ok=True)
pathlib.Path("metrics/evaluate.json").write_text(json.dumps(figures))
from mlflow.tracking import MlflowClient
from tasks.naming import model_name

lock = YAML(typ="safe").load(pathlib.Path("dvc.lock"))
[digest] = [out["md5"] for out in lock["stages"]["ppo"]["outs"]]
source, name = f"dvc://models/policy?md5={digest}&project=/a", model_name(pathlib.Path.cwd())
client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
if not client.search_registered_models():
    client.create_registered_model(name)
if not client.search_model_versions(f"source_path = '{source}'"):
    client.create_model_version(name, source)
"""


@pytest.fixture
def home(toy: Toy, database: Path, monkeypatch: pytest.MonkeyPatch, prefect_api: str) -> Path:
    """A project whose policy is a number, which wins against smaller ones; its evaluation registers it."""
    root = toy({})
    (root / "dvc.yaml").write_text(GRAPH)
    (root / "work.py").write_text(WORK)
    (root / "models/extra").mkdir(parents=True)
    (root / "models/extra/README.md").write_text("models")
    (root / ".gitignore").write_text("/models/extra/*\n!/models/extra/README.md\n/tracking.db\n")
    shutil.copy2(database, root / "tracking.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/tracking.db")
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    monkeypatch.setenv("LEASH_HOME", str(root))
    monkeypatch.setenv("PYTHONPATH", str(Path(promotion.__file__).parents[1]))
    set_quality(root, 5)
    return root


def set_quality(root: Path, quality: float, promote: str = "{}") -> None:
    """Commit this policy."""
    (root / "params.yaml").write_text(f"quality: {quality}\nevaluate: {{seeds: [1]}}\npromote: {promote}\n")
    commit(root)


def night(root: Path) -> Any:
    """A nightly run of the present commit; its final state."""
    return nightly.with_options(name="toy-nightly")(branch="HEAD", return_state=True)


def aliases(root: Path) -> dict[str, str]:
    registry = Registry(root)
    found = {alias: registry.by_alias(alias) for alias in (CHAMPION, CHALLENGER)}
    return {alias: version.number for alias, version in found.items() if version is not None}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worse_policy_is_kept_out_and_a_better_one_promoted(
    home: Path, in_process: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leash(word: str) -> str:
        """What `leash promote` prints."""
        monkeypatch.setattr("sys.argv", ["leash", "promote", word])
        ended = in_process(home, main)
        assert ended.code == 0, ended.stderr
        return ended.stdout

    first = night(home)
    assert first.name == "Promoted"
    assert aliases(home) == {CHAMPION: "1", CHALLENGER: "1"}

    set_quality(home, 4)
    worse = night(home)
    assert worse.name == "Kept"
    assert "version 1 stays the champion" in worse.message
    assert "its win rate against the champion is 0.400 (0.350 to 0.450), and its interval must be" in worse.message
    assert aliases(home) == {CHAMPION: "1", CHALLENGER: "2"}

    set_quality(home, 7)
    better = night(home)
    assert better.name == "Promoted"
    assert aliases(home) == {CHAMPION: "3", CHALLENGER: "3"}
    client = MlflowClient(f"sqlite:///{home}/tracking.db")
    assert (
        client.get_model_version(model_name(home), "2").tags["leash.promotion"].startswith("not promoted: its win rate")
    )
    assert client.get_model_version(model_name(home), "3").tags["leash.champion_before"] == "1"

    worse_run = client.get_model_version(model_name(home), "2").tags["leash.experiment"]
    decided = promotion.judge_named(home, worse_run, Registry(home))
    assert decided.title.startswith("not promoted: the champion has changed since this run")
    with pytest.raises(UserError, match="no experiment absent"):
        promotion.judge_named(home, "absent", Registry(home))

    again = night(home)
    assert again.name == "Kept"
    assert "the policy is the champion itself" in again.message
    assert again.message.endswith("(ran evaluate)"), "with another champion"
    assert night(home).name == "Restored"
    assert client.get_model_version(model_name(home), "3").tags["leash.promotion"].startswith("promoted: version 3")

    with get_client(sync_client=True) as prefect:
        found = prefect._client.post(
            "/artifacts/latest/filter", json={"artifacts": {"key": {"any_": ["leash-promotion"]}}}
        )
    assert "the policy is the champion itself" in found.json()[0]["data"]

    listed = leash("--list").splitlines()
    assert [line.split()[0] for line in listed] == ["version", "3", "2", "1"]
    assert "challenger, champion" in listed[1]
    assert worse_run in listed[2]
    assert "not promoted: " in listed[2]
    assert leash("--undo") == "version 1 is the champion again, in the place of version 3\n"
    assert leash("2") == "version 2 is the champion, in the place of version 1\n"
    assert aliases(home) == {CHAMPION: "2", CHALLENGER: "3"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_champion_whose_files_are_gone_stays(home: Path) -> None:
    night(home)
    version = Registry(home).by_alias(CHAMPION)
    assert version is not None
    blob = home / ".dvc/cache/files/md5" / version.digest[:2] / version.digest[2:]
    blob.chmod(0o644)
    blob.unlink()
    set_quality(home, 9)
    state = night(home)
    assert (state.name, aliases(home)[CHAMPION]) == ("Kept", "1")
    assert "the champion was not evaluated in this run" in state.message


@pytest.fixture
def two_versions(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions of the policy in the database of tmp_path."""
    shutil.copy2(database, tmp_path / "mlflow.db")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    client.create_registered_model(model_name(tmp_path))
    for digest in ("aa", "bb"):
        client.create_model_version(model_name(tmp_path), f"dvc://models/policy?md5={digest}.dir&project=/x")


@pytest.mark.usefixtures("two_versions")
def test_by_hand(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    with pytest.raises(UserError, match="there is no champion"):
        promotion.undo(tmp_path, registry)
    with pytest.raises(UserError, match="the registered policy has no version 7"):
        promotion.by_hand(tmp_path, registry, "7")
    assert promotion.by_hand(tmp_path, registry, "1") == "version 1 is the champion"
    with pytest.raises(UserError, match="version 1 is the champion already"):
        promotion.by_hand(tmp_path, registry, "1")
    assert promotion.by_hand(tmp_path, registry, "2") == "version 2 is the champion, in the place of version 1"
    assert promotion.undo(tmp_path, registry) == "version 1 is the champion again, in the place of version 2"
    assert promotion.undo(tmp_path, registry) == "version 1 is no longer the champion; there was none before it"
    with pytest.raises(UserError, match="there is no challenger"):
        promotion.judge_named(tmp_path, None, registry)
    assert [version.digest for version in map(registry.by_number, "12") if version] == ["aa.dir", "bb.dir"]


@pytest.mark.usefixtures("two_versions")
def test_two_promotions_at_once_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the lock the second reads the champion before the first has moved it, and its undo skips a version."""
    started, tag = threading.Event(), Registry.tag

    def slow(*values: Any) -> None:
        started.set()
        time.sleep(1.0)
        tag(*values)

    monkeypatch.setattr(Registry, "tag", slow)
    first = threading.Thread(target=promotion.by_hand, args=(tmp_path, Registry(tmp_path), "1"))
    first.start()
    started.wait(60.0)
    promotion.by_hand(tmp_path, Registry(tmp_path), "2")
    first.join()
    champion = Registry(tmp_path).by_alias(CHAMPION)
    assert champion is not None
    assert (champion.number, champion.tags["leash.champion_before"]) == ("2", "1")


def test_who_reaches_the_server_cannot_switch_remote_code_on(home: Path) -> None:
    for override in ("++trust_remote_code=true", "a={trust_remote_code: 1}", "trust_remote_code=true"):
        with pytest.raises(UserError, match="trust_remote_code"):
            deployments._refuse_code(["a=1", override])
    with pytest.raises(UserError, match="trust_remote_code"):
        nightly.with_options(name="toy-nightly")(branch="HEAD", overrides=[override])
    commit_hash = workspace.resolve(home, "HEAD")
    with pytest.raises(UserError, match="trust_remote_code"):
        trial.with_options(name="toy-trial")("a", commit_hash, [override])
    with pytest.raises(UserError, match="a run of project other on a worker of toy"):
        trial.with_options(name="other-trial")("a", commit_hash, [])


def test_a_trial_fetches_only_a_commit_that_is_not_here(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, other, git, used = tmp_path / "origin/toy.git", tmp_path / "other", workspace.git, []
    call(home, "git", "init", "--quiet", "--bare", str(origin))
    call(home, "git", "remote", "add", "origin", str(origin))
    call(home, "git", "push", "--quiet", "origin", "HEAD")
    call(home, "git", "clone", "--quiet", str(origin), str(other))
    (other / "notes.txt").touch()
    commit(other)
    call(other, "git", "push", "--quiet", "origin", "HEAD")

    def spy(folder: Path, *words: str) -> str:
        used.append(words[0])
        return git(folder, *words)

    def stop(*words: object, **more: object) -> None:
        raise UserError("far enough")

    monkeypatch.setattr(workspace, "git", spy)
    monkeypatch.setattr(deployments, "_opened", stop)
    for root, fetches in ((home, 0), (other, 1)):
        with pytest.raises(UserError, match="far enough"):
            trial.with_options(name="toy-trial")("a", git(root, "rev-parse", "HEAD").strip(), [])
        assert used.count("fetch") == fetches


def test_nothing_was_tracked_and_a_server_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert Registry(tmp_path).by_alias(CHAMPION) is None
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UserError, match="MLflow does not answer") as refused:
        Registry(tmp_path).by_alias(CHAMPION)
    assert "secret" not in str(refused.value)


def test_the_page_of_a_decision() -> None:
    decision = Decision("2", "1", decide(PromoteParams(), against(0.4, 0.6), ["kl_spike"], compared=True))
    assert json.dumps(decision.markdown).count("|") == 6 * 5
    assert "NO" in decision.text
