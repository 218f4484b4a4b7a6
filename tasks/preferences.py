"""Stage `preferences`: samples from the SFT model, judged into pairs, and the pairs of the data."""

from tasks.judging.preference_pairs import make_pairs
from tasks.params.preferences import PreferencesParams
from tasks.stage.stage import Stage
from tasks.training.gold_judge import judge_of


def execute(stage: Stage[PreferencesParams]) -> None:
    """Make data/preferences/{samples,preferences}.jsonl and metrics/preferences.json."""
    make_pairs(stage, judge_of(stage))
