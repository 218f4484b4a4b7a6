"""Which names hold secrets: their values are shown nowhere. Secrets belong into the environment, and no parameter of
ours is one; this is for what somebody writes into params.yaml all the same."""

import re

HIDDEN = "(hidden)"
_SECRET = re.compile(
    r"(^|[._-])((hf|hub|auth|access|api|bearer|session|refresh)[_-]?token"
    r"|(api|access|private|secret|signing)[_-]?key|password|passwd|passphrase|secret|credentials?)$|(^|\.)token$",
    re.IGNORECASE,
)
"""At the end of a dotted name. `pad_token` and `stop_tokens` are no secrets."""


def is_secret(name: str) -> bool:
    """Whether the value of a parameter of this (dotted) name must not be shown."""
    return _SECRET.search(name) is not None
