"""The errors that scripts catch by these names; all of them are errors of `qdqtune.errors` as well."""

from __future__ import annotations

from qdqtune.errors import InputError


class AutotunerError(InputError):
    """The interface was used in a way that has no answer."""


class NotInGraphError(AutotunerError, ValueError):
    """There is no such tensor or node."""


class AutotunerNotInitializedError(AutotunerError):
    """`initialize` comes first."""


class InvalidSchemeError(AutotunerError):
    """There is no such region, scheme or insertion point."""
