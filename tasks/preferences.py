"""Stage `preferences`: samples from the SFT model, judged into pairs, and the pairs of the data."""

from tasks.params.preferences import PreferencesParams
from tasks.params.scorer import REWARD_MODEL
from tasks.stage.run import quiet_libraries, run
from tasks.stage.stage import Stage
from tasks.stage.switched_off import NO_PAIRS, NO_REWARD_MODEL, write_switched_off


def execute(stage: Stage[PreferencesParams]) -> None:
    """Make data/preferences/{samples,preferences}.jsonl and metrics/preferences.json; empty where `scorer` has no
    reward model, and where it learns from ratings."""
    if not stage.blocks[REWARD_MODEL]:
        write_switched_off(stage, why=NO_REWARD_MODEL)
        return
    if stage.params.source == "ratings":
        write_switched_off(stage, why=NO_PAIRS)
        return
    # Imported late: a stage that is switched off does not load torch.
    from tasks.judging.preference_pairs import make_pairs
    from tasks.training.gold_judge import judge_of

    quiet_libraries()
    make_pairs(stage, judge_of(stage))


if __name__ == "__main__":
    run("preferences", PreferencesParams, execute)
