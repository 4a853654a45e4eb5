"""One page, without anything from elsewhere: policies side by side in a table and as pictures of GPUs by role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dynarl.report.simulation import KINDS, Run
from dynarl.report.simulation_plot import svg

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: 1rem 0; } th { text-align: left; font-weight: 600; }
th, td { padding: .3rem 1rem .3rem 0; border-bottom: 1px solid #d8dee4; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
svg { max-width: 100%; height: auto; } code { font-size: .85em; overflow-wrap: anywhere; } .dim { color: #59636e; }
"""


def page(title: str, unit: str, facts: Mapping[str, str], found: Mapping[str, dict[str, Any]], runs: Sequence[Run]) -> str:
    """facts: what was simulated, by name; found: `simulation.summary`; unit: of throughput."""
    first = [run for run in runs if run["seed"] == runs[0]["seed"]]
    about = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in facts.items())
    rows = "".join(_row(policy, entry) for policy, entry in found.items())
    hashes = "".join(
        f"<tr><td>{escape(run['policy'])}</td><td class=n>{run['seed']}</td><td class=n>{run['makespan_s']:.1f} s</td>"
        f"<td><code>{escape(run['events_sha256'])}</code></td></tr>"
        for run in runs
    )
    shares = "".join(f"<th>{kind}</th>" for kind in KINDS)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<table>{about}</table>
<h2>Policies</h2>
<p class="dim">Means over seeds, with 95 % confidence intervals; times faster than {escape(next(iter(found)))}, seed by
seed; then the parts of all GPU time.</p>
<table><tr><th>policy</th><th>makespan</th><th>{escape(unit)}</th><th>times faster</th>{shares}</tr>{rows}</table>
<h2>GPUs by role, seed {first[0]["seed"]}</h2>
{svg(first, "")}
<h2>Runs</h2>
<p class="dim">The same scenario, policy and seed give the same hash of all events.</p>
<table><tr><th>policy</th><th>seed</th><th>makespan</th><th>events</th></tr>{hashes}</table>
</body></html>
"""


def _row(policy: str, entry: Mapping[str, Any]) -> str:
    cells = [
        _with_half(entry["makespan_s"], entry["makespan_s_half"], "{:.1f}", " s"),
        _with_half(entry["throughput"], entry["throughput_half"], "{:,.1f}"),
        _with_half(entry["faster"], entry["faster_half"], "{:.3f}"),
        *(f"{entry['share'][kind]:.0%}" for kind in KINDS),
    ]
    return f"<tr><td>{escape(policy)}</td>" + "".join(f"<td class=n>{cell}</td>" for cell in cells) + "</tr>"


def _with_half(mean: float, half: float | None, form: str, unit: str = "") -> str:
    return form.format(mean) + (f" &plusmn; {form.format(half)}" if half is not None else "") + unit
