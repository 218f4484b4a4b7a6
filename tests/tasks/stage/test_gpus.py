"""A stage sees as many GPUs as it has processes, and no two stages use one GPU. There is no GPU here: their names and
device files are invented."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rlhf_core.locks import FileLock, is_held, who_holds
from tasks.stage import gpus
from tasks.stage.gpus import LOCKS_VARIABLE, WITHOUT_GPU, claim_gpus, locked_gpus, visible_gpus

PROJECT = Path(__file__).parents[3]
CLAIM = "import sys; from tasks.stage.gpus import claim_gpus; claim_gpus(int(sys.argv[1])); import os, time; "


@pytest.fixture(autouse=True)
def _locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, which also has the locks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(LOCKS_VARIABLE, str(tmp_path / "locks"))
    yield
    while gpus._held:
        gpus._held.pop().release()


def claim(count: int, then: str) -> "subprocess.Popen[str]":
    """A process that claims GPUs, and then runs these statements."""
    command = [sys.executable, "-u", "-c", CLAIM + then, str(count)]
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("count", "before", "after"),
    [
        (1, "0,1,2,3", "0"),
        (1, "5,GPU-ab", "5"),
        (2, "5,GPU-ab, 7", "5,GPU-ab"),
        (3, "0,1", "0,1"),
        (1, "3", "3"),
        (1, "", ""),
        (1, "-1", "-1"),
        (1, "0,-1,1", "0,-1,1"),
    ],
)
def test_a_stage_gets_the_first_gpus(monkeypatch: pytest.MonkeyPatch, count: int, before: str, after: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    claim_gpus(count)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == after


def test_ranks_keep_the_gpus_that_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("RANK", "0")
    claim_gpus(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_without_a_list_the_device_files_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(tmp_path) == []
    for name in ("nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == ["0", "1"]


def test_the_stages_without_a_model_need_no_gpu() -> None:
    stages = YAML(typ="safe").load((PROJECT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    computing = [name for name, one in stages.items() if "rlhf_core/models" in " ".join(one["deps"])]
    assert sorted(set(stages) - set(computing)) == sorted(WITHOUT_GPU)


def test_a_second_stage_takes_the_next_gpu_and_a_third_waits_and_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    claim_gpus(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    shown = "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    with claim(1, f"{shown}; time.sleep(60)") as second:
        assert second.stdout is not None
        assert second.stdout.readline() == "1\n"
        with claim(1, shown) as third:
            assert third.stdout is not None
            line = third.stdout.readline()
            assert line.startswith("waits for 1 free GPU (GPU 0: process ")
            assert re.search(rf"GPU 1: process {second.pid}, user \w+, since \d\d:\d\d, .*, in {Path.cwd()}", line)
            second.kill()
            assert third.communicate(timeout=30)[0] == "1\n", "the lock of a killed process is free"


def test_a_stage_of_two_processes_waits_for_two_and_blocks_nobody_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    busy = FileLock(tmp_path / "locks" / "0.lock", shared=True)
    (tmp_path / "locks").mkdir()
    assert busy.acquire()
    with claim(2, "print('began')") as ppo:
        assert ppo.stdout is not None
        assert ppo.stdout.readline().startswith("waits for 2 free GPUs (GPU 0: process ")
        with claim(1, "print(os.environ['CUDA_VISIBLE_DEVICES'])") as sft:
            assert sft.communicate(timeout=30)[0] == "1\n"
        busy.release()
        assert ppo.communicate(timeout=30)[0].endswith("began\n")  # before, it may have seen the other one on GPU 1


def test_the_lock_is_named_after_the_uuid_and_open_to_all_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aa'\necho '1, GPU-bb'\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    before = os.umask(0o077)
    claim_gpus(1)
    os.umask(before)
    (lock,) = (tmp_path / "locks").iterdir()
    assert lock.name == "GPU-bb.lock"
    assert lock.stat().st_mode & 0o777 == 0o666
    assert (tmp_path / "locks").stat().st_mode & 0o7777 == 0o1777
    ((name, who),) = locked_gpus()
    assert name == "1"
    assert who.startswith(f"process {os.getpid()}, ")


@pytest.mark.parametrize("what", ["file", "link"])
def test_a_place_that_is_no_folder_is_named_and_the_stage_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    if what == "file":
        (tmp_path / "locks").touch()
    else:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "locks").symlink_to(tmp_path / "elsewhere")
    claim_gpus(1)
    printed = capsys.readouterr().out
    assert printed == (
        f"GPUs are not locked ({tmp_path / 'locks'} is not a folder; remove it): another stage may use the same one at "
        "the same time\n"
    )


def test_a_link_in_the_place_of_a_lock_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (tmp_path / "locks").mkdir()
    (tmp_path / "precious").write_text("kept", encoding="utf-8")
    (tmp_path / "locks" / "0.lock").symlink_to(tmp_path / "precious")
    claim_gpus(1)
    assert (tmp_path / "precious").read_text(encoding="utf-8") == "kept"
    assert "GPUs are not locked" in capsys.readouterr().out


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", ["pipe", "link"])
def test_what_another_user_has_put_there_does_not_stop_the_look(tmp_path: Path, what: str) -> None:
    """`leash doctor` and the waiting line read the locks."""
    place = tmp_path / "0.lock"
    if what == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(tmp_path / "elsewhere")
    assert is_held(place) is False
    assert who_holds(place) == ""
