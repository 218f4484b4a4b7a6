"""Seeds, threads and kernels of a stage, as its parameters say."""

from typing import Any

from rlhf_core.determinism import make_deterministic
from tasks.stage.stage import Stage

NOT_DETERMINISTIC = "deterministic: false selects the fastest kernels, so that this run is exempt from byte identity"


def set_numerics(stage: Stage[Any], seed: int | None = None) -> None:
    """Seed every generator with the run's seed, or with `seed`, and select kernels. With `deterministic: false` the
    stage is exempt from byte identity, which it prints and records."""
    common = stage.common
    make_deterministic(
        stage.seed if seed is None else seed,
        common.threads,
        deterministic=common.deterministic,
        tf32=common.precision == "bfloat16",
    )
    if not common.deterministic:
        stage.exempt(NOT_DETERMINISTIC)
