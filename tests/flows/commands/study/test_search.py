"""A search that was killed continues: what it was trying comes first, and counts once."""

from pathlib import Path

from flows.commands.study.trials import Search, read_space

SPACE = read_space(["ppo.kl.coef=interval(0.1,0.5)", "ppo.vf_coef=interval(0.1,0.5)"], [])


def settings(folder: Path, count: int) -> list[tuple[str, ...]]:
    """What a process tries until it is killed in the last one; all others are given a score."""
    search = Search(folder / "search.json", SPACE, 4, maximise=True)
    found = []
    for place in range(count):
        trial, values = search.next()
        found.append(values)
        if place < count - 1:
            search.study.tell(trial, 1.0)
    return found


def test_a_later_process_begins_with_the_settings_of_the_earlier_ones(tmp_path: Path) -> None:
    """Also where one that tries a setting again is killed."""
    first = settings(tmp_path, 2)
    assert settings(tmp_path, 1) == first[:1]
    found = settings(tmp_path, 4)
    assert found[:2] == first
    assert len(set(found)) == 4
    assert settings(tmp_path, 4) == found
