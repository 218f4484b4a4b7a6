"""Stage `reward`: the tokens that are trained on, the plain folder that LoRA leaves, members, the judging model."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from rlhf_core.config.lora import LoraSettings
from rlhf_core.config.reward import RewardConfig
from rlhf_core.data.scorer import Answers
from rlhf_core.data.tokenizer import encode_prompt, encode_response, load_tokenizer, same_tokens
from rlhf_core.errors import UserError
from rlhf_core.models.batch import in_passes, pad_batch, sequence_scores
from rlhf_core.models.ensemble import Ensemble
from rlhf_core.models.hf import load_scalar_model
from rlhf_core.models.scorers import require_room
from rlhf_core.models.sequence_logprobs import response_logprobs
from rlhf_core.reward import Comparison, bradley_terry_loss, pair_batch, score_pairs, train_reward_model
from rlhf_core.training.loop import Training
from tasks import reward
from tasks.datasets.raw import REWARD_BASE, hashes_of_files, hashes_of_reward_base
from tasks.training import pairs as comparisons
from tasks.training.pairs import PREFERENCES
from tasks.training.ratings import GROUP, RATINGS, rated_comparisons
from tasks.training.scalar_models import ScalarModels
from tasks.training.scorer import _reward_model, judging_scorer_of
from tasks.training.trainer_setup import training_run
from tests.elsewhere import save_language_model
from tests.tasks.conftest import TINY

if TYPE_CHECKING:
    from tasks.stage.stage import Stage
    from tests.conftest import Ended, Project


@pytest.fixture
def row() -> dict[str, Any]:
    """A pair whose chosen side was sampled in tokens that its text would not be cut into."""
    return {
        "chosen": "ab",
        "chosen_ids": [97, 98, 0],
        "chosen_ended": True,
        "rejected": "ab",
        "rejected_ids": None,
        "rejected_ended": True,
    }


def test_failure_05_pairs_are_trained_on_or_measured_on_and_never_both(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparisons, "prompts_once", lambda tokenizer: lambda row: [row["prompt"]])
    row |= {"rejected_ids": [99, 0]}
    rows = [
        row | {"prompt_id": str(n), "prompt": n, "split": "validation" if n % 3 == 0 else "train"} for n in range(9)
    ]
    stage: Any = SimpleNamespace(name="reward", read=lambda path: rows, common=SimpleNamespace(long_rows="refuse"))
    tokenizer: Any = SimpleNamespace(eos_token_id=0)
    prompts = {
        split: {c.prompt[0] for c in comparisons.comparisons(stage, tokenizer, split, 10)[0]}  # type: ignore[arg-type]
        for split in ("train", "validation")
    }
    assert prompts == {"train": {1, 2, 4, 5, 7, 8}, "validation": {0, 3, 6}}


@pytest.mark.parametrize(
    ("reading", "chosen", "rejected"),
    [("sampled", [97, 98], [300]), ("complete", [97, 98, 0], [300, 0]), ("text", [300, 0], [300, 0])],
)
def test_a_reward_model_reads_each_answer_with_its_end(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch, reading: comparisons.Reading, chosen: Any, rejected: Any
) -> None:
    """Both were cut off; sampled tokens stay what they were, but for a stop token. DPO learns from cut answers as they
    are."""
    monkeypatch.setattr(comparisons, "encode_response", lambda tokenizer, text, ended: [300, 0] if ended else [300])
    tokenizer: Any = SimpleNamespace(eos_token_id=0)
    cut = row | {"chosen_ids": [97, 98], "chosen_ended": False, "rejected_ended": False}
    assert comparisons.response_tokens(tokenizer, cut, "chosen", reading, room=9) == chosen
    assert comparisons.response_tokens(tokenizer, cut, "rejected", reading, room=9) == rejected
    if reading != "text":
        stopped = row | {"chosen_ids": [97, 5]}
        assert comparisons.response_tokens(tokenizer, stopped, "chosen", reading, room=9) == [97, 0]
    if reading == "complete":
        assert comparisons.response_tokens(tokenizer, cut, "chosen", reading, room=2) == [97, 0]
        assert comparisons.response_tokens(tokenizer, cut, "chosen", reading, room=1) == [97, 98, 0], "too long"
        assert comparisons.response_tokens(tokenizer, row, "chosen", reading, room=2) == [97, 98, 0], "as it was"


def test_lora_leaves_a_plain_merged_folder(
    finished: "Project", stage_main: Callable[["Project", str], "Ended"]
) -> None:
    """The same files and weights' names as without LoRA, the adapter beside them, and a body that
    differs from SFT's in its linear layers alone."""
    folder = finished.root / "models/reward"
    before = {path.name for path in folder.iterdir()}
    names = load_file(folder / "model.safetensors").keys()
    finished.set("reward.lora", {"rank": 2, "alpha": 4.0})
    finished.set("reward.epochs", 4)  # in one epoch the tiny run has one step, whose learning rate is 0
    finished.set("runtime.tracking", False)
    ended = stage_main(finished, "reward")
    assert ended.code == 0, ended.stderr

    assert {path.name for path in folder.iterdir()} == before | {"lora.json", "lora.safetensors"}
    weights, sft = load_file(folder / "model.safetensors"), load_file(finished.root / "models/sft/model.safetensors")
    assert weights.keys() == names
    changed = {name for name in weights.keys() & sft.keys() if not torch.equal(weights[name], sft[name])}
    assert changed == {name for name in weights if name.endswith("proj.weight")}
    model, loading = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert model.config.num_labels == 1


