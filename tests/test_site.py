"""`docs/make_site.py`: the pages of docs/site/, their origin, and whether they are those of the committed results."""

import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from rlhf_core.errors import UserError
from tasks.params.loader import read_yaml
from tasks.stage.dvc_files import Hashes
from tests.test_docs import script

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "docs" / "site" / "demo" / "report.html"
SUMMARY = {"gold_policy": 3.384, "win_rate": 0.8892, "kl_per_sequence": 2.9526}
PAGE = "<!doctype html>\n<head>\n<title>t</title></head>\n<body>\n3.38 88.9% 2.95 0123abcd</body>\n"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return script("make_site")


def git(root: Path, *words: str) -> str:
    named = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *named, *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a report, a trace and a study, and a commit of its dvc.lock."""
    for name, text in {
        "report/index.html": PAGE,
        "metrics/summary.json": json.dumps(SUMMARY),
        "work/trace.html": "<head></head><body>trace</body>",
        "work/studies/betas/table.md": "### Settings\n\n| setting | gold |\n|---|---|\n| <b>0.05</b> | 3.4 |\n",
        ".gitignore": "/report\n/work\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "work/studies/betas/frontier.png").write_bytes(b"\x89PNG")
    deps = [{"path": "metrics/evaluate.json", "md5": "0123abcd"}, {"path": "tasks/report.py", "md5": "f00"}]
    outs = [{"path": "report", "md5": Hashes(tmp_path).of(tmp_path / "report")}]
    lock = {"stages": {"report": {"deps": deps, "outs": outs}}}
    (tmp_path / "dvc.lock").write_text(json.dumps(lock), encoding="utf-8")  # JSON is YAML, too
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "results")
    commit = git(tmp_path, "rev-parse", "HEAD")
    study = {"commit": commit, "command": "leash study -S 'a=<1>'", "call": {}}
    (tmp_path / "work/studies/betas/study.json").write_text(json.dumps(study), encoding="utf-8")
    return tmp_path


def test_pages_name_their_commit_and_the_index_lists_them(maker: ModuleType, project: Path) -> None:
    sources = [project / name for name in ("report", "work/trace.html", "work/studies/betas")]
    about = 'The demo: 5 < 6 & "more"'
    pages = maker.add(project, "demo", about, sources)
    site, commit = project / "docs" / "site", git(project, "rev-parse", "HEAD")
    assert json.loads((site / "demo" / "summary.json").read_text(encoding="utf-8")) == SUMMARY
    assert [str(page.relative_to(site)) for page in pages] == ["demo/report.html", "demo/trace.html", "demo/study.html"]
    lock = Hashes(project).of(project / "dvc.lock")
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert f"at commit {commit[:12]} of {git(project, 'show', '--no-patch', '--format=%cs')}" in text
        assert f"dvc.lock has the MD5 {lock}." in text
    study = pages[2].read_text(encoding="utf-8")
    assert "<td>&lt;b&gt;0.05&lt;/b&gt;</td>" in study
    assert "leash study -S &#39;a=&lt;1&gt;&#39;" in study
    assert 'src="data:image/png;base64,' in study
    index = (site / "index.html").read_text(encoding="utf-8")
    assert [f'href="demo/{name}.html"' in index for name in ("report", "trace", "study")] == [True] * 3
    assert "The demo: 5 &lt; 6 &amp; &#34;more&#34;" in index
    before = {path: path.read_bytes() for path in site.rglob("*.html")}
    maker.add(project, "demo", about, sources)
    assert before == {path: path.read_bytes() for path in site.rglob("*.html")}
    maker.add(project, "smollm2-chat", "A real model", sources[:1])
    index = (site / "index.html").read_text(encoding="utf-8")
    assert "smollm2-chat/report.html" in index
    assert index.count("proxy and gold disagree") == 0  # PAGE does not have that section
    page = site / "demo" / "report.html"
    page.write_text(page.read_text("utf-8") + f"<h2 id='{maker.DISAGREE[0]}'></h2>", encoding="utf-8")
    assert maker.index(site).count("proxy and gold disagree") == 1


@pytest.mark.parametrize(
    ("spoil", "name", "source", "said"),
    [
        (None, "../demo", "report", "use small letters"),
        (None, "demo", "work", "give the folder report"),
        (None, "demo", "work/nothing", "work/nothing: not found"),
        ("dvc.lock", "demo", "report", r"dvc.lock differs from the commit"),
        ("report/index.html", "demo", "report", "not the report of dvc.lock"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(
    maker: ModuleType, project: Path, spoil: str | None, name: str, source: str, said: str
) -> None:
    if spoil:
        (project / spoil).write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=said):
        maker.add(project, name, "", [project / source])
    assert not (project / "docs").exists()


def test_a_site_that_is_too_large_is_not_written(
    maker: ModuleType, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maker, "MOST_BYTES", 100)
    with pytest.raises(UserError, match=r"demo/report.html 0.0 MB; together more than"):
        maker.add(project, "demo", "", [project / "report"])
    assert not (project / "docs").exists()


def test_a_large_report_loses_the_other_models_answers(
    maker: ModuleType, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = '<details class="others"><summary>1</summary>\n<div>best of 4</div>\n</details>\n'
    trace = project / "work" / "trace.html"
    trace.write_text(f"<head></head><body>first {others}second {others}</body>", encoding="utf-8")
    for limit, kept in ((1000, True), (10, False)):
        monkeypatch.setattr(maker, "LARGE", limit)
        text = maker.add(project, "demo", "", [trace])[0].read_text(encoding="utf-8")
        assert ("best of 4" in text) == kept
        assert ("without the other models’ answers" in text) != kept
        assert "second" in text


def test_a_page_of_other_results_is_found(maker: ModuleType, project: Path) -> None:
    lock = read_yaml(project / "dvc.lock")
    assert maker.stale(PAGE, SUMMARY, lock) == []
    lock["stages"]["report"]["deps"][0]["md5"] = "4567"
    found = maker.stale(PAGE, SUMMARY | {"win_rate": 0.9}, lock)
    assert found == ["win_rate: 90.0%", "metrics/evaluate.json: 4567"]


@pytest.mark.skipif(not DEMO.exists(), reason="docs/site/demo is not made: make site")
def test_the_demos_page_is_that_of_the_committed_results(maker: ModuleType) -> None:
    summary = json.loads((ROOT / "metrics" / "summary.json").read_text(encoding="utf-8"))
    assert maker.stale(DEMO.read_text(encoding="utf-8"), summary, read_yaml(ROOT / "dvc.lock")) == []


@pytest.mark.parametrize("name", sorted(path.parent.name for path in (ROOT / "docs" / "site").glob("*/summary.json")))
def test_a_page_has_the_figures_of_its_run(maker: ModuleType, name: str) -> None:
    folder = ROOT / "docs" / "site" / name
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert maker.stale((folder / "report.html").read_text(encoding="utf-8"), summary) == []
