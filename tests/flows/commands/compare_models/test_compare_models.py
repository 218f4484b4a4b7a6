"""`leash compare-models`: figures of models and of files of answers outside a project, its judges, and what is
refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from flows.cli import app
from flows.commands.score import score_file
from rlhf_core.config.base import ScratchConfig
from rlhf_core.data.tokenizer import encode_prompt, load_tokenizer, train_bpe
from rlhf_core.evaluation.divergence import measure_divergence
from rlhf_core.evaluation.intervals import estimate
from rlhf_core.evaluation.wins import length_controlled_win_rate
from rlhf_core.models.hf import build_llama, load_causal_lm, save_checkpoint, scalar_model_from
from tests.elsewhere import save_classifier, save_language_model, save_reward_model
from tests.tasks.judging.conftest import Server, server  # noqa: F401

TINY = Path(__file__).resolve().parents[4] / "examples" / "tiny.yaml"
PROMPTS = [f"what shall i eat on day {number}?" for number in range(12)]
LENGTH = "def score(prompts, responses, rows):\n    return [float(len(text)) for text in responses]\n"
EXTRA = (
    "def score(prompts, texts, rows):\n    return [float(row['answer'] == text) for row, text in zip(rows, texts)]\n"
)
SHORT = ("--max-new-tokens", "6")


def scratch(folder: Path, seed: int, plain: bool = False) -> None:
    tokenizer = train_bpe(PROMPTS, 300, "<|pad|>", "<|end|>", 96, plain)
    config = ScratchConfig(vocabulary=300, context=96, layers=1, hidden=16, intermediate=16, heads=2)
    save_checkpoint(folder, build_llama(config, tokenizer, seed), tokenizer)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, prompts, answers and judges; no project."""
    root = tmp_path_factory.mktemp("compare")
    scratch(root / "one", 0)
    scratch(root / "two", 1)
    scratch(root / "plain", 2, plain=True)
    save_language_model(root / "other", "qwen2")
    save_reward_model(root / "reward", "qwen2")
    write(root / "prompts.jsonl", [{"prompt": prompt, "answer": "tea"} for prompt in PROMPTS])
    write(root / "tea.jsonl", [{"prompt": prompt, "response": "tea"} for prompt in PROMPTS])
    long = [{"prompt": prompt, "response": f"good tea {'a b ' * i}"} for i, prompt in enumerate(PROMPTS)]
    write(root / "long.jsonl", [*long, {"prompt": "more?", "response": "no"}])
    (root / "length.py").write_text(LENGTH)
    (root / "extra.py").write_text(EXTRA)
    return root


@pytest.fixture(autouse=True)
def _here(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["compare-models", *map(str, words)])


def found(*words: str | Path) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def refused(*words: str | Path) -> str:
    result = run(*words)
    assert result.exit_code == 2, result.output
    [line] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line


def test_models_with_one_tokenizer(made: Path, tmp_path: Path) -> None:
    """Every figure is that of the library's functions on the answers in the folder; the same command gives the same."""
    words = ("one", "two", "--prompts", "prompts.jsonl", "--judge", "length.py", *SHORT)
    content = found(*words, "--out", tmp_path / "out")
    assert found(*words) == content
    assert found(*words, "--seed", "2")["models"] != content["models"]
    assert found(*words, "--batch-size", "5") == content
    assert json.loads((tmp_path / "out/comparison.json").read_text()) == content
    rows = {
        name: [json.loads(line) for line in (tmp_path / "out" / f"{i}-{name}.jsonl").read_text().splitlines()]
        for i, name in ((1, "one"), (2, "two"))
    }
    first, second = ([float(len(row["response"])) for row in rows[name]] for name in ("one", "two"))
    assert [row["score"] for row in rows["two"]] == second
    won = [0.5 if a == b else float(b > a) for a, b in zip(first, second, strict=True)]
    tokens = {name: [row["tokens"] for row in rows[name]] for name in rows}
    extra = np.array(tokens["two"]) - np.array(tokens["one"])
    figures = content["models"]["two"]
    for key, values in (("score", second), ("win_rate", won), ("length", tokens["two"])):
        expected = estimate(values, 2000, 1)
        assert [figures[f"{key}{end}"] for end in ("", "_low", "_high")] == [expected.mean, *expected.interval], key
    assert figures["win_rate_controlled"] == length_controlled_win_rate(won, extra, 2000, 1).mean
    assert content["models"]["one"]["win_rate"] is None
    assert content["models"]["one"]["kl"] == 0
    assert figures["kl"] == pytest.approx(np.mean([row["kl"] for row in rows["two"]]))
    assert figures["kl"] > 0
    assert figures["kl_low"] < figures["kl"] < figures["kl_high"]


