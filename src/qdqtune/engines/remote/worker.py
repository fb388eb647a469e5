"""A worker on another machine as its runner sees it: files and arrays go there by content, and outcomes come back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from qdqtune.engines.execution import Check
from qdqtune.engines.remote.files import Sender
from qdqtune.engines.remote.messages import Reply, WorkerLocation
from qdqtune.errors import BadOption, EngineUnavailable

NETWORK_SECONDS = 60.0
"""How long messages may take on the way to another host and back, beside what is asked for. Chosen, not measured."""


class LinkLostError(Exception):
    """The way to a worker is lost, and with it the worker: says why."""


class Link(Protocol):
    """The way to a `WorkerActor`."""

    def ask(self, name: str, arguments: tuple[Any, ...], limit: float, check: Check | None) -> Reply:
        """`WorkerActor.request`. What `check` raises ends the wait.

        Raises:
            TimeoutError: no answer within `limit`, or some time after it that the way may take.
            LinkLostError: see there.
        """

    def end(self) -> None:
        """End the actor and its engine process."""


class RemoteWorker:
    """A `process.Worker`: the engine process of an actor."""

    def __init__(self, link: Link, location: WorkerLocation, sender: Sender) -> None:
        self._link, self._sender = link, sender
        self._reason = self._printed = ""
        self._has_ended, self.alive = False, True
        self.location = str(location)

    def request(
        self, name: str, arguments: tuple[Any, ...], limit: float, check: Check | None = None
    ) -> tuple[bool, Any]:
        """Implements `Worker.request`."""
        log = target = None
        try:
            if name == "build":
                number, path, log = arguments
                arguments = (number, self._sender.model(path), None)
            elif name == "save":
                _, target = arguments
            elif name == "feed":
                arguments = (tuple(replace(w, inputs=self._sender.arrays(w.inputs)) for w in arguments[0]),)
            elif name == "run":
                arguments = (arguments[0], self._sender.arrays(arguments[1]))
            reply = self._link.ask(name, arguments, limit, check)
        except LinkLostError as lost:
            self.alive, self._reason = False, str(lost)
            raise EOFError from lost
        if log is not None and reply.text:
            log.write_text(reply.text, encoding="utf-8", errors="backslashreplace")
        if reply.kind == "ended":
            self.alive, self._reason = False, reply.text
            raise EOFError
        if reply.kind == "timeout":
            self._printed = reply.text
            raise TimeoutError
        if target is not None and reply.good:
            target.write_bytes(reply.content)
        if isinstance(reply.result, EngineUnavailable | BadOption) and self.location not in str(reply.result):
            return False, type(reply.result)(f"on {self.location}: {reply.result}")
        return reply.good, reply.result

    def kill(self) -> None:
        """Implements `Worker.kill`."""
        self.alive = False
        if not self._has_ended:
            self._has_ended = True
            self._link.end()

    def exit_reason(self) -> str:
        """Implements `Worker.exit_reason`."""
        return f"{self._reason or 'no reason given'} on {self.location}"

    def printed(self) -> str:
        """Implements `Worker.printed`."""
        return self._printed
