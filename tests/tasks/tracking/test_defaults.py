"""Defaults beside the parameters of a run, for what shows or compares them."""

from tasks.tracking.defaults import filled, filled_of_stage


def test_numbers_are_written_alike_and_none_is_rounded() -> None:
    found = filled({"ppo.learning_rate": "1.00000001e-4", "ppo.kl.coef": "2.0", "ppo.lam": "1"})
    assert found["ppo.learning_rate"] == "0.000100000001"
    assert (found["ppo.kl.coef"], found["ppo.lam"]) == ("2", "1")
    assert found["ppo.clip_ratio"] == "0.2"


def test_a_stage_has_the_defaults_of_its_own_blocks() -> None:
    found = filled_of_stage("ppo", {"ingest.source": "demo", "ppo.learning_rate": "0.001"})
    assert found["ppo.clip_ratio"] == "0.2"
    assert [name for name in found if not name.startswith("ppo.")] == ["ingest.source"]