CONFIG = RewardConfig(learning_rate=1e-2, epochs=2, batch_size=2, warmup_steps=1, weight_decay=0.0, max_tokens=64)
TABLES = [f"plots/{name}.csv" for name in ("reward", "reward_calibration", "reward_margins", "reward_scores")]
OUTS = ["models/reward", "metrics/reward.json", *TABLES]
Train = Callable[..., dict[str, Any]]


@pytest.fixture
def train(workshop: Path, make_stage: Callable[..., Any], pairs: list[dict[str, Any]]) -> Train:
    """train("state", members=3, rows=…) -> the metrics that the stage wrote, for data without a judge."""

    def call(
        state: str = "reward",
        rows: list[dict[str, Any]] | None = None,
        rated: list[dict[str, Any]] | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        config = CONFIG.model_copy(update=settings)
        known = {PREFERENCES: (rows or pairs) if rated is None else [], RATINGS: rated or []}
        stage = make_stage("reward", config, OUTS, known, state=state)
        reward.execute(stage)
        stage.outputs.commit()
        metrics: dict[str, Any] = json.loads((workshop / "metrics/reward.json").read_text())
        return metrics

    return call


def test_a_weak_reward_model_needs_more_training_or_more_pairs(make_stage: Callable[..., Any]) -> None:
    """The first has learned its training pairs no better than others; the second has learned them by heart."""
    figures = {
        f"{name}{end}": value
        for name in ("heldout_accuracy", "length_accuracy", "words_accuracy")
        for end, value in (("", 0.55), ("_low", 0.45), ("_high", 0.65))
    }
    for learned, advice in ((0.62, "raise reward.learning_rate or reward.epochs"), (0.9, "correctly: add pairs")):
        stage = make_stage("reward", CONFIG, OUTS, {})
        reward.log_verdict(stage, {**figures, "heldout_pairs": 48, "train_accuracy": learned})
        (warning,) = stage.warnings
        assert warning.startswith("the reward model is not shown to be better than chance")
        assert warning.endswith(advice)


def test_answers_that_were_cut_off_train_as_those_that_ended(
    train: Train, workshop: Path, pairs: list[dict[str, Any]]
) -> None:
    """The same models, figures and tables."""
    train("whole", judge_share=0.3)
    expected = written(workshop)
    cut = [dict(row) for row in pairs]
    for row in cut:
        for side in comparisons.SIDES:
            row[f"{side}_ended"] = False
            row[f"{side}_ids"] = row[f"{side}_ids"] and row[f"{side}_ids"][:-1]  # null where the data have the text
    train("cut", rows=cut, judge_share=0.3)
    assert written(workshop) == expected


def written(root: Path) -> dict[str, bytes]:
    """Every file of the stage's outs."""
    files = [file for out in OUTS for file in (root / out, *(root / out).rglob("*")) if file.is_file()]
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in files}


