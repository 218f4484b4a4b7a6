"""Stage `check_data`: reads and checks the raw data before DVC removes any output, and writes a constant that `ingest`
depends on."""

from rlhf_core.config.block import Block
from rlhf_core.data.chat import opening
from rlhf_core.errors import UserError
from tasks.datasets.prepare import Prepared, prepare
from tasks.datasets.sources.datasets import rows_by_use
from tasks.datasets.sources.example import RAW
from tasks.evaluation.prompts import read_questions, refuse_training_prompts
from tasks.params.evaluate import HELDOUT, EvaluateParams
from tasks.params.ingest import IngestParams
from tasks.params.preferences import PreferencesParams
from tasks.stage.run import run
from tasks.stage.stage import Stage

CONSTANT = "data/check_data.ok"


def execute(stage: Stage[Block]) -> None:
    """Raise UserError for raw data that `ingest` or a later stage would refuse."""
    prepared = prepare(cheapest(stage.block("ingest", IngestParams)), RAW, stage.state_dir / "datasets", stage.say)
    require_pairs(prepared, stage.block("preferences", PreferencesParams).source)
    prompts = stage.block("evaluate", EvaluateParams).prompts
    if prompts != HELDOUT:
        check_prompts(prompts, prepared)
    stage.out(CONSTANT).write_text("the raw data can be used\n", encoding="utf-8")


def cheapest(params: IngestParams) -> IngestParams:
    """Parameters that are refused for the same reasons: of the demo's answers, one for each prompt is enough, unless
    repeated ones are refused."""
    if params.source != "demo" or params.demo is None or params.on_bad_row == "refuse":
        return params
    return params.model_copy(update={"demo": params.demo.model_copy(update={"demonstrations_per_prompt": 1})})


def require_pairs(prepared: Prepared, source: str) -> None:
    """Raise UserError when the reward model's pairs are to come from the data, and the data bring too few."""
    if source == "judge":
        return
    uses = rows_by_use(prepared.divided)
    for use, split in (("reward_train", "training"), ("reward_validation", "validation")):
        if not uses["pair", use]:
            raise UserError(
                f"preferences.source is {source}, but the data bring no pairs for the reward model's {split}: add rows "
                "with prompt, chosen and rejected, or raise ingest.split.preferences"
            )


def check_prompts(name: str, prepared: Prepared) -> None:
    """Raise UserError for a file of evaluation prompts that cannot be read or holds training prompts."""
    rows = read_questions(RAW, name)
    asked = {opening(row["prompt"]) for row in rows}
    training = [
        {"prompt": example.prompt}
        for share, members in prepared.divided.shares.items()
        if share != "heldout"
        for example in members
        if example.opening in asked
    ]
    refuse_training_prompts(name, rows, {"the training data": training})


if __name__ == "__main__":
    run("check_data", Block, execute, tracked=False)
