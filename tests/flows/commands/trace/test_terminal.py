"""`leash trace`: the table, the page and the JSON of one PPO step, made of the models of a project."""

import hashlib
import json
import math
import re
import shutil
from base64 import b64encode
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from flows.cli import app
from flows.commands.trace.page import write_trace
from flows.commands.trace.terminal import as_dict, render, where
from flows.commands.trace.trace import Start, trace_prompt
from rlhf_core.config.base import ScratchConfig
from rlhf_core.data.tokenizer import train_bpe
from rlhf_core.models.hf import build_llama, save_checkpoint, scalar_model_from
from rlhf_core.ppo.plan import prompts_of_step

TINY = Path(__file__).resolve().parents[4] / "examples" / "tiny.yaml"
PROMPT = "what shall i eat? <b>an egg & tea</b>"
OTHERS = [f"what shall i eat {word}?" for word in "abcdefghijklmnopqrst"]
Trace = Callable[..., Result]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What a trace reads of a finished project: models that were made, not trained, and the settings of tiny.yaml."""
    tokenizer = train_bpe([PROMPT, *OTHERS], 300, "<|pad|>", "<|end|>", 96)
    config = ScratchConfig(vocabulary=300, context=96, layers=1, hidden=16, intermediate=16, heads=2)
    for seed, name in enumerate(("sft", "policy")):
        save_checkpoint(tmp_path / "models" / name, build_llama(config, tokenizer, seed), tokenizer)
    for seed, name in enumerate(("reward", "critic")):
        model = scalar_model_from(tmp_path / "models" / "sft", seed)
        save_checkpoint(tmp_path / "models" / name, model, tokenizer)
    (tmp_path / "data" / "ingest").mkdir(parents=True)
    rows = [json.dumps({"prompt": [{"role": "user", "content": text}]}) + "\n" for text in OTHERS]
    (tmp_path / "data" / "ingest" / "ppo_prompts.jsonl").write_text("".join(rows))
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    (tmp_path / "params.yaml").write_text(TINY.read_text())
    return tmp_path


@pytest.fixture
def trace(project: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    """trace("--json", prompt=…) -> what `leash trace` prints."""
    monkeypatch.chdir(project)
    return lambda *arguments, prompt=PROMPT: CliRunner().invoke(app, ["trace", prompt, *arguments])


def change(project: Path, **ppo: Any) -> None:
    """Set keys of the block ppo, one level deep."""
    yaml = YAML()
    content = yaml.load(project / "params.yaml")
    for key, value in ppo.items():
        content["ppo"][key] = {**content["ppo"].get(key, {}), **value} if isinstance(value, dict) else value
    yaml.dump(content, project / "params.yaml")


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_the_table_has_what_the_json_has(trace: Trace) -> None:
    """And the page is the only file that changes."""
    before = files(Path())
    told = trace("--at", "sft")
    assert told.exit_code == 0
    progress = told.stderr.splitlines()
    assert progress[0] == "trace: importing torch and transformers"
    assert all(line.startswith("trace: ") for line in progress if line)
    assert any("loading models/sft" in line for line in progress)
    assert files(Path()).keys() - before.keys() == {"work/trace.html"}
    assert {name: files(Path())[name] for name in before} == before
    found = json.loads(trace("--at", "sft", "--json").stdout)
    assert found["prompt"] == [{"role": "user", "content": PROMPT}]
    rows = [line.split() for line in told.stdout.splitlines() if re.match(r" *\d+ .*[−\d]\.\d{3}", line)]
    table = [row for row in rows if len(row) >= 13][: len(found["tokens"])]
    assert len(table) == len(found["tokens"])
    for row, token in zip(table, found["tokens"], strict=True):
        assert f"{token['after']['value_loss']:.3f}" == row[-1]
        assert f"{token['old_logprob']:.3f}".replace("-", "−") in row
    assert "total loss = L_π + 0.5·L_V" in told.stdout
    assert "page  " in told.stdout.splitlines()[-1]


@pytest.mark.slow
def test_equal_seeds_give_equal_traces_and_pages(trace: Trace) -> None:
    first = trace("--page", "one.html", "--json").stdout
    assert trace("--page", "two.html", "--json").stdout == first
    assert Path("one.html").read_bytes() == Path("two.html").read_bytes()
    assert json.loads(trace("--seed", "9", "--json").stdout)["tokens"] != json.loads(first)["tokens"]


def test_the_policy_is_traced_where_the_run_ended(project: Path) -> None:
    """The last step's learning rate, the critic of the run, and a reference that is SFT; from SFT, those of step 1."""
    traced = trace_prompt(project, PROMPT, "policy")
    assert (traced.trace.step.number, traced.start) == (4, "policy")
    assert any(abs(token.kl) > 1e-3 for token in traced.trace.tokens)
    start = trace_prompt(project, PROMPT, "sft")
    assert start.trace.step.number == 1
    assert all(token.kl == 0 for token in start.trace.tokens)
    config = traced.config
    for one, step in ((traced, 3), (start, 0)):
        rising = min(1.0, (step + 1) / (config.optimizer.warmup_steps + 1))
        falling = (config.steps - step) / (config.steps - config.optimizer.warmup_steps)
        rates = one.trace.step.learning_rates
        assert math.isclose(rates["policy"], config.learning_rate * min(rising, falling))
        assert math.isclose(rates["critic"], config.critic.learning_rate * min(rising, falling))


