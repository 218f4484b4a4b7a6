"""Whether code that comes with a model may run, and a warning where it may."""

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `leash chat` and `leash trace` have no stage, and need neither DVC nor MLflow
    from tasks.stage.stage import Stage


def trusts(stage: "Stage[Any]") -> bool:
    """`trust_remote_code` of params.yaml. True prints a warning once a stage."""
    if stage.common.trust_remote_code:
        warn_of_code(stage.label)
    return stage.common.trust_remote_code


def warn_of_code(label: str) -> None:
    """Print the risk once, on stderr, after `label`."""
    print_once(
        f"{label} WARNING: trust_remote_code is true: Python code that comes with the model runs with your "
        "rights (it can read and change your files, see your keys, and use your network); only for code that you "
        "have read"
    )


@cache
def print_once(text: str) -> None:
    """One line on stderr, only the first time."""
    print(text, file=sys.stderr, flush=True)
