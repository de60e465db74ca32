"""Triton kernels run on the GPU where there is one and in Triton's interpreter elsewhere (tests/shared_fixtures.py)."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_triton_*.py"]
