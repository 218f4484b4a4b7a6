"""`leash read`: a healthy and an ill run in each format, units, and files that are refused."""

import csv
import json
import math
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.commands.read.formats import _in_order, read_records
from flows.commands.read.libraries import LIBRARIES, NEMO_RL, OPENRLHF, TRL_GROUPS, TRL_PPO, VERL, Library
from flows.commands.read.read import NEEDS, NEUTRAL, read
from rlhf_core.errors import UserError
from rlhf_core.ppo.detectors import COLUMNS, Settings
from rlhf_core.ppo.health import DETECTORS

Steps = dict[int, dict[str, float]]
STEPS, ILL_FROM, LENGTH = 40, 25, 50.0


def run(library: Library, ill: bool = False) -> Steps:
    """The figures of a run under a library's names: from step ILL_FROM on the ill one has a jump of the KL to the
    reference by 10 nats per answer."""
    rng, steps = random.Random(1), {}
    for step in range(1, STEPS + 1):
        kl = min(0.1 * step, 2.0) + 10 * (ill and step >= ILL_FROM)  # nats per answer
        ours = {"reward_raw": 0.01 * step + rng.gauss(0, 0.1), "kl": kl, "entropy": 1.5 - 0.005 * step,
                "response_tokens_mean": LENGTH, "missing_eos_share": 0.05, "clip_fraction": 0.1, "value_loss": 0.3,
                "explained_variance": 0.5, "grad_norm_policy": 1.0, "grad_norm_critic": 2.0,
                "engine_mismatch_k3": 1e-4}  # fmt: skip
        row = dict.fromkeys(library.marks, 1.0)
        for column, figure in library.figures.items():
            row[figure.names[0]] = ours[column] / (LENGTH if figure.per_token else 1)
        steps[step] = row | {"learning_rate": 1e-6}
    return steps


def trainer_state(path: Path, steps: Steps) -> str:
    history: list[dict[str, Any]] = [{**row, "epoch": 0.1, "step": step} for step, row in steps.items()]
    history.insert(10, {"eval_reward": 0.5, "eval_loss": 0.1, "step": 10})
    history.append({"train_runtime": 10.0, "train_loss": 0.1, "step": STEPS})
    (path / "trainer_state.json").write_text(json.dumps({"global_step": STEPS, "log_history": history}))
    return str(path / "trainer_state.json")


def verl_console(path: Path, steps: Steps) -> str:
    lines = ["(TaskRunner pid=7) Training Progress:   0%| | 0/40"]
    for step, row in steps.items():
        pairs = " - ".join(f"{name}:np.float64({value!r})" for name, value in row.items())
        lines.append(f"\x1b[36m(TaskRunner pid=7)\x1b[0m step:{step} - {pairs}")
    (path / "run.log").write_text("\n".join(lines))
    return str(path / "run.log")


def verl_jsonl(path: Path, steps: Steps) -> str:
    rows = [json.dumps({"step": step, "data": row}) for step, row in steps.items()]
    (path / "run.jsonl").write_text("\n".join(rows) + '\n{"step": 41, "da')  # killed while it wrote
    return str(path / "run.jsonl")


def openrlhf_console(path: Path, steps: Steps) -> str:
    lines = [f"(PPOTrainer pid=7) INFO 11-26 10:00:00 ppo_trainer.py:551] ✨ Global step {step}: {row}"
             for step, row in steps.items()]  # fmt: skip
    (path / "out.txt").write_text("\n".join(lines))
    return str(path / "out.txt")


def csv_file(path: Path, steps: Steps) -> str:
    names = list(dict.fromkeys(name for row in steps.values() for name in row))
    with (path / "export.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["Step", *(f"train/{name}" for name in names)])
        writer.writeheader()
        for step, row in steps.items():
            writer.writerow({"Step": step} | {f"train/{name}": value for name, value in row.items()})
    return str(path / "export.csv")


def tensorboard(path: Path, steps: Steps) -> str:
    pytest.importorskip("tensorboard", reason="the extra [tensorboard] is not installed")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(path / "tb")) as writer:
        for step, row in steps.items():
            for name, value in row.items():
                writer.add_scalar(f"train/{name}", value, step)
    return str(path / "tb")


