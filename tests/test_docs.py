"""The pages that are made from the code agree with it, and the README's commands exist."""

import importlib.metadata
import importlib.util
import re
import sys
import typing
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from pydantic import BaseModel

from flows.cli import app
from rlhf_core.config.ppo import PPOConfig

ROOT = Path(__file__).resolve().parents[1]


def script(name: str) -> ModuleType:
    """A script of docs/, loaded as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_parameters_page_is_what_the_code_says() -> None:
    assert (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8") == script("make_parameters").page()


def test_the_page_of_files_is_the_one_of_the_schemas() -> None:
    assert (ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8") == script("make_files").page()


def test_every_parameter_has_a_meaning() -> None:
    rows = [line for line in script("make_parameters").page().splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    assert [row for row in rows if not row.split("|")[-2].strip()] == []


def test_pictures_are_what_the_code_draws(tmp_path: Path) -> None:
    """To the byte. Each stands on a page of docs/."""
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    installed = importlib.metadata.version("matplotlib")
    if f"matplotlib=={installed}" not in pinned:
        pytest.skip(f"matplotlib {installed} is not the one of constraints.txt: its bytes may differ")
    pictures = script("make_pictures")
    pictures.write(tmp_path)
    pages = " ".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    for name in pictures.PICTURES:
        assert (tmp_path / f"{name}.svg").read_bytes() == (ROOT / "docs" / f"{name}.svg").read_bytes(), name
        assert f"]({name}.svg)" in pages


def test_the_drawn_cases_are_the_four_of_the_clip() -> None:
    """Each case is marked where the gradient is what its words say; the other picture shows these
    errors."""
    pictures = script("make_pictures")
    for advantage, cases in pictures.CASES.items():
        for case in cases:
            _, gradient = pictures.surrogate(torch.tensor([case.ratio], dtype=torch.float64), advantage)
            assert ("no gradient" in case.says) == (gradient.item() == 0)
            assert gradient.item() * advantage >= 0
    errors, _ = pictures.credit()
    assert errors.tolist() == pytest.approx([0.04, 0.03, 0.06, 0.08, 0.02, 0.05, 0.91])


def test_the_readme_names_only_files_commands_and_make_targets_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:^    |`)make ([a-z0-9-]+)", readme, re.MULTILINE))
    assert targets >= {"run", "test"}
    assert targets <= set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    pages = re.findall(r"\]\((docs/[^)#]+)\)", readme)
    assert len(pages) >= 5
    assert [path for path in pages if not (ROOT / path).exists()] == []
    commands = set(re.findall(r"(?:^    |`|bin/)leash ([a-z][a-z-]*)", readme, re.MULTILINE))
    assert len(commands) >= 8
    assert commands <= {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#{1,6} (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    texts = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in texts}


def test_every_link_of_a_page_leads_to_a_file_and_a_heading() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_every_command_of_a_page_exists_with_its_options_and_files() -> None:
    """Of `leash`, in indented lines and in backticks."""
    commands = typer.main.get_group(app).commands
    known = {
        name: {each for p in command.params for each in (*p.opts, *p.secondary_opts)}
        for name, command in commands.items()
    }
    found, wrong = 0, []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        spans = re.findall(r"^    (?:\$ )?(.*)", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
        calls = [part for span in spans for part in re.split(r"\s#|&&|;|\|", span)]
        for call in calls:
            if named := re.match(r"\s*(?:\.venv/bin/)?leash ([a-z][a-z-]*)\b(.*)", call):
                options = set(re.findall(r"(?<!\S)(--?[A-Za-z][\w-]*)", named[2])) - {"--help"}
                found += 1
                if not options <= known.get(named[1], set()) or named[1] not in known:
                    wrong.append(f"{page.relative_to(ROOT)}: {call}")
        files = re.findall(r"(?<![\w/.-])((?:examples|benchmarks)/[\w.-]+\.\w+)", text)
        wrong += [f"{page.relative_to(ROOT)}: {file}" for file in files if not (ROOT / file).exists()]
    assert found > 100
    assert wrong == []


def test_versions_file_agrees_with_the_constraints() -> None:
    from tasks.stage.versions import declared

    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for name, version in declared().items():
        assert f"{name}=={version}" in pinned


def options_table() -> list[list[str]]:
    """The cells of each row of the table in docs/ppo.md that names a test of every option."""
    page = (ROOT / "docs" / "ppo.md").read_text(encoding="utf-8")
    table = page.split("## Options\n")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def leaves(model: type[BaseModel], prefix: str = "") -> set[str]:
    """The keys of a block and of the blocks within it."""
    found = set()
    for name, field in model.model_fields.items():
        parts = (field.annotation, *typing.get_args(field.annotation))
        blocks = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
        found |= leaves(blocks[0], f"{prefix}{name}.") if blocks else {prefix + name}
    return found


def test_every_option_of_ppo_stands_in_the_table_once() -> None:
    named = [key for row in options_table() for key in re.findall(r"`([a-z_.]+)`", row[0])]
    assert len(named) == len(set(named))
    assert set(named) == leaves(PPOConfig) | {"runtime.on_alert"}


def test_every_option_has_a_use_and_a_test_that_exists() -> None:
    for row in options_table():
        assert len(row) == 4
        assert all(row)
        tests = re.findall(r"`(test_\w+)::(test_\w+)`", row[3])
        assert tests, row[0]
        for file, name in tests:
            texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob(f"{file}.py")]
            assert any(f"def {name}(" in text for text in texts), f"{file}::{name}"


def test_every_test_that_reliability_names_exists() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    paths = list((ROOT / "tests").rglob("test_*.py"))
    sources = [path.read_text(encoding="utf-8") for path in paths]
    files = set(re.findall(r"\b(test_\w+\.py)", text))
    functions = set(re.findall(r"::(test_\w+)", text))
    assert len(files) > 20
    assert len(functions) > 60
    assert files <= {path.name for path in paths}
    missing = [name for name in functions if not any(f"def {name}(" in source for source in sources)]
    assert missing == []
