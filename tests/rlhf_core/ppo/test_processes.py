"""`processes.py`: several processes make the training that one makes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from rlhf_core.errors import UserError
from rlhf_core.training import processes
from rlhf_core.training import state as checkpoint
from rlhf_core.training.checkpoints import Checkpoints, seal
from tests.rlhf_core import launching

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("several_processes.py")
MODULE = "tests.rlhf_core.ppo.several_processes"
Run = dict[str, Any]
Made = Callable[..., tuple[Run, Path]]
OPTIONS: dict[str, dict[str, Any]] = {
    "critic of its own": {},
    "shared critic, text": {
        "critic": {"kind": "shared"},
        "ptx": {"coef": 1.0, "batch_size": 3},
        "text": [[3, 9, 4, 20, 21], [30, 31, 32]],
    },
    "critic warm-up": {"critic": {"warmup_steps": 2}},
    "rloo, an odd minibatch": {"advantage": "rloo", "samples_per_prompt": 3, "batch_size": 9, "minibatches": 3},
    "answers left out": {
        **{"advantage": "rloo", "samples_per_prompt": 2, "batch_size": 16, "max_new_tokens": 4},
        **{"skip_equal_groups": True, "kl": {"coef": 0.0}, "truncated": "mask", "score": {"missing_eos_penalty": 0.0}},
    },
}


def launch(count: int, folder: Path, options: dict[str, Any]) -> Run:
    return launching.launch(MODULE, count, folder, options, fails=options.get("die", False))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """made(count, options, saves=False) -> what so many processes make with these options, made once; with `saves`
    their checkpoints are in the folder, which must not be changed."""
    found: dict[str, tuple[Run, Path]] = {}

    def run(count: int, options: dict[str, Any], saves: bool = False) -> tuple[Run, Path]:
        key = json.dumps([count, options, saves], sort_keys=True)
        if key not in found:
            folder = tmp_path_factory.mktemp("made")
            state = {"state": str(folder / "state")} if saves else {}
            found[key] = launch(count, folder / "run", options | state), folder / "state"
        return found[key]

    return run


def relative(one: torch.Tensor, two: torch.Tensor) -> float:
    return ((one - two).norm() / one.norm()).item()


@pytest.mark.slow
@pytest.mark.chosen("rloo, an odd minibatch")
@pytest.mark.parametrize("name", list(OPTIONS))
def test_rule_13_rule_03_failure_10_two_processes_train_as_one(name: str, made: Made) -> None:
    """The same samples, the same gradient at the first step (1e-5), the same weights after three (1e-4)."""
    (one, _), (two, _) = (made(count, OPTIONS[name]) for count in (1, 2))
    assert (one["processes"], two["processes"]) == (1, 2)
    assert one["sampled"][0] == two["sampled"][0]
    assert relative(one["gradient"], two["gradient"]) <= 1e-5
    assert relative(one["weights"][2], two["weights"][2]) <= 1e-4
    for first, second in zip(one["rows"], two["rows"], strict=True):
        assert first.keys() == second.keys()
        assert first["optimizer_steps"] == second["optimizer_steps"]
        assert first["kl"] == pytest.approx(second["kl"], rel=1e-3, abs=1e-4)
        assert first["score"] == pytest.approx(second["score"], rel=1e-3, abs=1e-4)


FSDP, TWO_STEPS = {"sharding": "fsdp"}, {"steps": 2}
SHARDED: dict[str, dict[str, Any]] = {
    "critic of its own": {},
    "shared critic, text": OPTIONS["shared critic, text"],
    "critic warm-up, gpt2": {"critic": {"warmup_steps": 2}, "kind": "gpt2"},
    "rloo, an odd minibatch": OPTIONS["rloo, an odd minibatch"],
    "lora, full KL in the loss": {
        "lora": {"rank": 4},
        "learning_rate": 1e-2,
        "gradient_checkpointing": True,
        "kl": {"penalty": "loss", "estimator": "full"},
    },
}


@pytest.mark.slow
@pytest.mark.chosen("critic of its own")
@pytest.mark.parametrize("name", list(SHARDED))
def test_rule_13_divided_models_train_as_whole_ones(name: str, made: Made) -> None:
    """`sharding: fsdp` on two processes: samples, gradient and weights of one process, and about half the bytes."""
    (one, _), (two, _) = made(1, SHARDED[name]), made(2, SHARDED[name] | FSDP)
    assert one["sampled"] == two["sampled"]
    assert relative(one["gradient"], two["gradient"]) <= 1e-5
    assert relative(one["weights"][2], two["weights"][2]) <= 1e-4
    assert [row["optimizer_steps"] for row in one["rows"]] == [row["optimizer_steps"] for row in two["rows"]]
    assert relative(one["saved"], two["saved"]) <= 1e-4
    for part in ("policy", "optimizers"):
        assert two["memory"][part] <= 0.51 * one["memory"][part]


@pytest.mark.slow
def test_rule_14_divided_processes_stop_together(tmp_path: Path) -> None:
    """`stop_kl` at a threshold that some minibatches cross."""
    options = {"stop_kl": 2e-3, "minibatches": 4, "learning_rate": 1e-2}
    one, two = (
        launch(count, tmp_path / str(count), options | {"sharding": kind}) for count, kind in ((1, "none"), (2, "fsdp"))
    )
    columns = ("optimizer_steps", "stopped_early")
    found = [[row[name] for name in columns] for row in one["rows"]]
    assert found == [[row[name] for name in columns] for row in two["rows"]]
    assert any(stopped for _, stopped in found)
    assert relative(one["weights"][2], two["weights"][2]) <= 1e-4


@pytest.mark.slow
@pytest.mark.chosen("all weights")
@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 4}}], ids=["all weights", "lora"])
def test_rule_19_a_checkpoint_of_two_processes_continues_in_two_and_in_one(
    changes: dict[str, Any], tmp_path: Path, made: Made
) -> None:
    """In two: the bytes of a run without a stop. In one, or from one to two: the weights up to rounding."""
    options = FSDP | changes
    straight, _ = made(2, options)
    for first, then in ((2, 2), (2, 1), (1, 2)):
        _, checkpoints = made(first, options | TWO_STEPS, saves=True)
        state = shutil.copytree(checkpoints, tmp_path / f"state of {first} for {then}")
        continued = launch(then, tmp_path / f"{first} and {then}", options | {"state": str(state)})
        assert len(continued["rows"]) == 1
        assert relative(straight["weights"][2], continued["weights"][0]) <= 1e-4
        assert torch.equal(straight["weights"][2], continued["weights"][0]) or first != then


@pytest.mark.slow
def test_failure_01_a_kill_while_a_divided_checkpoint_is_written_leaves_the_one_before(tmp_path: Path) -> None:
    options = FSDP | {"state": str(tmp_path / "state")}
    launch(2, tmp_path / "killed", options | {"die": True})
    assert (tmp_path / "state/checkpoint-1/seal.json").exists()
    assert not (tmp_path / "state/checkpoint-2").exists()
    assert len(launch(2, tmp_path / "again", options)["rows"]) == 2


@pytest.mark.slow
def test_a_divided_checkpoint_without_one_of_its_files_is_not_used(tmp_path: Path, made: Made) -> None:
    """The one before is, and the message names the step; with a seal that fits it is an error of one line."""
    shutil.copytree(made(2, FSDP | TWO_STEPS, saves=True)[1], tmp_path / "state")
    missing = next((tmp_path / "state/checkpoint-2" / "state").iterdir())
    missing.unlink()
    seal(tmp_path / "state/checkpoint-2")
    with pytest.raises(UserError, match="1 of 2 files") as error:
        checkpoint.load(Checkpoints(tmp_path / "state"))
    assert "\n" not in str(error.value)
    (tmp_path / "state/checkpoint-2/seal.json").unlink()
    said: list[str] = []
    assert (checkpoint.load(Checkpoints(tmp_path / "state", said.append)) or {})["steps_done"] == 1
    assert said == ["checkpoint-2 was cut short and is not used"]


@pytest.mark.slow
def test_failure_01_a_full_disk_and_a_missing_file_are_plain_errors_of_both_processes(tmp_path: Path) -> None:
    """When the parts of a checkpoint are written, before it is sealed."""
    launch(2, tmp_path / "two", FSDP | {"checks_saving": True})


@pytest.mark.slow
def test_frozen_models_in_bfloat16_are_divided_as_they_are(tmp_path: Path) -> None:
    launch(2, tmp_path / "two", {"checks_bfloat16": True})


@pytest.mark.slow
def test_a_missing_file_of_the_only_checkpoint_is_an_error_and_nothing_is_removed(tmp_path: Path, made: Made) -> None:
    """With the seal that was written; a run with fresh moments would be a silent loss."""
    state, name = tmp_path / "state", "checkpoint-1"
    shutil.copytree(made(2, FSDP | TWO_STEPS, saves=True)[1] / name, state / name)
    missing = next((state / name / "state").iterdir())
    missing.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="this file of a checkpoint is missing") as error:
        checkpoint.load(Checkpoints(state))
    assert "\n" not in str(error.value)
    (tmp_path / "elsewhere").rename(missing)
    assert (checkpoint.load(Checkpoints(state)) or {})["steps_done"] == 1


def test_processes_of_a_launcher_wait_as_long_as_those_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it NCCL's default of ten minutes would end a run whose main process saves or loads for longer."""
    given: list[Any] = []
    monkeypatch.delenv(processes.RENDEZVOUS, raising=False)

    def accelerator(**options: Any) -> Accelerator:
        given.extend(options["kwargs_handlers"])
        return Accelerator(**options)

    monkeypatch.setattr(processes, "Accelerator", accelerator)
    processes.Processes()
    assert [handler.timeout for handler in given] == [processes.TIMEOUT]


