"""Simulated runs side by side: intervals, ratios seed by seed, time in parts, and what is drawn of them."""

from html.parser import HTMLParser

import pytest

from dynarl.report import simulation, simulation_text


def span(start_s, end_s, rollout, inference, training, idle=0):
    return dict(start_s=start_s, end_s=end_s, rollout=rollout, inference=inference, training=training, idle=idle)


def run(policy, seed, *timeline):
    end_s = timeline[-1]["end_s"]
    return {"policy": policy, "seed": seed, "makespan_s": end_s, "throughput": 1000 / end_s, "timeline": list(timeline),
            "events_sha256": "ab" * 32}


SLOW = [run("in <turn>", seed, span(0, end / 2, 8, 0, 0), span(end / 2, end, 0, 2, 5, 1)) for seed, end in ((1, 100.0), (2, 50.0))]
FAST = [run("moving", seed, span(0, end, 4, 1, 3)) for seed, end in ((1, 80.0), (2, 20.0))]


@pytest.mark.parametrize("values, half", [([5.0], None), ([1.0, 2.0, 3.0], 2.4843), ([0.0, 1.0] * 10, 0.24006)])
def test_the_interval_is_students(values, half):
    mean, found = simulation.interval(values)
    assert mean == pytest.approx(sum(values) / len(values))
    assert found is None if half is None else found == pytest.approx(half, rel=1e-3)


def test_policies_are_compared_seed_by_seed_with_the_first():
    found = simulation.summary([*SLOW, *FAST])
    assert list(found) == ["in <turn>", "moving"] and found["moving"]["seeds"] == [1, 2]
    assert found["moving"]["faster"] == pytest.approx((100 / 80 + 50 / 20) / 2), "not the ratio of the means"
    assert found["in <turn>"]["faster"] == 1.0 and found["in <turn>"]["faster_half"] == 0.0
    assert found["in <turn>"]["share"] == pytest.approx({"rollout": 0.5, "inference": 1 / 8, "training": 5 / 16, "idle": 1 / 16})


@pytest.mark.parametrize("times", [1, 3, 7, 100])
def test_no_gpu_second_is_lost_between_parts_of_the_time(times):
    timeline, end_s = SLOW[0]["timeline"], 130.0
    parts = simulation.sampled(timeline, times, end_s)
    for kind in simulation.KINDS:
        whole = sum(each[kind] * (each["end_s"] - each["start_s"]) for each in timeline)
        assert sum(part[kind] for part in parts) * end_s / times == pytest.approx(whole)


def test_a_column_shows_each_role_as_high_as_its_share():
    lines = [line.plain for line in simulation_text.render(SLOW[0]["timeline"], 100.0, 42, False, False)]
    columns = list(zip(*(line[2:].ljust(40) for line in lines[:-1])))
    assert {"".join(column) for column in columns[:19]} == {"R" * 8}
    assert {"".join(column) for column in columns[21:]} == {".TTTTTII"}
    assert lines[0].startswith("8 ") and lines[-1].split() == ["0s", "1m40s"]


def test_a_last_iteration_that_is_longer_than_the_mean_is_drawn_to_its_end():
    longer = SLOW[0] | {"makespan_s": 60.0}
    assert simulation.drawn_s([longer, FAST[0]]) == 100.0
    pytest.importorskip("matplotlib")
    from dynarl.report.simulation_plot import figure

    first, second = figure([longer, FAST[0]], "").axes
    assert first.get_xlim()[1] > 100.0 and first.lines[0].get_xdata()[0] == 100.0 and second.lines[0].get_xdata()[0] == 80.0


def test_the_page_stands_alone_and_quotes_what_it_shows():
    pytest.importorskip("matplotlib")
    from dynarl.report.simulation_page import page

    class Checked(HTMLParser):
        outside, text = [], []

        def handle_starttag(self, tag, attrs):
            self.outside += [value for name, value in attrs if name in ("src", "href") and not value.startswith("#")]
            assert tag != "script"

        def handle_data(self, data):
            self.text.append(data)

    checked = Checked()
    runs = [*SLOW, *FAST]
    checked.feed(page("A <title>", "answers/s", {"model": "7b & more"}, simulation.summary(runs), runs))
    text = " ".join(checked.text)
    assert not checked.outside
    for wanted in ("A <title>", "in <turn>", "moving", "7b & more", "answers/s", "ab" * 32):
        assert wanted in text
