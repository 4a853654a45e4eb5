import pytest

from dynarl.report.units import duration, iso_time


@pytest.mark.parametrize(
    "seconds, text",
    [(None, "-"), (0.04, "0.0s"), (9.96, "10s"), (59.6, "1m00s"), (185, "3m05s"), (7620, "2h07m"), (93700, "1d02h")],
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_times_are_iso_8601_in_utc():
    assert iso_time(1_700_000_000.25) == "2023-11-14T22:13:20.250Z"
    assert iso_time(None) is None
