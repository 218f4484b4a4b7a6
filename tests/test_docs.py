"""The pages that are made from the code agree with it, and the README's commands exist."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_parameters_page_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("make_parameters", ROOT / "docs" / "make_parameters.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8") == module.page()


def test_the_readme_names_only_files_and_make_targets_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^    |`)make ([a-z]+)", readme, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target
    for path in re.findall(r"\]\((docs/[^)#]+)\)", readme):
        assert (ROOT / path).exists(), path


def test_versions_file_agrees_with_the_constraints() -> None:
    from tasks.versions import declared

    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for name, version in declared().items():
        assert f"{name}=={version}" in pinned
