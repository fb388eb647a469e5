"""One search after another: the second one begins where the first has ended, and knows all that was measured."""

from __future__ import annotations