@pytest.mark.parametrize("reference", ["sft", "previous"])
def test_in_a_later_round_a_trace_has_the_models_and_random_numbers_of_the_round(project: Path, reference: str) -> None:
    in_round_1 = trace_prompt(project, PROMPT, "sft")
    shutil.copytree(project / "models/policy", project / "rounds/1/policy")
    (project / "rounds/1/round.json").write_text("{}")
    (project / "rounds/1.dvc").touch()
    with (project / "params.yaml").open("a") as file:
        file.write(f"round: {{reference: {reference}}}\n")
    traced = trace_prompt(project, PROMPT, "sft")
    assert where(traced).startswith("PPO step 1 of 4, from rounds/1/policy, seed 1;")
    assert (max(abs(token.kl) for token in traced.trace.tokens) < 1e-6) is (reference == "previous")
    shutil.copytree(project / "models/sft", project / "rounds/1/policy", dirs_exist_ok=True)
    again = trace_prompt(project, PROMPT, "sft")
    assert [token.text for token in again.trace.tokens] != [token.text for token in in_round_1.trace.tokens]


def test_a_chosen_snapshot_says_where_it_stands(project: Path) -> None:
    (project / "metrics").mkdir()
    (project / "metrics" / "select.json").write_text('{"step": 2}')
    (project / "metrics" / "ppo.json").write_text('{"kl_coef_last": 0.0125}')
    change(project, kl={"controller": "adaptive"})
    traced = trace_prompt(project, PROMPT, "policy")
    assert traced.trace.step.number == 3
    assert any("snapshot after step 2" in note for note in traced.notes)
    assert not any("SFT +" in note for note in traced.notes)
    assert traced.trace.step.kl_coef == 0.0125
    (project / "metrics" / "select.json").write_text('{"step": 2, "eta": 0.5}')
    notes = trace_prompt(project, PROMPT, "policy").notes
    assert any("SFT + 0.5·(the snapshot after step 2 − SFT)" in note for note in notes)


def test_the_batch_is_the_steps_own_with_the_prompt_in_it(project: Path) -> None:
    """A prompt that the step has anyway keeps its place."""
    traced = trace_prompt(project, PROMPT, "sft")
    assert traced.trace.row == 0
    assert sum(len(minibatch.rows) for minibatch in traced.trace.step.minibatches) == 16 * 2
    third = OTHERS[prompts_of_step(0, 16, len(OTHERS), 1)[3]]
    again = trace_prompt(project, third, "sft")
    assert again.trace.row == 3
    assert again.trace.prompt[0]["content"] == third


