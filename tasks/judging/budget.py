"""How many requests and tokens a judge behind an endpoint may use."""

from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from rlhf_core.errors import UserError


@dataclass
class Budget:
    """The requests and tokens of one stage. Requests of stopped and killed processes count: each is a byte of `file`,
    written before it is sent. Safe to use from several threads."""

    most_requests: int
    most_tokens: int | None
    file: Path
    tokens: int = 0
    _lock: Lock = field(default_factory=Lock)

    @property
    def requests(self) -> int:
        """How many were sent."""
        return self.file.stat().st_size if self.file.exists() else 0

    def plan(self, requests: int, tokens: int) -> str:
        """What comes next and what is left, in words. Raises UserError where requests are more than are left."""
        used = self.requests
        left = self.most_requests - used
        planned = f"{requests:,} requests, about {tokens:,} tokens"
        if requests > left:
            raise UserError(
                f"{planned} are more than the budget: {left:,} of {self.most_requests:,} requests are left; raise "
                "runtime.api.max_requests, or judge fewer pairs"
            )
        limit = "no limit of tokens" if self.most_tokens is None else f"{self.most_tokens:,} tokens"
        return f"{planned}; budget {self.most_requests:,} requests, {limit}; used {used:,} and {self.tokens:,}"

    def take(self) -> None:
        """Count a request that is about to be sent. Raises UserError where the budget is used up."""
        with self._lock:
            if self.requests >= self.most_requests:
                raise self._used_up(f"{self.most_requests:,} requests", "max_requests")
            if self.most_tokens is not None and self.tokens >= self.most_tokens:
                raise self._used_up(f"{self.most_tokens:,} tokens", "max_tokens")
            with self.file.open("ab") as file:
                file.write(b".")

    def add(self, tokens: int) -> None:
        """Count the tokens of an answer."""
        with self._lock:
            self.tokens += tokens

    def _used_up(self, what: str, key: str) -> UserError:
        return UserError(
            f"the judge's budget of {what} is used up; all verdicts are saved: raise runtime.api.{key} and run the "
            "same command"
        )
