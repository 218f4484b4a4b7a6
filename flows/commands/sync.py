"""`leash sync`: makes MLflow agree with what was run here."""

from pathlib import Path


def sync(root: Path, timeout: float) -> tuple[str, bool]:
    """(a line, whether MLflow has all). `timeout` in seconds; 0: without a limit."""
    from tasks.stage.pipeline_run import finish
    from tasks.tracking.settings import tracking_uri, without_credentials

    missing = finish(root, timeout or None)
    return missing or f"MLflow at {without_credentials(tracking_uri(root))} has all that was run here", not missing
