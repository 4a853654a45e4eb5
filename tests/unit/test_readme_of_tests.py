"""The table of edge cases in tests/README.md."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
README = (TESTS / "README.md").read_text()


def test_every_edge_case_names_tests_that_are_there():
    rows = re.findall(r"^\| (\d+) \|(.*)$", README, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 34))
    for number, row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, f"case {number} has no test"
        for path, name in named:
            assert re.search(rf"^def {name}\(", (TESTS / path).read_text(), re.MULTILINE), f"{number}: {path} has no {name}"
