"""`leash sync`: sends to MLflow what waits in `work/outbox`."""

from pathlib import Path


def sync(root: Path, timeout: float) -> tuple[str, bool]:
    """(what was sent and what is left, whether all was sent). `timeout` in seconds."""
    from tasks.records.leftovers import unsent
    from tasks.tracking import outbox
    from tasks.tracking.sender import drain
    from tasks.tracking.settings import tracking_uri, without_credentials

    waiting = unsent(root)
    if not waiting:
        return "nothing waits for MLflow", True
    where = without_credentials(tracking_uri(root))
    drained = drain(root, timeout)
    left = dict(unsent(root))
    lines = [f"to {where}"]
    for folder, events in waiting:
        now = left.get(folder, 0)
        alive = "a running process writes it" if outbox.is_owned(folder) else ""
        reason = f"; {now} left ({alive or without_credentials(drained.reason or 'an earlier one comes first')})"
        lines.append(f"{outbox.series(folder)}: {max(0, events - now)} events sent{reason if folder in left else ''}")
    if drained.left:
        lines.append(f"{drained.left} of {len(waiting)} outboxes still wait; `leash sync` tries again")
    return "\n".join(lines), not drained.left
