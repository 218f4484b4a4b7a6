"""Stage `check_data`: reads and checks the raw data before DVC removes any output, and writes a constant that `ingest`
depends on."""

from collections.abc import Iterator

from rlhf_core.config.block import Block
from rlhf_core.data.chat import opening
from rlhf_core.errors import UserError
from tasks.datasets.named import read_prompts, read_text, refuse_training_prompts
from tasks.datasets.prepare import Prepared, prepare
from tasks.datasets.raw import hashes_of_files, hashes_of_reward_base
from tasks.datasets.sources.example import RAW, Example
from tasks.datasets.sources.ratings import rating_of
from tasks.datasets.sources.splits import Share
from tasks.params.ingest import IngestParams
from tasks.params.loader import RAW_FILES, SFT_ENABLED
from tasks.params.preferences import PreferencesParams
from tasks.params.scorer import REWARD_MODEL
from tasks.stage.stage import Stage

CONSTANT = "data/check_data.ok"


def execute(stage: Stage[Block]) -> None:
    """Raise UserError for raw data that `ingest` or a later stage would refuse."""
    params, cache = cheapest(stage.block("ingest", IngestParams)), stage.state_dir / "datasets"
    rewarded = stage.blocks[REWARD_MODEL]
    prepared = prepare(params, RAW, cache, stage.log, stage.blocks[SFT_ENABLED], rewarded)
    if rewarded:
        require_pairs(prepared, stage.block("preferences", PreferencesParams).source)
        require_ratings(prepared, stage.block("ingest", IngestParams).rating_column)
    named = stage.blocks[RAW_FILES]
    if named["prompts"] is not None:
        check_prompts(named["prompts"], prepared)
    for text in named["texts"]:
        read_text(RAW, text)
    hashes_of_files(RAW, named["pretrained"])
    hashes_of_reward_base(RAW, named["reward_base"])
    stage.out(CONSTANT).write_text("the raw data can be used\n", encoding="utf-8")


def cheapest(params: IngestParams) -> IngestParams:
    """Parameters with which data are refused for the same reasons. With the demo's data, one answer for each prompt is
    enough, unless repeated rows are refused."""
    if params.source != "demo" or params.demo is None or params.on_bad_row == "refuse":
        return params
    return params.model_copy(update={"demo": params.demo.model_copy(update={"demonstrations_per_prompt": 1})})


def require_pairs(prepared: Prepared, source: str) -> None:
    """Raise UserError when the reward model's pairs come from the data alone, and the data have too few."""
    if source != "dataset":
        return
    pairs = (example for example in in_share(prepared, "preferences") if example.kind == "pair")
    found = {prepared.assignment.split(example) for example in (*pairs, *prepared.labels)}
    for split in ("train", "validation"):
        if split not in found:
            raise UserError(
                f"preferences.source is {source}, but the data have no pairs for the reward model ({split} split): "
                "add rows with prompt, chosen and rejected, raise ingest.split.preferences, or score by functions "
                "alone (`scorer` without reward_model)"
            )


def require_ratings(prepared: Prepared, column: str | None) -> None:
    """Raise UserError when the reward model learns from ratings, and a split has no two that differ."""
    if column is None:
        return
    found: dict[str, set[float | None]] = {"train": set(), "validation": set()}
    for example in in_share(prepared, "preferences"):
        found[prepared.assignment.split(example)].add(rating_of(example, column))
    for split, ratings in found.items():
        if len(ratings - {None}) < 2:
            raise UserError(
                f"ingest.rating_column is {column}, but the reward model's {split} split has no two demonstrations "
                "(text, or prompt and response) with different ratings there: correct the column's name, add rows, or "
                "raise ingest.split.preferences"
            )


def in_share(prepared: Prepared, *shares: Share) -> Iterator[Example]:
    """The clean rows whose prompt is in one of these shares."""
    return (example for example in prepared.kept if not prepared.assignment.share[example.opening].isdisjoint(shares))


def check_prompts(name: str, prepared: Prepared) -> None:
    """Raise UserError for a file of evaluation prompts that cannot be read or holds training prompts."""
    rows = read_prompts(RAW, name)
    prompts = {opening(row["prompt"]) for row in rows}
    trained = (*in_share(prepared, "demonstrations", "preferences", "ppo"), *prepared.labels)
    training = [{"prompt": example.prompt} for example in trained if example.opening in prompts]
    refuse_training_prompts(name, rows, {"the training data": training})