@pytest.mark.parametrize(("gpus", "refused"), [(1, True), (2, False), (0, False)])
def test_more_processes_of_a_stage_than_gpus_are_refused(
    gpus: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(processes.distributed, "init_process_group", lambda *_, **options: made.append(options))
    changed = {processes.RENDEZVOUS: "store", "RANK": "0", "WORLD_SIZE": "2"}
    changed |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    if refused:
        with pytest.raises(UserError, match=r"^processes is 2, but torch sees 1 GPU; lower it, or make more visible"):
            processes.join_group()
    else:
        processes.join_group()
    assert len(made) == (not refused)


@pytest.mark.slow
def test_two_groups_of_torchrun_train_as_one_process(tmp_path: Path, made: Made) -> None:
    """Two nodes, here on one machine: each group has a rank of its own, and they meet at the first one's address."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    one, _ = made(1, {})
    (tmp_path / "two").mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(launching.free_port())]
    nodes = [
        subprocess.Popen(
            [*command, "--node-rank", str(rank), str(SCRIPT), str(tmp_path / "two"), json.dumps(FSDP)],
            cwd=ROOT,
            env=environment,
        )
        for rank in (0, 1)
    ]
    assert [node.wait(timeout=300) for node in nodes] == [0, 0]
    two: dict[str, Any] = torch.load(tmp_path / "two" / "run.pt", weights_only=True)
    assert two["processes"] == 2
    assert one["sampled"] == two["sampled"]
    assert relative(one["weights"][2], two["weights"][2]) <= 1e-4
    assert two["memory"]["policy"] <= 0.51 * one["memory"]["policy"]
