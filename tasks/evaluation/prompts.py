"""The evaluation prompts: the held-out prompts of the data, or those of a file of the user's."""

from typing import Any

from tasks.datasets.jsonl import Row
from tasks.datasets.raw import EVALUATION_PROMPTS
from tasks.params.evaluate import HELDOUT, EvaluateParams
from tasks.stage.stage import Stage


def evaluation_prompts(stage: Stage[Any], params: EvaluateParams) -> list[Row]:
    """The first `params.max_prompts` rows {prompt_id, prompt, response}; response is a demonstration or None. With
    further columns in the data the rows have `extra`, too. The stage must depend on EVALUATION_PROMPTS."""
    rows = stage.read(EVALUATION_PROMPTS)
    if params.prompts != HELDOUT and len(rows) > params.max_prompts:
        stage.log(f"evaluate.prompts: the first {params.max_prompts} of {len(rows)} prompts (evaluate.max_prompts)")
    return rows[: params.max_prompts]


def source_of(params: EvaluateParams) -> str:
    """The source of the prompts, for error messages."""
    if params.prompts == HELDOUT:
        return "data/ingest/heldout.jsonl"
    return f"data/raw/{params.prompts}, distinct prompts"