def mlflow_run(path: Path, steps: Steps) -> str:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client = MlflowClient()
    identity = client.create_run(client.create_experiment(str(path), str(path / "artifacts"))).info.run_id
    for step, row in steps.items():
        client.log_batch(identity, [Metric(name, value, step, step) for name, value in row.items()])
    return f"runs:/{identity}"


FORMATS: list[tuple[Library, Callable[[Path, Steps], str]]] = [
    (TRL_GROUPS, trainer_state),
    (TRL_PPO, mlflow_run),
    (VERL, verl_console),
    (VERL, verl_jsonl),
    (OPENRLHF, openrlhf_console),
    (NEMO_RL, tensorboard),
    (NEMO_RL, csv_file),
]


@pytest.fixture(autouse=True)
def _tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")


@pytest.mark.parametrize(("library", "write"), FORMATS, ids=[write.__name__ for _, write in FORMATS])
def test_a_healthy_and_an_ill_run_of_each_format(library: Library, write: Any, tmp_path: Path) -> None:
    folders = [tmp_path / "healthy", tmp_path / "ill"]
    for folder in folders:
        folder.mkdir()
    healthy, text = read([write(folders[0], run(library))])
    assert (healthy["library"], healthy["rows"], healthy["findings"]) == (library.name, STEPS, [])
    assert "no failure mode was found" in text
    ill, text = read([write(folders[1], run(library, ill=True))])
    found = {finding["name"]: finding for finding in ill["findings"]}
    assert found["kl_spike"]["step"] in range(ILL_FROM, ILL_FROM + 3)
    assert found["kl_spike"]["remedy"] == library.remedies["kl_spike"]
    assert library.remedies["kl_spike"] in text


ILL: dict[str, tuple[Library, Callable[[int, dict[str, float]], Mapping[str, float]]]] = {
    "reward_hacking": (OPENRLHF, lambda i, row: {"rollout/reward_mean": 0.1 * i, "kl": 8 / LENGTH}),
    "kl_spike": (TRL_PPO, lambda i, row: {"objective/kl": 9.0 if i > 20 else 1.0}),
    "entropy_collapse": (TRL_GROUPS, lambda i, row: {"entropy": 2 * 0.9**i}),
    "diverging_critic": (VERL, lambda i, row: {"critic/vf_loss": 1.1**i, "critic/vf_explained_var": 0.5 - 0.1 * i}),
    "frozen_reward": (TRL_PPO, lambda i, row: {"policy/clipfrac_avg": 0.5, "objective/scores": 1.0}),
    "length_drift": (NEMO_RL, lambda i, row: {"mean_gen_tokens_per_sample": 50.0 + 5 * i}),
    "missing_ends": (VERL, lambda i, row: {"response_length/clip_ratio": 0.01 * i}),
    "exploding_gradient": (OPENRLHF, lambda i, row: {"critic_grad_norm": 100.0 if i == 30 else 1.0}),
    "engine_mismatch": (NEMO_RL, lambda i, row: {"gen_kl_error": 0.01}),
    "non_finite": (TRL_GROUPS, lambda i, row: {"grad_norm": math.nan if i == 30 else 1.0}),
}


@pytest.mark.parametrize("mode", ILL)
def test_every_failure_mode(mode: str, tmp_path: Path) -> None:
    library, change = ILL[mode]
    steps = {step: row | change(step, row) for step, row in run(library).items()}
    found, _ = read([csv_file(tmp_path, steps)])
    assert mode in {finding["name"] for finding in found["findings"]}


