"""Names of secrets, whose values are never printed. No parameter of Leash is a secret, but a user may add one to
params.yaml."""

import re

HIDDEN = "(hidden)"
_SECRET = re.compile(
    r"(^|[._-])((hf|hub|auth|access|api|bearer|session|refresh)[_-]?token"
    r"|(api|access|private|secret|signing)[_-]?key|password|passwd|passphrase|secret|credentials?)$|(^|\.)token$",
    re.IGNORECASE,
)
"""At the end of a dotted name. `pad_token` and `stop_tokens` are not secrets."""


def is_secret(name: str) -> bool:
    """Whether the value of a parameter of this (dotted) name must not be shown."""
    return _SECRET.search(name) is not None
