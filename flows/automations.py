"""What a Prefect server does for the flows of this project, and for no others: it marks lost runs as Crashed, and posts
alerts and decisions to an address. `leash up` installs both."""

from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import cast
from uuid import UUID

from prefect.automations import Automation
from prefect.blocks.webhook import Webhook
from prefect.client.schemas.objects import StateType
from prefect.events.actions import CallWebhook, ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from rlhf_core.errors import UserError
from tasks.naming import project_name

LOST_SECONDS = 95.0
"""A run without a heartbeat for so long is lost. Heartbeats come every 30 seconds, Prefect's minimum."""
LOST_RUNS, POSTS = "leash {}: a run without heartbeats is marked Crashed", "leash {}: post alerts and decisions"
"""Names of the automations, with the project's name."""
NOTIFIED = {"leash.alert.*", "leash.promoted", "leash.kept", "prefect.flow-run.Failed", "prefect.flow-run.Crashed"}
"""Events that are posted."""


def find(name: str) -> Automation | None:
    """The automation of this name on the server."""
    with suppress(ValueError):
        return cast("Automation", Automation.read(name=name))
    return None


def require_address(notify: str | None) -> None:
    """Raise UserError for an address to post to that is none."""
    if notify is not None and not notify.startswith(("http://", "https://")):
        raise UserError(f"--notify {notify}: not an address; write https://…")


def install(root: Path, notify: str | None = None, seconds: float = LOST_SECONDS) -> None:
    """Create this project's automations, or bring them up to date.

    One marks a flow run as Crashed when its heartbeats have ended `seconds` ago and it has not: a killed process, a
    lost machine. With `notify`, an address, another one posts a line of JSON to it for each event of `NOTIFIED`: Slack,
    Mattermost and ntfy read its `text`. An event may be posted twice: Prefect delivers at least once. Prefect
    stores the address encrypted, in a block. Raises UserError for an address that is none.
    """
    require_address(notify)
    project = project_name(root)
    flows = [f"{project}-run", f"{project}-nightly", f"{project}-trial"]
    ours = ResourceSpecification({"prefect.resource.role": "flow", "prefect.resource.name": flows})
    heartbeat, *ends = (
        f"prefect.flow-run.{what}" for what in ("heartbeat", "Completed", "Failed", "Cancelled", "Crashed")
    )
    lost = EventTrigger(
        match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}), match_related=ours,
        for_each={"prefect.resource.id"}, after={heartbeat}, expect={heartbeat, *ends}, posture=Posture.Proactive,
        threshold=1, within=timedelta(seconds=seconds),
    )  # fmt: skip
    crash = ChangeFlowRunState(state=StateType.CRASHED, message="its process was killed, or its machine is lost")
    wanted = [Automation(name=LOST_RUNS.format(project), trigger=lost, actions=[crash])]
    if notify is not None:
        name = f"leash-notify-{project}".lower().replace("_", "-").replace(".", "-")  # what Prefect takes for a block
        try:
            block = cast("UUID", Webhook(method="POST", url=notify).save(name, overwrite=True))
        except ValueError as error:
            raise UserError(f"--notify: {' '.join(str(error).split())}") from None
        what = "event.payload.get('decision') or event.payload.get('alert') or event.resource.id"
        text = f'{{"text": {{{{ ("{project}: " ~ event.event ~ ": " ~ ({what})) | tojson }}}}}}'
        event = EventTrigger(match_related=ours, expect=NOTIFIED, posture=Posture.Reactive, threshold=1)
        post = CallWebhook(block_document_id=block, payload=text)
        wanted.append(Automation(name=POSTS.format(project), trigger=event, actions=[post]))
    for one in wanted:
        if (known := find(one.name)) is None:
            one.create()
        else:
            one.id = known.id
            one.update()