def test_kl_is_that_of_the_sampled_answers(made: Path, tmp_path: Path) -> None:
    """With one token, the exact KL of the first token's distribution, at the temperature of the sampling."""
    words = ("one", "two", "--prompts", "prompts.jsonl", "--judge", "length.py", "--max-new-tokens", "1")
    content = found(*words, "--temperature", "0.5")
    tokenizer = load_tokenizer(made / "one")
    ids = [encode_prompt(tokenizer, [{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    models = [load_causal_lm(made / name) for name in ("two", "one")]
    expected = measure_divergence(*models, ids, [[0]] * len(ids), pad_id=0, temperature=0.5, batch_size=3).kl
    assert content["models"]["two"]["kl"] == pytest.approx(np.mean(expected), rel=1e-4)


def test_models_with_other_tokenizers_and_files(made: Path, tmp_path: Path) -> None:
    result = run("one", "other", "tea.jsonl", "--prompts", "prompts.jsonl", "--judge", "length.py", *SHORT,
                 "--out", tmp_path / "out")  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "not measured: tokenizers differ" in next(line for line in lines if line.startswith("other "))
    assert "not measured: answers of a file" in next(line for line in lines if line.startswith("tea.jsonl "))
    assert "12 prompts, judge " in result.stdout
    assert "lengths in tokens of one" in result.stdout
    assert "[compare-models]" not in result.stdout, "progress goes to stderr"
    content = json.loads((tmp_path / "out/comparison.json").read_text())
    again = found(tmp_path / "out/1-one.jsonl", tmp_path / "out/2-other.jsonl", "--judge", "length.py")
    mine, theirs = (list(one["models"].values())[1] for one in (content, again))
    for key in ("score", "score_low", "win_rate", "win_rate_high", "ties", "unfinished_share"):
        assert mine[key] == theirs[key], key


def test_files_alone_with_their_prompts(made: Path) -> None:
    result = run("tea.jsonl", "long.jsonl", "--judge", "length.py", "--json")
    content = json.loads(result.stdout)
    assert "long.jsonl: 1 answers to other prompts are not used" in result.stderr
    assert content["length_unit"] == "words"
    assert content["models"]["long.jsonl"]["win_rate"] == 1
    assert content["models"]["long.jsonl"]["length"] == np.mean([2 + 2 * i for i in range(12)])


def test_a_table_says_what_ended_and_repeated_prompts_are_removed(made: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (made / "tea.jsonl").read_text().splitlines()]
    ended = ["true", "False", "", *["true"] * (len(rows) - 3)]
    lines = [f'"{row["prompt"]}","{row["response"]}",{end}' for row, end in zip(rows, ended, strict=True)]
    (tmp_path / "table.csv").write_text("\n".join(["prompt,response,ended", *lines]))
    write(tmp_path / "echo.jsonl", [row | {"response": f"{row['prompt']} {row['response']}"} for row in rows])
    result = run("tea.jsonl", tmp_path / "table.csv", tmp_path / "echo.jsonl", "--judge", "length.py", "--json")
    tea, table, echo = json.loads(result.stdout)["models"].values()
    assert (tea["unfinished_share"], table["unfinished_share"]) == (0, pytest.approx(1 / len(rows)))
    assert echo["score"] == table["score"] == tea["score"]
    assert f"echo.jsonl: {len(rows)} of {len(rows)} answers begin with their prompt, which was removed" in result.stderr


def test_a_function_gets_the_columns_of_the_prompts(made: Path) -> None:
    content = found("tea.jsonl", "long.jsonl", "--prompts", "prompts.jsonl", "--judge", "extra.py")
    assert [one["score"] for one in content["models"].values()] == [1, 0]


def test_a_model_that_continues_texts(made: Path) -> None:
    content = found("plain", "tea.jsonl", "--prompts", "prompts.jsonl", "--judge", "length.py", *SHORT)
    assert content["models"]["plain"]["length"] > 0


def test_a_reward_model_and_a_language_model_judge(made: Path) -> None:
    content = found("tea.jsonl", "long.jsonl", "--judge", "reward")
    assert content["judged_by"] == "scores"
    assert content["models"]["tea.jsonl"]["score"] is not None
    content = found("tea.jsonl", "long.jsonl", "--judge", "other")
    assert content["judged_by"] == "pairs"
    figures = content["models"]["long.jsonl"]
    assert figures["score"] is None
    assert 0 <= figures["win_rate"] <= 1
    assert -0.5 <= figures["position_bias"] <= 0.5


def test_models_reward_of_a_project_scores_as_leash_score_does(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "one", tmp_path / "models/sft")
    model = scalar_model_from(made / "one", 0)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(1))
    save_checkpoint(tmp_path / "models/reward", model, load_tokenizer(made / "one"))
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    (tmp_path / "params.yaml").write_text(TINY.read_text())
    score_file(tmp_path, made / "tea.jsonl", tmp_path / "scored.jsonl")
    scores = [json.loads(line)["score"] for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    content = found("tea.jsonl", "long.jsonl", "--judge", tmp_path / "models/reward")
    assert content["models"]["tea.jsonl"]["score"] == pytest.approx(np.mean(scores), rel=1e-6)


def test_the_block_judge_of_a_parameter_file(made: Path, tmp_path: Path, server: Server) -> None:  # noqa: F811
    (tmp_path / "rewards").mkdir()
    shutil.copy(made / "length.py", tmp_path / "rewards/length.py")
    save_classifier(tmp_path / "models/judges/mood")
    shutil.copytree(made / "other", tmp_path / "models/judges/llm")
    blocks = {
        "function": "{kind: function, function: length.py}",
        "mood": "{kind: reward_model, model: mood, label: POSITIVE, reads: answer}",
        "llm": "{kind: model, model: llm}",
        "api": f"{{kind: api, model: m, base_url: '{server.url}'}}",
    }
    server.answer = lambda body: server.completion(
        "A" if body["messages"][0]["content"].index("good") < body["messages"][0]["content"].index("\ntea") else "B"
    )
    content = {}
    for name, block in blocks.items():
        (tmp_path / f"{name}.yaml").write_text(f"judge: {block}\n")
        content[name] = found("tea.jsonl", "long.jsonl", "--judge", tmp_path / f"{name}.yaml")["models"]["long.jsonl"]
    assert content["function"]["win_rate"] == 1
    assert content["mood"]["score"] is not None
    assert content["llm"]["self_agreement"] is not None
    assert (content["api"]["win_rate"], content["api"]["self_agreement"]) == (1, 1)
    sent = len(server.bodies)
    assert sent == 2 * len(PROMPTS)
    found("tea.jsonl", "long.jsonl", "--judge", tmp_path / "api.yaml")
    assert len(server.bodies) == sent, "verdicts are kept"
    (tmp_path / "demo.yaml").write_text("ingest: {source: demo}\njudge: {}\n")
    assert found("tea.jsonl", "long.jsonl", "--judge", tmp_path / "demo.yaml")["judge"] == "gold rubric (simulated)"


def test_what_is_refused(made: Path, tmp_path: Path) -> None:
    judge = ("--judge", "length.py")
    write(tmp_path / "twice.jsonl", [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": "c"}])
    write(tmp_path / "few.jsonl", [{"prompt": PROMPTS[0], "response": "b"}])
    write(tmp_path / "bare.jsonl", [{"prompt": "a"}])
    write(tmp_path / "half.jsonl", [{"prompt": "a", "response": "\ud800"}])
    write(tmp_path / "maybe.jsonl", [{"prompt": "a", "response": "b", "ended": "maybe"}])
    write(tmp_path / "same.jsonl", [{"prompt": PROMPTS[0], "reference": name} for name in "ab"])
    write(tmp_path / "empty.jsonl", [{"prompt": " ", "response": "a"}])
    (tmp_path / "data.yaml").write_text("judge: {kind: data}\n")
    (tmp_path / "none.yaml").write_text("seed: 1\n")
    save_classifier(tmp_path / "mood")
    prompts = ("--prompts", "prompts.jsonl")
    for words, said in (
        (("one", "two", *judge), "--prompts: models need prompts"),
        (("one", *prompts, *judge), "give two or more"),
        (("one", "one", *prompts, *judge), "each once"),
        (("one", "nowhere", *prompts, *judge), "nowhere: no such file or folder"),
        (("one", "reward", *prompts, *judge), "reward: has a head for scores"),
        (("one", "two", *prompts, *judge, "--max-new-tokens", "90"), "one: prompt "),
        (("one", "two", *prompts, *judge, "--out", tmp_path), "is there already"),
        (("one", "two", *prompts, *judge, "--temperature", "0"), "give a number above 0"),
        (("tea.jsonl", tmp_path / "twice.jsonl", *judge), "twice.jsonl, row 2: a second answer to the prompt of row 1"),
        (("tea.jsonl", tmp_path / "few.jsonl", *judge), "few.jsonl: no answer to 11 of 12 prompts"),
        (("tea.jsonl", tmp_path / "bare.jsonl", *judge), "bare.jsonl, row 1: no answer"),
        (("tea.jsonl", tmp_path / "half.jsonl", *judge), "half.jsonl, row 1: half a surrogate pair"),
        (("tea.jsonl", tmp_path / "empty.jsonl", *judge), "empty.jsonl, row 1: the prompt is empty"),
        (("tea.jsonl", tmp_path / "maybe.jsonl", *judge), "maybe.jsonl, row 1: ended: expected true, false or nothing"),
        (
            ("tea.jsonl", "long.jsonl", "--prompts", tmp_path / "same.jsonl", *judge),
            "same.jsonl, row 2: a prompt of",
        ),
        (("one", "two", *prompts, "--judge", "other"), "a question of"),
        (("one", "two", *prompts, "--judge", "reward", "--max-new-tokens", "500"), "its context holds 512"),
        (("tea.jsonl", "long.jsonl", "--judge", tmp_path / "data.yaml"), "judge.kind is data"),
        (("tea.jsonl", "long.jsonl", "--judge", tmp_path / "none.yaml"), "has no block judge"),
        (("tea.jsonl", "long.jsonl", "--judge", tmp_path / "mood"), "has 2 outputs (NEGATIVE, POSITIVE)"),
        (("tea.jsonl", "long.jsonl", "--judge", "nowhere.py"), "nowhere.py: the file does not exist"),
        (("tea.jsonl", "long.jsonl", "--judge", "tea.jsonl"), "expected a file *.py, a model folder"),
    ):
        assert said in refused(*words), words
