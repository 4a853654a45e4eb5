"""The examples in docstrings hold. Modules whose libraries are not installed are skipped."""

import doctest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "dynarl").rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name):
    found = doctest.testmod(pytest.importorskip(name, exc_type=ImportError))
    assert found.attempted and not found.failed
