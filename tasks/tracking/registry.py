"""The registered policy in MLflow: its versions by alias, and which of them is the champion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from rlhf_core.errors import UserError
from tasks import naming
from tasks.tracking import settings

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

CHAMPION, CHALLENGER = "champion", "challenger"
BEFORE = "leash.champion_before"
"""Tag of a version that became the champion: the version that was it before, or `none`."""


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
    """The versions of a project's registered policy. Every method raises UserError when MLflow does not answer."""

    def __init__(self, root: Path) -> None:
        self._uri, self._tracking_uri = settings.registry_uri(root), settings.tracking_uri(root)
        self.name = naming.model_name(root)
        """The name of the registered model."""

    @property
    def exists(self) -> bool:
        """False where nothing was ever tracked: the local database does not exist."""
        return not self._uri.startswith("sqlite:///") or Path(self._uri.removeprefix("sqlite:///")).is_file()

    def all(self) -> list[tuple[Version, list[str]]]:
        """Every version with its aliases, the newest first."""
        if not self.exists:
            return []
        with self._client() as client:
            models = client.search_registered_models(f"name = '{self.name}'")
            aliases = models[0].aliases if models else {}
            versions = client.search_model_versions(f"name = '{self.name}'")
        found = []
        for one in sorted(versions, key=lambda version: int(version.version), reverse=True):
            number, source = str(one.version), str(one.source)
            digest = parse_qs(urlsplit(source).query).get("md5", [""])[0]  # dvc://models/policy?md5=HASH&project=FOLDER
            created = float(one.creation_timestamp or 0) / 1000
            version = Version(number, digest, dict(one.tags), str(one.run_id or ""), created)
            found.append((version, sorted(alias for alias, at in aliases.items() if str(at) == number)))
        return found

    def by_alias(self, alias: str) -> Version | None:
        """The version with this alias."""
        return next((version for version, aliases in self.all() if alias in aliases), None)

    def by_digest(self, digest: str) -> Version | None:
        """The newest version of the policy with this hash."""
        return next((version for version, _ in self.all() if version.digest == digest), None)

    def by_number(self, number: str) -> Version | None:
        """This version."""
        return next((version for version, _ in self.all() if version.number == number), None)

    def page(self, version: Version) -> str:
        """The address of the page of the run that registered the version; empty where MLflow is no server."""
        if not version.run:
            return ""
        with self._client() as client:
            experiment = client.get_run(version.run).info.experiment_id
        return settings.page_of(self._tracking_uri, experiment, version.run)

    def set_alias(self, alias: str, version: Version) -> None:
        """Give the version this alias, which another one loses."""
        with self._client() as client:
            client.set_registered_model_alias(self.name, alias, version.number)

    def remove_alias(self, alias: str) -> None:
        """Take the alias from the version that has it."""
        with self._client() as client:
            client.delete_registered_model_alias(self.name, alias)

    def tag(self, version: Version, tags: Mapping[str, str]) -> None:
        """Set tags of the version, and of the pipeline run that made it."""
        with self._client() as client:
            for name, value in tags.items():
                client.set_model_version_tag(self.name, version.number, name, value)
                if version.run:
                    client.set_tag(version.run, name, value)

    @contextmanager
    def _client(self) -> Iterator[MlflowClient]:
        """MLflow's client. Its import takes seconds."""
        settings.prepare_environment()
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        try:
            yield MlflowClient(self._tracking_uri, registry_uri=self._uri)
        except MlflowException as error:
            reason = settings.without_credentials(str(error)).split("\n")[0]
            raise UserError(f"MLflow does not answer for the registered policy: {reason}") from None
