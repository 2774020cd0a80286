"""A mistake in the data that its owner can mend."""

from __future__ import annotations

from protomodels_cli.errors import UserError


class DataError(UserError):
    """Text, token files or the cache of them."""
