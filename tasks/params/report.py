"""Parameters of the stage `report`."""

from typing import Annotated

from pydantic import Field

from rlhf_core.config.block import Block


class ReportParams(Block):
    """The report page."""

    samples: Annotated[int, Field(ge=1)] = 5
    """Pairs of answers to show at a time."""
