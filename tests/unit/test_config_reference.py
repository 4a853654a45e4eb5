import typing
from pathlib import Path

from dynarl.config import reference
from dynarl.config.schema import Config
from dynarl.config.structs import leaves

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_in_docs_is_that_of_the_schema():
    assert PAGE.read_text() == reference.rendered(), "python -m dynarl.config.reference > docs/configuration.md"


def test_every_setting_is_there_with_a_meaning():
    rows = [line for line in reference.rendered().splitlines() if line.startswith("| `")]
    assert len(rows) == len(list(leaves(Config)))
    assert [row for row in rows if row.rstrip(" |").count("|") < 4] == []


def test_every_section_says_what_it_is():
    for name, kind in typing.get_type_hints(Config).items():
        assert kind.__doc__ and "refused" not in kind.__doc__, name
