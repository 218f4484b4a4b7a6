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
from rlhf_core.ppo.health import REMEDIES

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


def test_the_alerts_of_ppo_stand_in_the_table_once() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    table = text.split("### Alerts of PPO\n")[1].split("\n## ")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(REMEDIES)


def test_the_commands_of_all_pages_exist_with_their_options() -> None:
    """In code and in indented blocks: `leash NAME --option`, without what follows a comment or a pipe."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = {name: {text for one in command.params for text in one.opts} for name, command in commands.items()}
    found = []
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for name, rest in re.findall(r"(?:^ {4,}(?:\$ )?|`|&& )leash ([a-z][a-z-]*)([^`#|&\n]*)", text, re.MULTILINE):
            used = {word for word in re.findall(r"(?<=\s)--[a-z][a-z-]*", rest) if word != "--help"}
            found.append(name)
            assert name in commands, f"{page.name}: leash {name}"
            assert used <= options[name], f"{page.name}: leash {name} {used - options[name]}"
    assert len(found) > 100
