"""The versions that shape a result: declared, installed and pinned are one."""

import importlib.metadata
import re
from pathlib import Path

import pytest

from rlhf_core.errors import UserError
from tasks.stage.versions import declared, require_declared_versions

CONSTRAINTS = Path(__file__).resolve().parents[3] / "constraints.txt"


def test_what_is_declared_is_installed() -> None:
    require_declared_versions()
    assert declared().keys() >= {"torch", "transformers", "tokenizers"}


def test_what_is_declared_is_what_set_up_installs() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE))
    assert {name: pins[name] for name in declared()} == declared()


@pytest.mark.parametrize("installed", ["9.9.9", "9.9.9+cpu"])
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr("tasks.stage.versions.declared", lambda: {"torch": "9.9.8", "tokenizers": "9.9.9"})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    with pytest.raises(
        UserError, match=r"torch 9\.9\.9 is installed, 9\.9\.8 is declared; run `make setup`"
    ) as refusal:
        require_declared_versions()
    assert "tokenizers" not in str(refusal.value)
