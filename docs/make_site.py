"""Copies pages that the pipeline made into docs/site/, which any file host serves, and lists them in its index.html.

python docs/make_site.py demo "The demo: …" report work/trace.html work/studies/betas
"""

import base64
import json
import re
import sys
from hashlib import md5
from html import unescape
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from flows.workspace import git  # noqa: E402
from rlhf_core.errors import UserError  # noqa: E402
from rlhf_core.files import atomic  # noqa: E402
from tasks.page import page as report_page  # noqa: E402
from tasks.page.wording import number, percent  # noqa: E402
from tasks.params.loader import read_yaml  # noqa: E402
from tasks.stage.dvc_files import Hashes  # noqa: E402

MOST_BYTES = 4_000_000
"""Of the whole site."""
LARGE = 1_000_000
"""Bytes of a report above which the other models' answers to the samples are left out."""
OTHERS = re.compile(r'<details class="others">.*?</details>\n?', re.DOTALL)
SHOWS = {
    "report": "Is the policy better than SFT, and than the other methods? With intervals, the frontier at equal KL, "
    "samples to read, and PPO step by step.",
    "trace": "One PPO step on one answer: log-probabilities, KL, reward, advantage, ratio and loss of every token.",
    "study": "Several settings and training seeds side by side: means with intervals, and every trial.",
}
"""By the name of a page: what it shows."""
DISAGREE = ("disagree-title", " First: the answers on which proxy and gold disagree.")
"""The mark of a section that not every report has, and what it shows."""
FIGURES = {"gold_policy": number, "win_rate": percent, "kl_per_sequence": number, "reward_accuracy": percent}
"""Of metrics/summary.json: how the report prints them."""
SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>
{% include "style.css.j2" %}
main { padding-block: 1.5rem 2rem; overflow-wrap: anywhere; }
td, th { padding: .35rem .6rem; border-bottom: 1px solid var(--rule); overflow-wrap: normal; }
th { min-width: 5rem; }
td { white-space: nowrap; }
img { max-width: 100%; height: auto; background: #fff; }
a { color: var(--policy); }
</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
{{ content }}
</main>
</body>
</html>
"""


def add(root: Path, name: str, about: str, sources: list[Path]) -> list[Path]:
    """Write a page for each source below docs/site/NAME/ of the project `root`, and the index; returns the pages. A
    source is the folder report, a page of `leash trace`, or the folder of a study, in this project or a clone of it. A
    report brings its metrics/summary.json, so that its figures can be compared.

    Raises UserError, before anything is written, for another name or source, for changes without a commit, for a
    report that is not the one of dvc.lock, and where the site would be too large.
    """
    site = root / "docs" / "site"
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        raise UserError(f"{name}: use small letters, digits, dots and hyphens as the name of a folder of docs/site")
    pages: dict[Path, str] = {}
    for source in sources:
        if not source.exists():
            raise UserError(f"{source}: not found; `leash run report`, `leash trace` and `leash study` make the pages")
        home = Path(git(source if source.is_dir() else source.parent, "rev-parse", "--show-toplevel").strip())
        changed = git(home, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/site").splitlines()
        if changed:
            raise UserError(
                f"{home / changed[0][3:]} differs from the commit; commit it first: pages name their commit"
            )
        commit = git(home, "rev-parse", "HEAD").strip()
        if (source / "study.json").is_file() and (source / "table.md").is_file():
            kind, called = "study", json.loads((source / "study.json").read_text(encoding="utf-8"))
            commit, command = called["commit"], called["command"]
            page = study_page(source)
        elif (source / "index.html").is_file():
            kind, command = "report", "leash run report"
            page = (source / "index.html").read_text(encoding="utf-8")
            recorded = read_yaml(home / "dvc.lock")["stages"]["report"]["outs"][0]["md5"]
            if Hashes(home).of(source.absolute(), read=True) != recorded:
                raise UserError(f"{source}: not the report of dvc.lock; make it with `leash run report`")
            pages[site / name / "summary.json"] = git(home, "show", f"{commit}:metrics/summary.json")
        elif source.suffix == ".html" and source.is_file():
            kind, command, page = "trace", "leash trace", source.read_text(encoding="utf-8")
        else:
            raise UserError(f"{source}: give the folder report, a page of `leash trace`, or a folder of work/studies")
        date = git(home, "show", "--no-patch", "--format=%cs", commit).strip()
        lock = md5(git(home, "show", f"{commit}:dvc.lock").encode(), usedforsecurity=False).hexdigest()
        lean = len(page.encode("utf-8", "replace")) > LARGE and bool(OTHERS.search(page))
        page = OTHERS.sub("", page) if lean else page
        made = f"Made by <code>{escape(command)}</code> at commit {commit[:12]} of {date}; dvc.lock has the MD5 {lock}."
        made += " To keep this page small, the samples are without the other models’ answers." if lean else ""
        line = f'<p class="note" style="margin:.5rem 1rem"><a href="../index.html">All pages</a>. {made}</p>'
        page = page.replace("<head>", f'<head>\n<meta name="description" content="{escape(about)}">', 1)
        pages[site / name / f"{kind}.html"] = page.replace("<body>", f"<body>\n{line}", 1)

    sizes = {path: path.stat().st_size for path in site.glob("*/*.html")}
    sizes |= {path: len(text.encode("utf-8", "replace")) for path, text in pages.items() if path.suffix == ".html"}
    if sum(sizes.values()) > MOST_BYTES:
        listed = ", ".join(f"{path.relative_to(site)} {size / 1e6:.1f} MB" for path, size in sorted(sizes.items()))
        raise UserError(f"docs/site: {listed}; together more than {MOST_BYTES / 1e6:g} MB, remove a page")
    for path, page in pages.items():
        with atomic(path) as partial:
            report_page.write_page(page, partial)
    with atomic(site / "index.html") as partial:
        report_page.write_page(index(site), partial)
    return [path for path in pages if path.suffix == ".html"]


def study_page(folder: Path) -> str:
    """The tables of a study, with its picture, as a page."""
    tables = MarkdownIt("commonmark", {"html": False}).enable("table").render((folder / "table.md").read_text("utf-8"))
    content = tables.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace(
        "</table>", "</table></div>"
    )
    if (folder / "frontier.png").is_file():
        image = base64.b64encode((folder / "frontier.png").read_bytes()).decode("ascii")
        content += f'<p><img src="data:image/png;base64,{image}" alt="Scores of the settings against KL to SFT"></p>'
    return shell(f"Study {folder.name}", content)


def index(site: Path) -> str:
    """The page with a card for each page of the site."""
    cards = ["<p>Pages that Leash made. The commit that made a page is on top of it.</p>"]
    for folder in sorted({path.parent for path in site.glob("*/*.html")}):
        pages = sorted(folder.glob("*.html"))
        texts = [page.read_text(encoding="utf-8") for page in pages]
        found = re.search(r'<meta name="description" content="([^"]*)">', texts[0])
        about = escape(unescape(found[1])) if found else ""
        cards.append(f'<article class="sample"><h2>{folder.name}</h2><p>{about}</p>')
        cards += [
            f'<p><a href="{folder.name}/{page.name}"><strong>{page.stem.capitalize()}</strong></a> '
            f"({page.stat().st_size / 1e3:.0f} kB). {SHOWS.get(page.stem, '')}{DISAGREE[1] * (DISAGREE[0] in text)}</p>"
            for page, text in zip(pages, texts, strict=True)
        ]
        cards.append("</article>")
    return shell("Leash: what its runs show", "\n".join(cards))


def shell(title: str, content: str) -> str:
    """A page in the style of the report; `content` is HTML."""
    environment = Environment(loader=FileSystemLoader(Path(report_page.__file__).parent), autoescape=True)
    return environment.from_string(SHELL).render(title=title, content=Markup(content)) + "\n"


def stale(page: str, summary: dict[str, float], lock: dict[str, Any] | None = None) -> list[str]:
    """What a page with a report lacks of metrics/summary.json and of the hashes of the stage report in dvc.lock."""
    wanted = {key: show(summary[key]) for key, show in FIGURES.items() if key in summary}
    inputs = {dep["path"]: dep["md5"] for dep in lock["stages"]["report"]["deps"]} if lock else {}
    wanted |= {path: md5 for path, md5 in inputs.items() if path.startswith(("data/", "metrics/"))}
    return [f"{key}: {value}" for key, value in wanted.items() if value not in page]


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    try:
        print(*add(HERE.parent, sys.argv[1], sys.argv[2], [Path(one) for one in sys.argv[3:]]), sep="\n")
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
