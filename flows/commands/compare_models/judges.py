"""The judge of `leash compare-models`: a function, a model folder, or the block `judge` of a parameter file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flows.commands.chat import project_settings
from rlhf_core.data.chat import Conversation
from rlhf_core.data.classifiers import output_of
from rlhf_core.data.scorer import Answers, Scorer
from rlhf_core.data.tokenizer import classifier_tokenizer, encode_prompt, encode_response, load_tokenizer
from rlhf_core.errors import UserError
from rlhf_core.evaluation.judge_model import LanguageModelJudge
from rlhf_core.evaluation.judges import RubricJudge
from rlhf_core.evaluation.pair_judges import CachedPairJudge, PairJudge
from rlhf_core.functions.process import RewardFunction
from rlhf_core.inspect.dialogue import ChatModel, load_chat_model
from rlhf_core.loading import load_config, loading
from rlhf_core.models.scorers import TextScorer
from tasks.judging.pair_judge import pair_judge_of
from tasks.params.judge import LANGUAGE_MODELS, JudgeParams
from tasks.params.loader import parse, read_yaml
from tasks.params.runtime import FunctionParams, RuntimeParams
from tasks.params.scorer import FOLDER, default_terms
from tasks.stage.dvc_files import digest
from tasks.stage.interrupts import Interrupts
from tasks.stage.outputs import Outputs
from tasks.stage.stage import Common, Stage
from tasks.training.scalar_models import ScalarModels
from tasks.training.scorer import REWARD, build_scorer, text_scorer


@dataclass(frozen=True)
class Judge:
    """Scores single answers, or compares two."""

    scorer: Scorer | None = None
    pairs: PairJudge | None = None
    tokenizer: Any = None
    """Of the reward model of a run, which reads token ids; None for one that reads texts."""

    @property
    def name(self) -> str:
        """In the table."""
        one = self.scorer or self.pairs
        assert one is not None
        return one.name

    def scores(self, rows: list[dict[str, Any]], texts: list[str]) -> list[float] | None:
        """A score for each answer to the prompts of `rows`; None for a judge of pairs. Raises UserError where an answer
        cannot be scored."""
        if self.scorer is None:
            return None
        prompts, extras = [row["prompt"] for row in rows], [row["extra"] for row in rows]
        if self.tokenizer is None:
            return self.scorer(Answers(prompts, texts, rows=extras)).total
        ids = [encode_prompt(self.tokenizer, prompt) for prompt in prompts]
        responses = [encode_response(self.tokenizer, text, ended=False) for text in texts]  # the scorer adds the end
        return self.scorer(Answers(prompts, texts, ids, responses, extras)).total


def load_model(folder: Path) -> ChatModel:
    """The language model of a folder, for inference, in the precision of its project. Raises UserError as
    `load_chat_model`."""
    trusted, precision = project_settings(folder)
    found = load_chat_model(folder, str(folder), trust_remote_code=trusted, precision=precision)
    if found.tokenizer.pad_token_id is None:  # padding is masked, so any token will do
        found.tokenizer.pad_token = found.tokenizer.eos_token
    return found


def judge_of(
    path: Path, prompts: list[Conversation], max_new_tokens: int, batch_size: int, seed: int, continues: bool
) -> Judge:
    """The judge at `path`. `continues`: the compared models continue texts, without turns.

    Raises UserError, naming the kind, where the file or folder has no judge, and where its context is too short.
    """
    key = f"--judge {path}"
    if path.suffix == ".py":
        limits = FunctionParams()
        place = path.absolute()
        function = RewardFunction(place.parent, place.name, limits.timeout_seconds, limits.memory_mb, "--judge")
        return Judge(function)
    if path.is_dir():
        return _of_folder(path, key, prompts, max_new_tokens, batch_size, continues)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"{key}: expected a file *.py, a model folder, or a file *.yaml with a block judge")

    content = read_yaml(path)
    block, root = content.get("judge"), path.absolute().parent
    if block is None:
        raise UserError(f"{key}: has no block judge; docs/parameters.md has its keys")
    params = parse(JudgeParams, block, "judge", path)
    if params.kind == "data":
        if (content.get("ingest") or {}).get("source") != "demo":
            raise UserError(f"{key}: judge.kind is data, which only the demo's data have; choose another kind")
        return Judge(RubricJudge())
    runtime = parse(RuntimeParams, content.get("runtime") or {}, "runtime", path)
    trusted, precision = content.get("trust_remote_code") is True, content.get("precision", "float32")
    if params.kind in LANGUAGE_MODELS:
        common = Common(
            threads=torch.get_num_threads(), seed=seed, long_rows="refuse", trust_remote_code=trusted,
            precision=precision, runtime=runtime,
        )  # fmt: skip
        state = root / "work" / "compare-models" / digest(block)[:16]  # an endpoint's verdicts stay there
        if params.kind == "api":
            state.mkdir(parents=True, exist_ok=True)
        stage = Stage[Any](
            name="compare-models", key="", root=root, params=params, common=common, blocks={"judge": block},
            state_dir=state, outputs=Outputs(root, []), live=None, label="[compare-models]", rows={}, hashes={},
            interrupts=Interrupts(),
        )  # fmt: skip
        return Judge(pairs=pair_judge_of(stage, prompts, max_new_tokens, batch_size))
    if params.function is not None:
        limits = runtime.functions
        place = root / FOLDER
        return Judge(RewardFunction(place, params.function, limits.timeout_seconds, limits.memory_mb, "judge.function"))
    assert params.model is not None  # the parameters' own check
    models = ScalarModels(trusted, precision)
    return Judge(text_scorer(root, params.model, params, "judge.model", models, batch_size, continues))


def _of_folder(
    folder: Path, key: str, prompts: list[Conversation], max_new_tokens: int, batch_size: int, continues: bool
) -> Judge:
    """A reward model or classifier scores, a language model compares. `models/reward` of a project is read as that
    project does."""
    trusted, precision = project_settings(folder)
    with loading(folder):
        config = load_config(folder, None, trusted) if (folder / "config.json").is_file() else None
    if config is None:
        raise UserError(f"{key}: holds no model (no config.json); name a model folder")
    if not any(str(name).endswith("ForSequenceClassification") for name in config.architectures or ()):
        chat = load_model(folder)
        model = LanguageModelJudge(chat.model, chat.tokenizer, name=str(folder), batch_size=batch_size)
        model.require_room(prompts, max_new_tokens)
        return Judge(pairs=CachedPairJudge(model))
    models, place = ScalarModels(trusted, precision), folder.absolute()
    if place.parts[-2:] == Path(REWARD).parts and (place.parents[1] / "dvc.yaml").is_file():
        tokenizer = load_tokenizer(place, trust_remote_code=trusted)
        own = build_scorer(place.parents[1], default_terms(), FunctionParams(), tokenizer, batch_size, models)
        return Judge(own, tokenizer=tokenizer)
    labels = [str(config.id2label[i]) for i in range(config.num_labels)]
    if len(labels) > 1:
        raise UserError(
            f"{key}: has {len(labels)} outputs ({', '.join(labels)}); write a file *.yaml with judge: {{kind: "
            "reward_model, model: NAME, label: LABEL} and name that (docs/how-to/other-trainers.md)"
        )
    tokenizer, reads = classifier_tokenizer(folder, None, continues, key, trusted)
    scorer = TextScorer(
        models.classifier(folder, None), tokenizer, str(folder), reads, output_of(labels, None, key), batch_size
    )
    return Judge(scorer)
