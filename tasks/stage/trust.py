"""Whether code that a model brings may run, and the warning that goes with a yes. The loading itself is rlhf_core's."""

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `leash chat` and `leash trace` have no stage, and do without DVC and MLflow
    from tasks.stage.stage import Stage


def trusts(stage: "Stage[Any]") -> bool:
    """`trust_remote_code` of params.yaml. A yes is said aloud, once a stage, with the risk."""
    if stage.common.trust_remote_code:
        warn_of_code(stage.label)
    return stage.common.trust_remote_code


def warn_of_code(label: str) -> None:
    """Say once, on stderr and behind the label of who asks, what a yes means."""
    print_once(
        f"{label} WARNING: trust_remote_code is true: Python code that comes with the model runs with your "
        "rights (it can read and change your files, see your keys, and use your network); only for code that you "
        "have read"
    )


@cache
def print_once(text: str) -> None:
    """One line on stderr, however often it is said."""
    print(text, file=sys.stderr, flush=True)
