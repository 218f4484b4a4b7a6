"""The held-out prompts that are answered along a PPO run."""

from tasks.training.ppo_loop import READ, drawn


def test_the_watched_prompts_are_drawn_by_seed_and_fixed_for_a_run() -> None:
    """Not the first twenty; in the order of the data."""
    rows = [{"prompt_id": str(place)} for place in range(100)]
    found = drawn(rows, seed=1)
    assert len(found) == READ
    assert found == drawn(rows, seed=1)
    assert found != drawn(rows, seed=2)
    assert found != rows[:READ]
    assert found == sorted(found, key=lambda row: int(row["prompt_id"]))


def test_few_prompts_are_all_watched() -> None:
    rows = [{"prompt_id": str(place)} for place in range(3)]
    assert drawn(rows, seed=1) == rows
