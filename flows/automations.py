"""The automations of this project on a Prefect server; `leash up` and `leash study --pool` install them."""

from datetime import timedelta
from typing import TYPE_CHECKING, cast

from rlhf_core.errors import UserError

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.automations import Automation

LOST_SECONDS = 95.0
"""A run without a heartbeat for so long is lost. Heartbeats come every 30 seconds, Prefect's minimum."""
NOTIFIED = ("leash.alert.*", "leash.promoted", "leash.kept", "prefect.flow-run.Failed", "prefect.flow-run.Crashed")
"""Events that are posted, where somebody wants them."""
ENDINGS = ("Completed", "Failed", "Cancelled", "Crashed")


def install(notify: str | None = None) -> None:
    """Create each automation, or bring it up to date; with `notify`, an address, the one that posts to it. Raises
    UserError for an address that is none."""
    from prefect.automations import Automation

    for wanted in (mark_lost_runs(), *([post_to(notify)] if notify else [])):
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


def post_to(address: str) -> "Automation":
    """Posts a line of JSON to the address for each event of `NOTIFIED`: Slack, Mattermost and ntfy read its `text`.
    Prefect stores the address encrypted, in the block `leash-notify`. Raises UserError."""
    from prefect.automations import Automation
    from prefect.blocks.webhook import Webhook
    from prefect.events.actions import CallWebhook
    from prefect.events.schemas.automations import EventTrigger, Posture
    from pydantic import ValidationError

    if not address.startswith(("http://", "https://")):
        raise UserError(f"--notify {address}: not an address; write https://…")
    try:
        block = cast("UUID", Webhook(method="POST", url=address).save("leash-notify", overwrite=True))
    except (ValidationError, ValueError) as error:
        raise UserError(f"--notify: {' '.join(str(error).split())}") from None
    what = "event.payload.get('decision') or event.payload.get('alert') or event.resource.id"
    text = f'{{"text": {{{{ (event.event ~ ": " ~ ({what})) | tojson }}}}}}'
    return Automation(
        name="leash: post alerts and decisions",
        trigger=EventTrigger(expect=set(NOTIFIED), posture=Posture.Reactive, threshold=1),
        actions=[CallWebhook(block_document_id=block, payload=text)],
    )
