"""Which judge the data of a run have. The demo world has its rubric; human pairs have none."""

from typing import Any

from rlhf_core.data.scorer import Scorer
from rlhf_core.evaluation.judges import RubricJudge
from tasks.stage.stage import Stage


def judge_of(stage: Stage[Any]) -> Scorer | None:
    """The hidden judge of the run's data, or None where only people could judge."""
    return RubricJudge() if stage.blocks["ingest"]["source"] == "demo" else None