def test_the_first_member_is_the_reward_model_of_a_run_without_others(train: Train, workshop: Path) -> None:
    alone = train("alone")
    single = written(workshop)
    assert not any("members" in name or "ensemble" in name or "judge" in name for name in single)
    assert list(alone)[-3:] == ["train_accuracy", "train_loss", "pairs_too_long"]
    together = train("together", members=3, combine="min")
    several = written(workshop)
    assert several["models/reward/model.safetensors"] == single["models/reward/model.safetensors"]
    assert several["plots/reward.csv"] == single["plots/reward.csv"]
    weights = [single["models/reward/model.safetensors"]] + [
        several[f"models/reward/members/{number}/model.safetensors"] for number in (2, 3)
    ]
    assert len(set(weights)) == 3, "other heads, another order of the data"
    assert together["member_1_accuracy"] == alone["heldout_accuracy"]
    assert together["member_1_loss"] == alone["heldout_loss"]
    train("once more")
    assert written(workshop) == single, "nothing is left of the members"


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2, alpha=4.0)])
def test_a_reward_model_on_another_base_reads_the_texts_with_its_own_tokenizer(
    train: Train, workshop: Path, monkeypatch: pytest.MonkeyPatch, pairs: list[dict[str, Any]], lora: Any
) -> None:
    """Trained and used alike, also as a member of several and as the judge; no adapter is kept for the policy's
    body."""
    save_language_model(workshop / "data/raw/other", "qwen2")
    noted = hashes_of_files(workshop / "data/raw", "other")
    monkeypatch.setattr("tasks.stage.stage.Stage.read_json", lambda _, path: noted if path == REWARD_BASE else None)
    metrics = train(base="other", lora=lora, members=2, judge_share=0.5, max_tokens=256)
    assert metrics["heldout_pairs"] == 6
    folder, policy = workshop / "models/reward", TINY.tiny_tokenizer()
    own = load_tokenizer(folder)
    assert not same_tokens(own, policy)
    assert same_tokens(own, load_tokenizer(folder / "judge"))
    assert not list(folder.rglob("lora.*"))

    row = pairs[0]
    ids = [row["chosen_ids"], row["chosen_ids"][:-1]]  # one that ended, and one that was cut off: both are read whole
    answers = Answers([row["prompt"]] * 2, ["eat oats"] * 2, [[3, 4]] * 2, ids)
    models = ScalarModels(device=torch.device("cpu"))
    judge = judging_scorer_of(workshop, policy, 4, models)
    assert judge is not None
    batch = pad_batch([encode_prompt(own, row["prompt"])], [encode_response(own, "eat oats")], 0)
    expected = sequence_scores(load_scalar_model(folder / "judge"), batch).tolist()
    assert judge(answers).total == pytest.approx(expected * 2, abs=1e-5)
    with pytest.raises(UserError, match="its context holds 512"):
        require_room(judge, [row["prompt"]], 510)

    (workshop / "data/raw/other/more.txt").touch()
    with pytest.raises(UserError, match=r"reward\.base: data/raw/other has other files than when `ingest` ran"):
        train("edited", base="other")