def test_the_table_is_complete() -> None:
    """No detector finds anything in neutral values; each that a library allows has a remedy; marks differ."""
    assert NEEDS.keys() == DETECTORS.keys()
    assert NEUTRAL.keys() == set(COLUMNS)
    rows = [NEUTRAL | {"step": float(step)} for step in range(1, 30)]
    assert [detect(rows, Settings(20, 1)) for detect in DETECTORS.values()] == [None] * len(DETECTORS)
    for library in LIBRARIES:
        possible = {mode for mode, needs in NEEDS.items() if set(needs) <= library.figures.keys()}
        assert possible | {"non_finite"} == library.remedies.keys(), library.name
        assert not library.figures.keys() & library.incomparable.keys()
        others = [other for other in LIBRARIES if other is not library]
        assert not any(set(other.marks) <= set(run(library)[1]) for other in others)


def test_units(tmp_path: Path) -> None:
    """A KL per token is multiplied by the length. NeMo-RL's sums are divided by the optimizer steps: 64 samples in
    global batches of 16 are four."""
    steps = {step: row | {"kl": 0.1 if step > 20 else 0.01} for step, row in run(TRL_GROUPS).items()}
    found, _ = read([csv_file(tmp_path, steps)])
    assert [finding["message"] for finding in found["findings"]] == [
        "KL to the reference went from 0.5 to 5 nats per answer"
    ]
    steps = {step: row | {"gen_kl_error": 0.01} for step, row in run(NEMO_RL).items()}
    batches = {"num_valid_samples": 64.0, "global_valid_seqs": 16.0}
    names = []
    for extra in ({}, batches):
        found, _ = read([csv_file(tmp_path, {step: row | extra for step, row in steps.items()})])
        names.append([finding["name"] for finding in found["findings"]])
    assert names == [["engine_mismatch"], []]


def test_what_is_not_recorded_or_not_comparable(tmp_path: Path) -> None:
    found, text = read([trainer_state(tmp_path, run(TRL_GROUPS))])
    assert found["not_checked"]["huge_penalty"] == "min_token_reward (not recorded there)"
    steps = {step: row | {"kl": 0.0, "sampling/sampling_logp_difference/mean": 0.1}
             for step, row in run(TRL_GROUPS).items()}  # fmt: skip
    found, text = read([trainer_state(tmp_path, steps)])
    assert found["not_checked"]["kl_spike"] == "kl (kl is 0 at every step: there is no reference model)"
    assert "sampling/sampling_logp_difference/mean is a mean absolute difference" in text
    for row in steps.values():
        del row["completions/clipped_ratio"]
    assert "missing_eos_share (not recorded there)" in read([trainer_state(tmp_path, steps)])[1]


def test_a_resumed_run_in_one_file_or_two(tmp_path: Path) -> None:
    """What was logged after the checkpoint, before the kill, does not count: there is the jump."""
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    ill, healthy = run(VERL, ill=True), run(VERL)
    lost = {step: row for step, row in ill.items() if step <= 35}
    resumed = {step: row for step, row in healthy.items() if step > 20}
    files = [verl_console(second, resumed), verl_console(first, lost)]
    found, text = read(files)
    assert (found["findings"], found["rows"]) == ([], STEPS)
    assert "repeats step 21, as a resumed run does; steps 21 to 35 of before are left out" in text
    one = tmp_path / "one.log"
    one.write_text("\n".join(Path(file).read_text() for file in reversed(files)))
    assert read([str(one)])[0]["findings"] == []


def test_a_resumed_run_of_event_files_or_a_server(tmp_path: Path) -> None:
    """Points are those of the order of time where a step is there twice, and of the order of steps elsewhere."""
    lost = [("reward", step, step, 1.0) for step in range(1, 6)]
    resumed = [("reward", 10 + step, step, 2.0) for step in range(4, 7)]
    found = _in_order(resumed + lost)
    assert [(step, values["reward"]) for step, values in found] == [
        *((step, 1.0) for step in range(1, 6)), (4, 2.0), (5, 2.0), (6, 2.0)
    ]  # fmt: skip
    late = [("kl", 20 + step, step, 0.1) for step in range(1, 6)]  # sent after all of the reward
    assert _in_order(lost + late) == [(step, {"reward": 1.0, "kl": 0.1}) for step in range(1, 6)]


