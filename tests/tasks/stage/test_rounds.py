"""Which rounds are closed, and what the present round begins with."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_core.errors import UserError
from tasks.stage import rounds

Close = Callable[[Path, int], None]


def test_without_closed_rounds_the_sft_model_is_the_start(tmp_path: Path) -> None:
    assert (rounds.last_closed(tmp_path), rounds.start_of(tmp_path)) == (0, "models/sft")
    (tmp_path / "rounds").mkdir()
    (tmp_path / "rounds/README.md").touch()
    assert (rounds.last_closed(tmp_path), rounds.start_of(tmp_path)) == (0, "models/sft")


def test_a_round_starts_with_the_policy_of_the_last_closed_one(tmp_path: Path, close_round: Close) -> None:
    for number in range(1, 12):
        close_round(tmp_path, number)
    assert rounds.start_of(tmp_path) == "rounds/11/policy"
    assert rounds.read_note(tmp_path, 2)["round"] == 2
    with pytest.raises(UserError, match=r"round 12 is not closed; closed rounds: 11"):
        rounds.read_note(tmp_path, 12)


def test_what_is_no_closed_round_is_refused_with_what_to_do(tmp_path: Path, close_round: Close) -> None:
    for number in (1, 2, 3):
        close_round(tmp_path, number)
    (tmp_path / "rounds/3.dvc").unlink()
    with pytest.raises(UserError, match=r"rounds/3: no closed round .*`leash round` finishes it"):
        rounds.last_closed(tmp_path)
    (tmp_path / "rounds/3.dvc").touch()
    (tmp_path / "rounds/3/round.json").unlink()
    with pytest.raises(UserError, match=r"rounds/3: its files are not here; `dvc checkout`"):
        rounds.last_closed(tmp_path)
    (tmp_path / "rounds/3/round.json").touch()
    (tmp_path / "rounds/2.dvc").rename(tmp_path / "rounds/4.dvc")
    (tmp_path / "rounds/2").rename(tmp_path / "rounds/4")
    with pytest.raises(UserError, match=r"rounds/2.dvc: missing, but round 4 is closed"):
        rounds.last_closed(tmp_path)


def test_each_round_has_its_own_seed_and_the_first_has_that_of_the_parameters() -> None:
    found = [rounds.seed_of(seed, number) for seed in (1, 2) for number in (1, 2, 3)]
    assert (found[0], found[3]) == (1, 2)
    assert len(set(found)) == 6
    assert all(0 <= seed < 2**32 for seed in found)
    assert rounds.seed_of(1, 2) == found[1]
