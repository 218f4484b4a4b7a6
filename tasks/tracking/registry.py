"""The registered policy in MLflow: its versions by alias, and which of them is the champion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from rlhf_core.errors import UserError
from tasks import naming
from tasks.tracking import settings

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

CHAMPION, CHALLENGER = "champion", "challenger"
BEFORE = "leash.champion_before"
"""Tag of a version that became the champion: the version that was it before, or `none`."""
ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


@dataclass(frozen=True)
class Version:
    """A version of the registered policy."""

    number: str
    digest: str
    """DVC's hash of its folder."""
    tags: Mapping[str, str] = field(default_factory=dict)
    run: str = ""
    """The MLflow run that registered it."""
    created: float = 0.0
    """Seconds since 1970."""


class Registry:
    """The versions of a project's registered policy. Every method raises UserError when MLflow
    does not answer."""

    def __init__(self, root: Path) -> None:
        self._uri, self._tracking_uri = settings.registry_uri(root), settings.tracking_uri(root)
        self.name = naming.model_name(root)
        """The name of the registered model."""

    @property
    def exists(self) -> bool:
        """False where nothing was ever tracked: the local database does not exist."""
        return not self._uri.startswith("sqlite:///") or Path(self._uri.removeprefix("sqlite:///")).is_file()

    def by_alias(self, alias: str) -> Version | None:
        """The version with this alias."""
        with self._client() as client:
            return None if client is None else _read(client.get_model_version_by_alias(self.name, alias))
        return None

    def by_digest(self, digest: str) -> Version | None:
        """The newest version of the policy with this hash."""
        query = f"name = '{self.name}' and source_path LIKE 'dvc://models/policy?md5={digest}%'"
        with self._client() as client:
            found = [] if client is None else client.search_model_versions(query)
            return _read(found[0]) if found else None
        return None

    def by_number(self, number: str) -> Version | None:
        """This version."""
        with self._client() as client:
            return None if client is None else _read(client.get_model_version(self.name, number))
        return None

    def all(self) -> list[tuple[Version, list[str]]]:
        """Every version with its aliases, the newest first."""
        with self._client() as client:
            if client is not None:
                aliases = client.get_registered_model(self.name).aliases
                found = client.search_model_versions(f"name = '{self.name}'")
                versions = sorted(map(_read, found), key=lambda one: int(one.number), reverse=True)
                return [(one, sorted(a for a, at in aliases.items() if str(at) == one.number)) for one in versions]
        return []

    def page(self, version: Version) -> str | None:
        """The address of the page of the run that registered the version; None where MLflow is no server."""
        with self._client() as client:
            if client is not None and version.run and self._tracking_uri.startswith(("http://", "https://")):
                experiment = client.get_run(version.run).info.experiment_id
                address = settings.without_credentials(self._tracking_uri).rstrip("/")
                return f"{address}/#/experiments/{experiment}/runs/{version.run}"
        return None

    def set_alias(self, alias: str, version: Version) -> None:
        """Give the version this alias, which another one loses."""
        with self._client(reads=False) as client:
            assert client is not None
            client.set_registered_model_alias(self.name, alias, version.number)

    def remove_alias(self, alias: str) -> None:
        """Take the alias from the version that has it."""
        with self._client(reads=False) as client:
            assert client is not None
            client.delete_registered_model_alias(self.name, alias)

    def tag(self, version: Version, tags: Mapping[str, str]) -> None:
        """Set tags of the version, and of the pipeline run that made it."""
        with self._client(reads=False) as client:
            assert client is not None
            run_id = client.get_model_version(self.name, version.number).run_id
            for name, value in tags.items():
                client.set_model_version_tag(self.name, version.number, name, value)
                if run_id:
                    client.set_tag(run_id, name, value)

    @contextmanager
    def _client(self, reads: bool = True) -> Iterator[MlflowClient | None]:
        """MLflow's client; None where nothing was ever tracked. For one that reads, what is absent ends the block."""
        if not self.exists:
            yield None
            return
        settings.prepare_environment()
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        try:
            yield MlflowClient(self._tracking_uri, registry_uri=self._uri)
        except MlflowException as error:
            if not reads or error.error_code not in ABSENT:
                reason = settings.without_credentials(str(error)).split("\n")[0]
                raise UserError(f"MLflow does not answer for the registered policy: {reason}") from None


def _read(version: Any) -> Version:
    made = float(version.creation_timestamp or 0) / 1000
    return Version(
        str(version.version), digest_of(str(version.source)), dict(version.tags), str(version.run_id or ""), made
    )


def digest_of(source: str) -> str:
    """The hash in `dvc://models/policy?md5=HASH&project=FOLDER`; empty where there is none."""
    return parse_qs(urlsplit(source).query).get("md5", [""])[0]