def test_marks_and_colours_of_logs_are_no_figures(tmp_path: Path) -> None:
    steps = run(VERL)
    plain = Path(verl_console(tmp_path, steps))
    coloured = tmp_path / "coloured.log"
    coloured.write_text("\ufeff" + plain.read_text().replace("\n", "\x1b[0m\n"), encoding="utf-8")
    assert read_records(str(coloured)) == read_records(str(plain))
    long = tmp_path / "long.jsonl"
    long.write_text(f'\ufeff{{"step": 1, "kl": {"9" * 400}, "reward": 1.0}}\n', encoding="utf-8")
    assert read_records(str(long)) == [(1, {"step": 1.0, "reward": 1.0})]


def test_two_runs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    files = [csv_file(tmp_path, run(VERL)), csv_file(tmp_path / "b", run(VERL))]
    with pytest.raises(UserError, match="of step 1, the first one, is there twice, so there are two runs"):
        read(files)
    with pytest.raises(UserError, match=r"figures of TRL GRPO or RLOO .* and OpenRLHF"):
        read([trainer_state(tmp_path, run(TRL_GROUPS)), openrlhf_console(tmp_path, run(OPENRLHF))])


def test_gaps_and_missing_numbers(tmp_path: Path) -> None:
    steps = {step: row for step, row in run(TRL_GROUPS).items() if not 10 < step < 20}
    steps[5]["reward"] = math.nan
    found, text = read([csv_file(tmp_path, steps)])
    assert "no figures between steps 10 and 20, where 1 is usual" in text
    assert "1 of 31 steps lack a figure and are left out" in text
    assert [(one["name"], one["step"], one["at_end"]) for one in found["findings"]] == [("non_finite", 5, False)]
    assert "too few" in read([csv_file(tmp_path, {step: steps[step] for step in range(1, 5)})])[1]


REFUSED = {
    "nothing.json": ("{}", "expected trainer_state.json, with log_history, or a list of records"),
    "sft/trainer_state.json": (
        '{"log_history": [{"loss": 1.0, "step": 1}]}',
        "no RL metrics of a known library; found loss",
    ),
    "broken.json": ('{"log_history": [', "is not JSON"),
    "broken.jsonl": ('{"step": 1, "a": 2}\nhello\n', "broken.jsonl, line 2: is not JSON"),
    "nostep.csv": ("reward,kl\n1,2\n", "nostep.csv, line 2: no whole number as step (a column step or global_step)"),
    "infinite.jsonl": ('{"step": Infinity, "kl": 1}\n', "infinite.jsonl, line 1: no whole number as step"),
    "other.log": ("INFO start\nloss 3\n", "no metrics found"),
    "list.json": ("[1]", "record 1: expected an object with figures, found int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unknown_files_are_refused(name: str, tmp_path: Path) -> None:
    text, words = REFUSED[name]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read([str(path)])
    assert str(path) in str(error.value)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no project. Exit code 0 with findings, 2 for what cannot be read."""
    monkeypatch.chdir(tmp_path)
    file = openrlhf_console(tmp_path, run(OPENRLHF, ill=True))
    done = CliRunner().invoke(app, ["read", file, "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["findings"][0]["name"] == "kl_spike"
    for source in ("nowhere.log", ".", "runs:/0123"):
        done = CliRunner().invoke(app, ["read", source])
        assert done.exit_code == 2, source
        assert done.stderr.splitlines()[-1].startswith(f"error: {source}: ")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert "set MLFLOW_TRACKING_URI" in CliRunner().invoke(app, ["read", "runs:/0123"]).stderr
    assert not (tmp_path / "mlruns").exists()


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
    with pytest.raises(UserError, match=r"pip install 'tensorboard>=2\.21,<3'"):
        read([str(tmp_path)])
