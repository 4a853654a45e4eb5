"""Where the tests find the interpreter that has SGLang: $DYNARL_SGLANG_PYTHON, else what bin/install-sglang has made here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PYTHON = os.environ.get("DYNARL_SGLANG_PYTHON") or str(Path(__file__).parents[1] / ".cache/sglang-venv/bin/python")
NEEDED = [pytest.mark.slow, pytest.mark.skipif(not os.path.exists(PYTHON), reason=f"no {PYTHON}: run bin/install-sglang")]


def directories() -> list[str]:
    """The environment's directory, if it is there."""
    return [str(Path(PYTHON).parents[1])] if os.path.exists(PYTHON) else []