def test_without_a_prompt_the_first_of_the_batch_is_shown(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    told = CliRunner().invoke(app, ["trace", "--json"])
    first = OTHERS[prompts_of_step(0, 16, len(OTHERS), 1)[0]]
    assert json.loads(told.stdout)["prompt"] == [{"role": "user", "content": first}]


@pytest.mark.parametrize(
    "ppo",
    [
        {"advantage": "rloo", "samples_per_prompt": 4},
        {"advantage": "reinforce", "whiten_advantages": False},
        {"critic": {"kind": "shared"}},
        {"critic": {"init": "sft"}, "kl": {"penalty": "loss", "estimator": "full"}},
        {"lora": {"rank": 2, "alpha": 4.0}},
        {"policy_gradient_steps": 4},
        {"max_new_tokens": 2, "dual_clip": 3.0},
    ],
    ids=lambda ppo: ", ".join(ppo),
)
@pytest.mark.parametrize("start", ["policy", "sft"])
def test_every_kind_of_settings_has_table_and_page(ppo: dict[str, Any], start: Start, project: Path) -> None:
    change(project, **ppo)
    if ppo.get("advantage"):
        (project / "models" / "critic" / "config.json").unlink()
    traced = trace_prompt(project, PROMPT, start)
    told, tokens = render(traced), as_dict(traced)["tokens"]
    first = next(line for line in told.splitlines() if re.match(r" *1 .*[−\d]\.\d{3}", line))
    assert ("–" in first) == ("advantage" in ppo)
    assert (tokens[0]["value"] is None) == bool(ppo.get("advantage"))
    assert (max(abs(token["kl"]) for token in tokens) > 1e-3) == (start == "policy")
    assert traced.trace.ended or "cut off" in told
    write_trace(traced, project / "page.html")
    page = (project / "page.html").read_text(encoding="utf-8")
    assert page.count("data-panel") == len(tokens) + 1  # once in the script
    assert "None" not in page
    assert "nan" not in page


class Links(HTMLParser):
    """Collects what a page would load, and its ids."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.targets: set[str] = set()
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "src" or (name == "href" and not str(value).startswith("#")):
                self.sources.append(str(value))
            elif name == "href":
                self.targets.add(str(value)[1:])
            elif name == "id":
                self.ids.add(str(value))


def test_the_page_is_whole_and_escaped(trace: Trace) -> None:
    assert trace("--page", "deep/er/page.html").exit_code == 0
    page = Path("deep/er/page.html").read_text(encoding="utf-8")
    links = Links()
    links.feed(page)
    assert links.sources == ["data:,"]
    assert links.targets <= links.ids
    assert "<b>an egg" not in page
    assert "&lt;b&gt;an egg &amp; tea&lt;/b&gt;" in page
    script = page.split("<script>")[1].split("</script>")[0]
    assert f"script-src 'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in page
    assert list(Path("deep/er").iterdir()) == [Path("deep/er/page.html")]


def test_without_models_the_command_that_makes_them_is_named(project: Path, trace: Trace) -> None:
    (project / "models" / "critic" / "config.json").unlink()
    found = trace("--at", "policy")
    assert found.exit_code == 2
    error = "error: models/critic: missing; `leash run select` makes what a trace needs"
    assert found.stderr.splitlines()[-1] == error
    (project / "models" / "policy" / "config.json").unlink()
    assert json.loads(trace("--json").stdout)["start"] == "sft"
    (project / "models" / "reward" / "config.json").unlink()
    (project / "data" / "ingest" / "ppo_prompts.jsonl").unlink()
    assert "models/reward, data/ingest/ppo_prompts.jsonl: missing" in trace().stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--at", "reward"], "--at reward: choose policy or sft"),
        (["--page", "models"], "models: cannot be written"),
    ],
)
def test_users_errors_are_one_line(trace: Trace, arguments: list[str], words: str) -> None:
    found = trace(*arguments)
    assert found.exit_code == 2
    assert words in found.stderr.splitlines()[-1]
    assert found.stderr.count("error: ") == 1


def test_an_empty_prompt_is_refused(trace: Trace) -> None:
    found = trace(prompt="  ")
    assert found.exit_code == 2
    assert found.stderr.splitlines()[-1] == "error: the prompt is empty; give the question, in quotation marks"


def test_a_prompt_that_leaves_no_room(trace: Trace) -> None:
    found = trace(prompt="xyz " * 60)
    assert found.exit_code == 2
    assert re.search(r"the prompt is \d+ tokens too long: 24 of 96 are the answer", found.stderr)
