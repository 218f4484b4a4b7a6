"""The automations of this project on a Prefect server; `leash up` and `leash study --pool` install them."""

from datetime import timedelta
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from prefect.automations import Automation

LOST_SECONDS = 95.0
"""A run without a heartbeat for so long is lost. Heartbeats come every 30 seconds, Prefect's minimum."""
ENDINGS = ("Completed", "Failed", "Cancelled", "Crashed")


def install() -> None:
    """Create each automation, or bring it up to date."""
    from prefect.automations import Automation

    for wanted in (mark_lost_runs(),):
        try:
            known = cast("Automation", Automation.read(name=wanted.name))
        except ValueError:
            wanted.create()
        else:
            wanted.id = known.id
            wanted.update()


def mark_lost_runs() -> "Automation":
    """Marks a flow run as Crashed when its heartbeats have ended before it: a killed process, a lost machine."""
    from prefect.automations import Automation
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import EventTrigger, Posture
    from prefect.events.schemas.events import ResourceSpecification

    heartbeat = "prefect.flow-run.heartbeat"
    return Automation(
        name="leash: a run without heartbeats is marked Crashed",
        trigger=EventTrigger(
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            for_each={"prefect.resource.id"},
            after={heartbeat},
            expect={heartbeat, *(f"prefect.flow-run.{state}" for state in ENDINGS)},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=LOST_SECONDS),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message="its process was killed, or its machine is lost")],
    )
