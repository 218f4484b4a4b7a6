"""What a Prefect server does for the flows of this project, and for no others: it marks lost runs as Crashed, and posts
alerts and decisions to an address. `leash up` installs both."""

from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlhf_core.errors import UserError
from tasks.naming import project_name

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.automations import Automation
    from prefect.events.schemas.events import ResourceSpecification

LOST_SECONDS = 95.0
"""A run without a heartbeat for so long is lost. Heartbeats come every 30 seconds, Prefect's minimum."""
NOTIFIED = ("leash.alert.*", "leash.promoted", "leash.kept", "prefect.flow-run.Failed", "prefect.flow-run.Crashed")
"""Events that are posted, where somebody wants them."""
ENDINGS = ("Completed", "Failed", "Cancelled", "Crashed")
OF_ALL_PROJECTS = ("leash: a run without heartbeats is marked Crashed", "leash: post alerts and decisions")
"""Automations of earlier versions, which watched every flow of the server."""


def install(root: Path, notify: str | None = None, seconds: float = LOST_SECONDS) -> None:
    """Create this project's automations, or bring them up to date; with `notify`, an address, the one that posts to it.
    A run is lost after `seconds` without a heartbeat. Raises UserError for an address that is none."""
    from prefect.automations import Automation

    project = project_name(root)
    for name in OF_ALL_PROJECTS:
        with suppress(ValueError):
            cast("Automation", Automation.read(name=name)).delete()
    for wanted in (mark_lost_runs(project, seconds), *([post_to(project, notify)] if notify else [])):
        try:
            wanted.id = cast("Automation", Automation.read(name=wanted.name)).id
        except ValueError:
            wanted.create()
        else:
            wanted.update()


def finds_lost_runs(root: Path) -> bool:
    """Whether the server marks this project's lost runs."""
    from prefect.automations import Automation

    try:
        return cast("Automation", Automation.read(name=_lost_runs(project_name(root)))).enabled
    except ValueError:
        return False


def mark_lost_runs(project: str, seconds: float) -> "Automation":
    """Marks a flow run as Crashed when its heartbeats have ended before it: a killed process, a lost machine."""
    from prefect.automations import Automation
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import EventTrigger, Posture
    from prefect.events.schemas.events import ResourceSpecification

    heartbeat = "prefect.flow-run.heartbeat"
    return Automation(
        name=_lost_runs(project),
        trigger=EventTrigger(
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=_flows_of(project),
            for_each={"prefect.resource.id"},
            after={heartbeat},
            expect={heartbeat, *(f"prefect.flow-run.{state}" for state in ENDINGS)},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=seconds),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message="its process was killed, or its machine is lost")],
    )


def post_to(project: str, address: str) -> "Automation":
    """Posts a line of JSON to the address for each event of `NOTIFIED` from this project's flows: Slack, Mattermost and
    ntfy read its `text`. Prefect stores the address encrypted, in a block. Raises UserError."""
    from prefect.automations import Automation
    from prefect.blocks.webhook import Webhook
    from prefect.events.actions import CallWebhook
    from prefect.events.schemas.automations import EventTrigger, Posture
    from pydantic import ValidationError

    if not address.startswith(("http://", "https://")):
        raise UserError(f"--notify {address}: not an address; write https://…")
    name = f"leash-notify-{project}".lower().replace("_", "-").replace(".", "-")  # what Prefect takes for a block
    try:
        block = cast("UUID", Webhook(method="POST", url=address).save(name, overwrite=True))
    except (ValidationError, ValueError) as error:
        raise UserError(f"--notify: {' '.join(str(error).split())}") from None
    what = "event.payload.get('decision') or event.payload.get('alert') or event.resource.id"
    text = f'{{"text": {{{{ ("{project}: " ~ event.event ~ ": " ~ ({what})) | tojson }}}}}}'
    return Automation(
        name=f"leash {project}: post alerts and decisions",
        trigger=EventTrigger(
            match_related=_flows_of(project), expect=set(NOTIFIED), posture=Posture.Reactive, threshold=1
        ),
        actions=[CallWebhook(block_document_id=block, payload=text)],
    )


def _lost_runs(project: str) -> str:
    return f"leash {project}: a run without heartbeats is marked Crashed"


def _flows_of(project: str) -> "ResourceSpecification":
    """Events of runs of this project's flows."""
    from prefect.events.schemas.events import ResourceSpecification

    names = [project, f"{project}-nightly", f"{project}-trial"]
    return ResourceSpecification({"prefect.resource.role": "flow", "prefect.resource.name": names})
