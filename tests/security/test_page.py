"""Texts of users and models on the pages that we make, opened in a real browser: they are shown, never run."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from flows.artifacts import metric_rows, report_page
from tasks.page.inputs import Run, read_run
from tasks.page.page import render, write_page
from tests.tasks.page.conftest import write_inputs

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ATTACKS = [
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "</style><script>document.title='owned'</script>",
    "</title></head><body onload=\"document.title='owned'\">",
    "</p></article></main><svg onload=\"document.title='owned'\">",
    '"><iframe srcdoc="<script>parent.document.title=\'owned\'</script>"></iframe>',
    "javascript:document.title='owned'",
    '{"a": "</script><script>document.title=\'owned\'</script>"}',
    "{{ 7 * 7 }}{% include '/etc/passwd' %}",
    "<a href=\"javascript:document.title='owned'\" autofocus onfocus=\"document.title='owned'\">x</a>",
    "<meta http-equiv=refresh content=\"0;url=javascript:document.title='owned'\">",
    "--><script>document.title='owned'</script><!--",
]


@pytest.fixture
def attacked(tmp_path: Path) -> Run:
    """A run whose every text is an attack: prompts, answers, roles, judges, alerts, parameters and their names."""
    samples = write_inputs(tmp_path)
    for index, row in enumerate(samples):
        attack = ATTACKS[index % len(ATTACKS)]
        row["prompt"] = [{"role": "system", "content": attack}, {"role": attack, "content": attack}]
        row["sft"] = row["policy"] = attack
    run = read_run(samples, [], tmp_path)
    evaluation = run.evaluation | {"judge": ATTACKS[0], "win_rate_judge": ATTACKS[3]}
    alert = {"name": ATTACKS[1], "step": 3, "message": ATTACKS[2], "remedy": ATTACKS[5]}
    ingest = run.metrics["ingest"] | {"source": ATTACKS[4], "dropped": {ATTACKS[0]: 3}}
    ppo = run.metrics["ppo"] | {"alerts": [alert]}
    own = {attack: {attack: attack, "list": [attack]} for attack in ATTACKS} | {"word": ATTACKS[2]}
    metrics = run.metrics | {"evaluate": evaluation, "ppo": ppo, "ingest": ingest}
    return replace(run, metrics=metrics, params=run.params | own)


class Seen(HTMLParser):
    """The tags, the attributes and the text of a document."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def browse(page: Path, profile: Path, width: int = 1280) -> str:
    """The document as the browser has it after all scripts that run have run."""
    if BROWSER is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += [f"--window-size={width},900", "--virtual-time-budget=3000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90)
    return done.stdout


def title(dom: str) -> str:
    found = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
    assert found is not None
    return unescape(found.group(1))


def test_the_report_shows_attacks_as_text_in_a_real_browser(attacked: Run, tmp_path: Path) -> None:
    page = render(attacked, [], samples=len(attacked.samples), inputs={})
    write_page(page, tmp_path / "<script>index.html")
    dom = browse(tmp_path / "<script>index.html", tmp_path / "profile")
    assert title(dom) == "Is the policy better than SFT? – Leash report"
    seen = Seen(dom)
    assert not seen.tags & {"iframe", "svg", "object", "embed", "base"}
    assert dom.count("<form") == 1, "its own filter; the policy of the page lets no form be sent"
    assert dom.count("<script") == 1, "its own program"
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    targets = [value for name, value in seen.attributes if name in {"href", "src", "srcdoc"}]
    assert targets
    assert all(value.startswith(("#", "data:")) for value in targets)
    for attack in ATTACKS:
        assert seen.text.count(attack) >= 4, attack


def test_the_browser_would_have_run_them(attacked: Run, tmp_path: Path) -> None:
    """The same page without escaping and without its policy is owned: the test above can fail. With the policy alone
    it is not: there are two walls."""
    page = render(attacked, [], samples=len(attacked.samples), inputs={})
    policy = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>")
    assert policy.search(page)
    write_page(policy.sub("", unescape(page)), tmp_path / "open.html")
    assert title(browse(tmp_path / "open.html", tmp_path / "profile")) == "owned"
    write_page(unescape(page), tmp_path / "walled.html")
    assert title(browse(tmp_path / "walled.html", tmp_path / "profile")) != "owned"


def test_the_policy_of_the_page_allows_only_what_it_has(attacked: Run) -> None:
    page = render(attacked, [], samples=1, inputs={})
    found = re.search(r"Content-Security-Policy\" content=\"([^\"]*)\"", page)
    assert found is not None
    (program,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    allowed = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    assert found.group(1) == (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'; "
        "base-uri 'none'; form-action 'none'"
    )
    assert page.index("Content-Security-Policy") < page.index("<style>")


def test_secrets_in_parameters_are_not_on_the_page(attacked: Run) -> None:
    own = {"judge": {"api_key": "s3cret-1", "hf_token": "s3cret-2"}, "password": "s3cret-3"}
    page = render(replace(attacked, params=own), [], samples=1, inputs={})
    assert "s3cret" not in page
    assert page.count("(hidden)") == 3


def test_prefect_gets_plain_text(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    attack = "<img src=x onerror=alert(1)> | [a](javascript:alert(1)) `b`\n# c"
    content = {"win_rate": 0.5, "win_rate_judge": attack}
    (tmp_path / "metrics" / "evaluate.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "metrics" / "summary.json").write_text(json.dumps({"win_rate": 0.5}), encoding="utf-8")
    row = next(line for line in report_page(tmp_path).splitlines() if "judge of the wins" in line)
    assert "<img" not in row
    assert "](" not in row.replace("\\]\\(", "")
    assert len(re.findall(r"(?<!\\)\|", row)) == 3
    assert {"stage": "evaluate", "metric": "win_rate_judge", "value": attack} in metric_rows(tmp_path)