def test_each_member_has_its_own_base_and_all_have_the_same_tokenizer(
    train: Train, workshop: Path, monkeypatch: pytest.MonkeyPatch, pairs: list[dict[str, Any]]
) -> None:
    """The members are trained from their bases, which differ by weights and size, and a killed run continues."""
    raw, noted = workshop / "data/raw", dict[str, Any]()
    for seed, name in enumerate(("a", "sub/b")):
        save_language_model(raw / name, "qwen2", seed=seed)
    save_language_model(raw / "other", "gemma")
    noted |= hashes_of_reward_base(raw, ["a", "sub/b", "other"])
    monkeypatch.setattr("tasks.stage.stage.Stage.read_json", lambda _, path: noted if path == REWARD_BASE else None)
    settings: dict[str, Any] = {"members": 2, "judge_share": 0.3, "max_tokens": 256, "learning_rate": 1e-9}
    metrics = train("whole", base=["a", "sub/b"], **settings)
    expected = written(workshop)
    folder = workshop / "models/reward"
    for place, name in (("", "a"), ("members/2", "sub/b"), ("judge", "a")):
        trained, base = (load_file(one / "model.safetensors") for one in (folder / place, raw / name))
        layer = "model.layers.0.mlp.up_proj.weight"
        assert torch.allclose(trained[layer], base[layer], atol=1e-6)
    assert metrics["member_2_accuracy"] is not None

    scorer = _reward_model(folder, TINY.tiny_tokenizer(), 4, ScalarModels(device=torch.device("cpu")))
    ids = [pairs[0]["chosen_ids"]] * 2
    scored = scorer(Answers([pairs[0]["prompt"]] * 2, ["eat oats", "eat figs"], [[3, 4]] * 2, ids))
    assert min(scored.parts["std"]) > 0

    made = 0

    def killed(*arguments: Any) -> Any:
        nonlocal made
        made += 1
        if made == 2:
            raise ZeroDivisionError
        return train_reward_model(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(reward, "train_reward_model", killed)
        with pytest.raises(ZeroDivisionError):
            train("killed", base=["a", "sub/b"], **settings)
    train("killed", base=["a", "sub/b"], **settings)
    assert written(workshop) == expected

    with pytest.raises(UserError, match=r"reward\.base: data/raw/other has another tokenizer than data/raw/a"):
        train("mixed", base=["a", "other"], **settings)
    (raw / "sub/b/more.txt").touch()
    with pytest.raises(UserError, match=r"reward\.base: data/raw/sub/b has other files than when `ingest` ran"):
        train("edited", base=["a", "sub/b"], **settings)


def test_fewer_pairs_are_drawn_by_seed_and_nested(train: Train) -> None:
    """Each with its own answers and no others; the number is in the metrics only where it is set."""
    prompts = [Comparison([place], [[place, n] for n in range(3)], [(0, 1), (2, 0), (0, 1)]) for place in range(20)]

    def drawn(count: int, seed: int = 1) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
        found = reward.draw_pairs(prompts, count, seed)
        assert all({place for pair in c.pairs for place in pair} == set(range(len(c.responses))) for c in found)
        return Counter((tuple(c.responses[i]), tuple(c.responses[j])) for c in found for i, j in c.pairs)

    assert [drawn(count).total() for count in (2, 30, 60)] == [2, 30, 60]
    assert drawn(2) <= drawn(10) <= drawn(30) <= drawn(60)
    assert drawn(10) == drawn(10) != drawn(10, seed=2)
    assert reward.draw_pairs(prompts, 60, 1) == prompts
    metrics = train("some", max_pairs=3, judge_share=0.3)
    assert (metrics["train_pairs"], metrics["heldout_pairs"], metrics["judge_prompts"]) == (3, 6, 2)
    with pytest.raises(UserError, match=r"reward\.max_pairs is 15, and the reward model has 14 training pairs"):
        train("more", max_pairs=15)


def test_the_figures_of_an_ensemble_are_those_of_the_combined_score(
    train: Train, workshop: Path, pairs: list[dict[str, Any]]
) -> None:
    """From the scores of the three folders on the two sides of the validation pairs."""
    metrics = train(members=3, combine="mean_minus_std", std_coef=0.5)
    rule = Ensemble.read(workshop / "models/reward")
    assert rule is not None
    assert (rule.combine, rule.std_coef) == ("mean_minus_std", 0.5)
    folders = [workshop / "models/reward" / name for name in ("", "members/2", "members/3")]
    stage: Any = SimpleNamespace(name="reward", read=lambda path: pairs, common=SimpleNamespace(long_rows="refuse"))
    heldout, _ = comparisons.comparisons(stage, TINY.tiny_tokenizer(), "validation", 64)
    scores = [score_pairs(load_scalar_model(folder), heldout, 0, 2) for folder in folders]
    sides = torch.stack([torch.cat([one.chosen, one.rejected]) for one in scores]).double()
    assert list(rule.means) == pytest.approx(sides.mean(dim=1).tolist(), abs=1e-5)
    centred = sides - sides.mean(dim=1, keepdim=True)
    std = centred.std(dim=0, correction=0)
    total = centred.mean(dim=0) - 0.5 * std
    chosen, rejected = total.chunk(2)
    assert metrics["disagreement"] == pytest.approx(std.mean().item(), abs=1e-5)
    assert metrics["heldout_accuracy"] == pytest.approx((chosen > rejected).double().mean().item())
    assert metrics["heldout_loss"] == pytest.approx(bradley_terry_loss(chosen, rejected).item(), abs=1e-5)
    for number, one in enumerate(scores, start=1):
        assert metrics[f"member_{number}_loss"] == pytest.approx(one.loss, abs=1e-5)


def test_a_run_killed_in_the_third_member_trains_only_what_is_left(
    train: Train, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ends with the same bytes; the judging model comes last."""
    train("whole", members=3, judge_share=0.3)
    expected = written(workshop)
    started, steps = 0, 0

    def killed(*arguments: Any) -> Any:
        nonlocal started
        started += 1
        if started == 3:
            raise ZeroDivisionError
        return train_reward_model(*arguments)

    def watched(training: Training) -> None:
        nonlocal steps
        steps += 1
        step(training)

    step = Training.step
    monkeypatch.setattr(Training, "step", watched)
    monkeypatch.setattr(reward, "train_reward_model", killed)
    with pytest.raises(ZeroDivisionError):
        train("killed", members=3, judge_share=0.3)
    done, steps = steps, 0
    train("killed", members=3, judge_share=0.3)
    assert written(workshop) == expected
    assert done == 2 * 6, "five prompts in batches of two, two epochs"
    assert steps == 6 + 2, "the third member, and the judging model with two prompts"


def test_ppos_reward_model_never_sees_the_pairs_of_the_judging_one(
    train: Train, workshop: Path, pairs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole prompts, drawn by seed; all members learn from the same ones."""
    seen: list[set[tuple[int, ...]]] = []

    def watched(model: Any, training: Any, *more: Any) -> Any:
        seen.append({tuple(comparison.prompt) for comparison in training})
        assert all(len(comparison.pairs) == 2 for comparison in training), "all pairs of a prompt stay together"
        return train_reward_model(model, training, *more)

    monkeypatch.setattr(reward, "train_reward_model", watched)
    metrics = train(members=2, judge_share=0.3)
    first, second, judge = seen
    assert first == second
    assert not first & judge
    assert (len(first), len(judge)) == (metrics["train_prompts"], metrics["judge_prompts"]) == (5, 2)
    everything = {
        tuple(encode_prompt(TINY.tiny_tokenizer(), row["prompt"])) for row in pairs if row["split"] == "train"
    }
    assert first | judge == everything
    judging = workshop / "models/reward/judge"
    AutoModelForSequenceClassification.from_pretrained(judging)
    stage: Any = SimpleNamespace(name="reward", read=lambda path: pairs, common=SimpleNamespace(long_rows="refuse"))
    heldout, _ = comparisons.comparisons(stage, TINY.tiny_tokenizer(), "validation", 64)
    scores = score_pairs(load_scalar_model(judging), heldout, 0, 2)
    assert metrics["judge_accuracy"] == pytest.approx(scores.right.mean().item())
    assert metrics["judge_loss"] == pytest.approx(scores.loss, abs=1e-5)
    low, high = metrics["judge_accuracy_low"], metrics["judge_accuracy_high"]
    assert low <= metrics["judge_accuracy"] <= high


def test_the_split_is_drawn_by_seed_and_neither_part_is_empty() -> None:
    prompts = [Comparison([place], [[1], [2]], [(0, 1)]) for place in range(50)]
    own, judging = reward.split_prompts(prompts, 0.3, 1)
    assert (len(own), len(judging)) == (35, 15)
    assert [one.prompt for one in own] == sorted(one.prompt for one in own)
    assert judging == reward.split_prompts(prompts, 0.3, 1)[1] != reward.split_prompts(prompts, 0.3, 2)[1]
    for share in (0.01, 0.99):
        assert sorted(map(len, reward.split_prompts(prompts[:3], share, 1))) == [1, 2]
    assert reward.split_prompts(prompts, 0.0, 1) == (prompts, [])
    with pytest.raises(UserError, match=r"reward\.judge_share shares the training prompts .* there is only one"):
        reward.split_prompts(prompts[:1], 0.3, 1)


def test_no_prompt_changes_its_reward_model_from_round_to_round(
    make_stage: Callable[..., "Stage[Any]"], pairs: list[dict[str, Any]]
) -> None:
    """What has trained PPO's reward model in one round never trains the judging one in a later round."""

    def prompts_of(rows: list[dict[str, Any]], seed: int) -> list[set[int]]:
        stage = make_stage("reward", None, [], {comparisons.PREFERENCES: rows})
        training, _ = comparisons.comparisons(stage, TINY.tiny_tokenizer(), "train", 64)
        numbers = {tuple(one.prompt): place for place, one in enumerate(training)}
        return [{numbers[tuple(one.prompt)] for one in part} for part in reward.split_prompts(training, 0.4, seed)]

    first = [pair for pair in pairs if pair["split"] == "train"][:8]
    again = [{**pair, "round": 2} for pair in pairs if pair["split"] == "train"]  # also of the prompts of round 1
    second = [*({**pair, "round": 1} for pair in first), *again]
    for seed in range(5):
        own, judging = prompts_of(first, seed)
        assert (len(own), len(judging)) == (2, 2)
        own_now, judging_now = prompts_of(second, seed)
        assert (own_now & {0, 1, 2, 3}, judging_now & {0, 1, 2, 3}) == (own, judging)
        assert (len(own_now), len(judging_now)) == (4, 3), "the share holds for the new prompts, too"


def test_the_curves_of_the_members_have_names_of_their_own(make_stage: Callable[..., Any]) -> None:
    seen: list[str] = []
    stage = make_stage("reward", CONFIG, OUTS)
    stage.live = SimpleNamespace(points=lambda values, step: seen.extend(values))
    for part in ("", "member_2"):
        training_run(stage, ["loss"], part).report(1, 2, {"loss": 0.5})
    assert seen == ["reward/loss", "reward/member_2/loss"]


def test_no_two_seeds_of_a_study_share_a_member() -> None:
    seeds = [reward.member_seed(seed, number) for seed in range(1, 6) for number in range(6)]
    assert len(set(seeds)) == len(seeds)
    assert reward.member_seed(3, 1) == 3


def rated_rows(asked: list[dict[str, Any]], values: Sequence[float]) -> list[dict[str, Any]]:
    """An answer of each value to each of ten prompts; good ones, of a value above 0, begin with another word."""
    return [
        {
            **row,
            "response": f"{'eat' if value > 0 else 'rest'} {'tea ' * number}fig",
            "rating": value,
            "split": "validation" if place % 3 == 2 else "train",
        }
        for place, row in enumerate(asked)
        for number, value in enumerate(values)
    ]


def test_every_two_answers_with_different_ratings_are_a_pair_each_with_its_own_prompt(
    asked: list[dict[str, Any]], make_stage: Callable[..., Any]
) -> None:
    rows, tokenizer = rated_rows(asked, (1.0, 0.0, -0.5, 0.0, 1.0)), TINY.tiny_tokenizer()
    found, _ = rated_comparisons(make_stage("reward", CONFIG, [], {RATINGS: rows}), tokenizer, "train", 64)
    rated = {
        (*encode_prompt(tokenizer, row["prompt"]), *encode_response(tokenizer, row["response"])): row["rating"]
        for row in rows
        if row["split"] == "train"
    }
    assert [len(c.responses) for c in found] == [GROUP] * 4 + [3]
    assert {tuple(ids) for c in found for ids in c.responses} == rated.keys()
    for comparison in found:
        assert comparison.prompt == []
        values = [rated[tuple(ids)] for ids in comparison.responses]
        places = range(len(values))
        assert sorted(comparison.pairs) == [(i, j) for i in places for j in places if values[i] > values[j]]


def test_policies_on_ratings_learn_whole_texts_whose_first_token_is_given() -> None:
    model = TINY.tiny_lm(seed=1)
    texts = [[7, 8, 9, 1], [10, 11, 12, 13, 14, 1], [15, 1]]
    batch, better, worse = pair_batch([Comparison([], texts, [(1, 0)]), Comparison([5], [[6, 1]], [])], 0)
    assert (better.tolist(), worse.tolist()) == ([1], [0])
    found = in_passes(partial(response_logprobs, model), batch)
    whole = response_logprobs(model, batch)
    for row, (given, rest) in enumerate([*((text[:1], text[1:]) for text in texts), ([5], [6, 1])]):
        logits = model(torch.tensor([[*given, *rest]])).logits[0, len(given) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(rest)[:, None]).sum()
        torch.testing.assert_close(whole[row], expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(found[row], expected, atol=1e-4, rtol=0)


def test_a_group_of_equal_ratings_is_left_out_and_nothing_left_is_refused(
    asked: list[dict[str, Any]], make_stage: Callable[..., Any]
) -> None:
    rows = rated_rows(asked, (1.0,) * 5)
    rows[0]["rating"] = 0.0
    stage = make_stage("reward", CONFIG, [], {RATINGS: rows})
    assert len(rated_comparisons(stage, TINY.tiny_tokenizer(), "train", 64)[0]) == 1
    with pytest.raises(UserError, match=r"ratings\.jsonl: no two neighbouring validation ratings differ"):
        rated_comparisons(stage, TINY.tiny_tokenizer(), "validation", 64)


def test_the_reward_model_learns_from_ratings_and_scores_an_answer_behind_its_prompt(
    train: Train, workshop: Path, asked: list[dict[str, Any]]
) -> None:
    """Prompt and answer in one sequence, as in the comparisons, have the score that PPO's scorer reads."""
    metrics = train(rated=rated_rows(asked, (1.0, 0.0)), epochs=20)
    assert metrics["heldout_accuracy"] > 0.9
    assert (metrics["train_ratings"], metrics["heldout_ratings"]) == (14, 6)
    model, tokenizer = load_scalar_model(workshop / "models/reward"), TINY.tiny_tokenizer()
    prompt, answer = encode_prompt(tokenizer, asked[0]["prompt"]), encode_response(tokenizer, "eat tea")
    scores = [sequence_scores(model, pad_batch([p], [a], 0)) for p, a in ((prompt, answer), ([], prompt + answer))]
    assert scores[0].item() == pytest.approx(scores[1].item(), abs=1e-5)
    assert "train_ratings" not in train("pairs")
