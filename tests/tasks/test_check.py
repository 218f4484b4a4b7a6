"""The stage `check`: reward functions are tried before any training, and DVC finds the scorer in data/methods.json."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlhf_core.config.ppo import TextConfig
from rlhf_core.errors import UserError
from tasks import check
from tasks.params.all import Params
from tasks.params.evaluate import HELDOUT as EVALUATE_HELDOUT
from tasks.params.loader import HELDOUT, PTX_FILE, parse, read_yaml, with_derived
from tasks.params.methods import METHODS
from tasks.params.scorer import DEFAULT
from tests.conftest import EXAMPLES
from tests.elsewhere import save_classifier, save_reward_model

ROOT = Path(__file__).resolve().parents[2]
GOOD = "def score(prompts, responses, rows):\n    return [1.0] * len(responses)\n"


@pytest.fixture
def execute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_stage: Callable[..., Any]
) -> Callable[..., dict[str, Any]]:
    """execute(scorer, **files) -> data/methods.json with the tiny parameters, these terms and files of rewards/."""
    monkeypatch.chdir(tmp_path)

    def call(
        scorer: Any,
        judge: str | None = None,
        quantize: str = "none",
        evaluate: Mapping[str, float] | None = None,
        changes: Mapping[str, Any] | None = None,
        **files: str,
    ) -> dict[str, Any]:
        content = read_yaml(ROOT / "examples/tiny.yaml")
        content["ppo"]["critic"]["init"] = "reward" if scorer is None else "sft"
        content["dpo"]["enabled"] = False
        content["ppo"]["lora"] = {"rank": 2, "quantize": quantize}
        content["precision"] = "bfloat16" if quantize == "nf4" else "float32"
        content["evaluate"].update(evaluate or {})
        for key, value in (changes or {}).items():
            *blocks, name = key.split(".")
            reduce(lambda found, part: found[part], blocks, content)[name] = value
        if judge is not None:
            content["judge"] = {"kind": "function", "function": judge}
        YAML().dump(content | ({} if scorer is None else {"scorer": scorer}), tmp_path / "params.yaml")
        for name, text in files.items():
            (tmp_path / "rewards").mkdir(exist_ok=True)
            (tmp_path / "rewards" / f"{name}.py").write_text(text, encoding="utf-8")
        stage = make_stage("check", None, ["data/check.ok", "data/methods.json"])
        check.execute(stage)
        stage.outputs.commit()
        found: dict[str, Any] = json.loads((tmp_path / "data/methods.json").read_text())
        return found

    return call


def test_a_file_without_the_block_has_the_reward_model(execute: Callable[..., dict[str, Any]]) -> None:
    found = execute(None)
    assert list(found) == [
        "round",
        *(method.name for method in METHODS),
        "scorer",
        "reward_model",
        "sft_enabled",
        "precision",
        "deterministic",
        "raw_files",
        "answers",
    ]
    assert found["raw_files"] == {"prompts": None, "texts": [], "pretrained": None, "reward_base": None}
    assert (found["scorer"], found["reward_model"]) == (DEFAULT, True)
    assert (found["precision"], found["deterministic"]) == ("float32", True)


def test_other_settings_of_evaluate_than_of_ppo_are_a_remark(
    execute: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    execute(None)
    assert "remark" not in capsys.readouterr().out
    execute(None, evaluate={"temperature": 0.7, "max_new_tokens": 20, "max_prompt_tokens": 9})
    said = capsys.readouterr().out
    assert "remark: evaluate.temperature is 0.7, and ppo.temperature is 1.0" in said
    assert "remark: evaluate.max_new_tokens is 20, and ppo.max_new_tokens is 24" in said
    assert "remark: evaluate.max_prompt_tokens is 9, and ppo.max_prompt_tokens is null" in said


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ppo.lam": 0.8}, True),  # 0.8^24 = 0.005
        ({"ppo.lam": 0.9}, False),  # 0.9^24 = 0.08
        ({"ppo.lam": 0.8, "ppo.critic.warmup_steps": 2}, False),
        ({"ppo.lam": 0.8, "ppo.advantage": "reinforce"}, False),
        ({"ppo.lam": 0.8, "base.source": "scratch"}, False),
    ],
)
def test_a_pretrained_run_whose_score_reaches_early_tokens_by_an_untrained_critic_only_gets_a_remark(
    execute: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str], changes: dict[str, Any], expected: bool
) -> None:
    pretrained = {"base.source": "pretrained", "base.pretrained": {"model": "folder"}}
    execute(None, changes=pretrained | changes)
    assert ("remark: ppo.lam^ppo.max_new_tokens is 4.7e-03: the score" in capsys.readouterr().out) == expected


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_valid_and_those_of_pretrained_models_suit_them(path: Path) -> None:
    params = parse(Params, read_yaml(path))
    if params.base.source == "pretrained":
        ppo = params.ppo
        assert (ppo.lam, ppo.gamma, ppo.optimizer.eps) == (1.0, 1.0, 1e-8)
        assert min(10, ppo.steps / 12) <= ppo.critic_warmup_steps <= ppo.steps / 5
        assert ppo.micro_batch_size >= 64, "micro_batch_tokens is the limit, so that passes are full"
        assert ppo.micro_batch_tokens is not None
    for key in ("temperature", "max_new_tokens"):
        assert getattr(params.ppo, key) == getattr(params.evaluate, key)


def test_functions_are_tried_with_empty_lists(execute: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    terms = [{"term": "mine.py", "weight": 2}, {"term": "reward_model", "weight": 0.5}]
    text = f"{GOOD}".replace("    return", "    assert [prompts, responses, rows] == [[], [], []]\n    return")
    assert execute(terms, mine=text)["reward_model"] is True
    assert execute(terms[:1], mine=text) | {} == execute(terms[:1])
    assert execute(terms[:1])["reward_model"] is False
    assert sorted(path.name for path in (tmp_path / "rewards").iterdir()) == ["mine.py"], "no bytecode is left"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, r"scorer: mine\.py: the file does not exist"),
        ("def score(", "cannot be imported: SyntaxError"),
        ("def points(a, b, c): return []", "has no function `score"),
        ("def score(prompts): return []", "TypeError: .* takes 1 positional argument"),
        ("def score(prompts, responses, rows): return None", "returned NoneType, not a list of numbers"),
        ("def score(prompts, responses, rows): return [1.0]", "returned 1 scores for 0 answers"),
    ],
)
def test_what_a_function_lacks_is_found_before_anything_runs(
    execute: Callable[..., dict[str, Any]], tmp_path: Path, text: str | None, said: str
) -> None:
    execute([{"term": "good.py", "weight": 1}], good=GOOD)
    before = (tmp_path / "data/methods.json").read_bytes()
    files = {} if text is None else {"mine": text}
    with pytest.raises(UserError, match=f"mine.py: .*{said}|{said}.*; correct rewards/mine.py$"):
        execute([{"term": "good.py", "weight": 1}, {"term": "mine.py", "weight": 1}], **files)
    assert (tmp_path / "data/methods.json").read_bytes() == before


def test_the_shipped_function_compares_with_the_column_answer(tmp_path: Path) -> None:
    from rlhf_core.data.scorer import Answers
    from rlhf_core.functions.process import RewardFunction

    shutil.copy(ROOT / "rewards/exact.py", tmp_path)
    function = RewardFunction(tmp_path, "exact.py", 20, 1024)
    rows = [{"answer": "12"}, {"answer": 12}, {"answer": "12"}, {"answer": " 1 2"}]
    assert function(Answers([[]] * 4, [" 12\n", "12", "12.", "1 2"], rows=rows)).total == [1, 1, 0, 1]
    with pytest.raises(UserError, match=r"KeyError: 'answer' .*; the columns of its row: label"):
        function(Answers([[{"role": "user", "content": "a"}]], ["12"], rows=[{"label": "12"}]))
    function.close()


def test_the_judges_function_is_tried_too(execute: Callable[..., dict[str, Any]]) -> None:
    execute(None, judge="good.py", good=GOOD)
    with pytest.raises(UserError, match=r"judge\.function: bad\.py: has no function `score.*; correct rewards/bad\.py"):
        execute(None, judge="bad.py", bad="x = 1")


def test_the_shipped_list_counts_praise_less_blame(tmp_path: Path) -> None:
    for name in ("sentiment.py", "sentiment.txt"):
        shutil.copy(ROOT / "rewards" / name, tmp_path)
    from rlhf_core.data.scorer import Answers
    from rlhf_core.functions.process import RewardFunction

    function = RewardFunction(tmp_path, "sentiment.py", 20, 1024)
    texts = [" is a Moving, wonderful joy.", " is dull", " is not good", " isn’t a dull film, and moving", " is", ""]
    assert function(Answers([[]] * 6, texts)).total == [3, -1, -1, 2, 0, 0]
    function.close()


def test_the_shipped_length_term_is_highest_at_twenty_words(tmp_path: Path) -> None:
    from rlhf_core.data.scorer import Answers
    from rlhf_core.functions.process import RewardFunction

    shutil.copy(ROOT / "rewards/length.py", tmp_path)
    function = RewardFunction(tmp_path, "length.py", 20, 1024)
    assert function(Answers([[]] * 4, ["a " * 20, " a" * 15, "a\n" * 30, ""])).total == [0, -0.5, -1, -2]
    function.close()


def test_a_missing_library_is_found_before_any_training(
    execute: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None if name == "bitsandbytes" else name)
    with pytest.raises(UserError, match="pip install 'bitsandbytes"):
        execute(None, quantize="nf4")
    monkeypatch.setattr(check, "find_spec", lambda name: name)
    execute(None, quantize="nf4")


def test_models_from_elsewhere_are_looked_at_before_any_training(
    execute: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    term = {"model": "mood", "weight": 1.0}
    with pytest.raises(UserError, match=r"scorer: models/judges/mood is no Hugging Face folder"):
        execute([term])
    save_classifier(tmp_path / "models/judges/mood")
    save_reward_model(tmp_path / "models/judges/rm")
    with pytest.raises(
        UserError, match=r"scorer: models/judges/mood: has 2 outputs; set label to one of NEGATIVE, POS"
    ):
        execute([term])
    with pytest.raises(UserError, match=r"models/judges/mood: its tokenizer has no chat template"):
        execute([term | {"label": "POSITIVE"}])
    found = execute([term | {"label": "POSITIVE", "reads": "answer"}, {"model": "rm", "weight": 0.5}])
    assert (found["reward_model"], found["scorer"][1]) == (False, {"model": "rm", "weight": 0.5})
    judge = {"kind": "reward_model", "model": "mood", "reads": "pair"}
    with pytest.raises(UserError, match=r"judge\.model: models/judges/mood: has 2 outputs"):
        execute(None, changes={"judge": judge})
    execute(None, changes={"judge": judge | {"label": "NEGATIVE"}})


def test_what_git_has_of_the_gates_is_what_this_params_yaml_makes() -> None:
    """Else `dvc status` in a fresh clone is not clean; `python -m tasks check` writes it."""
    known = with_derived(read_yaml(ROOT / "params.yaml"))
    content: dict[str, Any] = json.loads((ROOT / "data/methods.json").read_text(encoding="utf-8"))
    assert content == {name: known[name] for name in content}
    assert (ROOT / "data/check.ok").read_text(encoding="utf-8") == "params.yaml is valid\n"
    assert (ROOT / "data/check_data.ok").read_text(encoding="utf-8") == "the raw data can be used\n"


def test_the_names_of_raw_files_follow_from_the_parameters() -> None:
    assert (EVALUATE_HELDOUT, TextConfig().file) == (HELDOUT, PTX_FILE)
    content = {
        "base": {"source": "pretrained", "pretrained": {"model": "own"}},
        "ppo": {"ptx": {"coef": 1.0, "file": "a.txt"}},
        "hybrid": {"enabled": True, "settings": {"ptx": {"file": "b.txt"}}},
        "evaluate": {"prompts": "mine.jsonl"},
        "reward": {"base": "other"},
    }
    named = {"prompts": "mine.jsonl", "texts": ["a.txt", "b.txt"], "pretrained": "own", "reward_base": "other"}
    assert with_derived(content)["raw_files"] == named
    assert with_derived({"base": 1, "ppo": [], "evaluate": None})["raw_files"]["texts"] == [], "`check` reports it"
