"""Found through PYTHONPATH by every process of a server that the end-to-end tests start."""

from __future__ import annotations

import e2e_inside  # noqa: F401
