import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynarl.slurm import timelimit


@pytest.mark.parametrize(
    "text, minutes",
    [
        ("90", 90),
        ("30:00", 30),
        ("1:00:00", 60),
        ("2-12", 3600),
        ("1-12:30", 2190),
        ("1-00:00:01", 1441),
        ("0:01", 1),
        ("UNLIMITED", None),
        ("infinite", None),
        ("0", None),
        (" 5 ", 5),
        ("3-0:00", 4320),
    ],
)
def test_the_forms_of_slurm(text, minutes):
    assert timelimit.minutes(text) == minutes


@pytest.mark.parametrize("text", ["", "x", "1h", "1:2:3:4", "1-", "-1", "1-2-3", "1.5", "Partition_Limit", "1 00"])
def test_what_fits_no_form_is_quoted_and_the_forms_are_listed(text):
    with pytest.raises(timelimit.TimeLimitError) as error:
        timelimit.minutes(text)
    assert repr(text) in str(error.value) and "days-hours:minutes" in str(error.value)


@given(st.integers(1, 100_000))
def test_what_is_written_reads_back(total):
    assert timelimit.minutes(timelimit.formatted(total)) == total
