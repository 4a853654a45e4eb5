"""`dynarl bench NAME`: measurements on a Slurm of this machine, or on the site's."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import msgspec

from dynarl.cli import output
from dynarl.errors import DynarlError, SlurmError

POLL_S = 2.0
VPS_PARTS = ("planning", "wire", "sync", "state", "weights", "phases")
ROLES_JOBS = {"math": "bench-roles.yaml", "agentic": "bench-agentic.yaml"}
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Run a benchmark. Ratios are against baselines measured in the same run; figures are medians."""


@command.command(cls=output.Command)
@click.option(
    "--job",
    type=click.Choice(tuple(ROLES_JOBS)),
    default="math",
    show_default=True,
    help="The work: long answers; or agentic, answers in several turns with tool calls.",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Work of your own, in place of what --job names.",
)
@click.option("--cpu-quota", default=0.2, show_default=True, help="Cores that one simulated node gets.")
@click.option("--site", is_flag=True, help="Use the Slurm that this shell speaks to, instead of starting one.")
@click.option("--keep", is_flag=True, help="Keep the run directory and the Slurm that was started.")
@output.format_option("table", "json")
def roles(job: str, config: Path | None, cpu_quota: float, site: bool, keep: bool, output_format: str) -> None:
    """Moving nodes against every static split and against colocated; and what one move costs.

    With agentic also: order of waiting requests by priority against by arrival. Takes up to half an hour on two cores.
    """
    from dynarl.bench.roles_summary import summary
    from dynarl.config import load
    from dynarl.slurm import jobscript

    path = config or jobscript.SHARE / "configs" / "jobs" / ROLES_JOBS[job]
    nodes = load.load(path).cluster.nodes
    results = msgspec.json.decode(_run_job("dynarl.bench.roles", path, nodes, cpu_quota, site, keep))
    figures = summary(results)
    if output_format == "json":
        output.print_json(figures)
    else:
        _show_roles(figures)


@command.command(cls=output.Command)
@output.format_option("table", "json")
@click.option("--part", "parts", multiple=True, type=click.Choice(VPS_PARTS), help="Only this part; may be given again.")
@click.option("--link-rate", metavar="RATE", help="Of the network in part wire, in tc's units, such as 4gbit. Needs root.")
def vps(output_format: str, parts: tuple[str, ...], link_rate: str | None) -> None:
    """Moving model state between parallel layouts: planning, and moves between four processes against baselines.

    Parts: planning (time, memory, projected time), wire (against raw MPI), sync (weights to all nodes), state (against
    checkpoints and against a detour over first owners), weights (against megatron.core.resharding), phases (CPU time of
    a trainer's change of layout). About five minutes.
    """
    from dynarl.bench import vps_live, vps_plan

    figures = {"bench": "vps"}
    for part in parts or VPS_PARTS:
        output.note(f"measuring {part}")
        figures[part] = vps_plan.measure() if part == "planning" else vps_live.run(part, link_rate if part == "wire" else None)
    if output_format == "json":
        output.print_json(figures)
        return
    if "planning" in figures:
        _show_planning(figures["planning"])
    _show_moves(figures)


@command.command(cls=output.Command)
@output.format_option("table", "json")
def scheduler(output_format: str) -> None:
    """Decisions of the adaptive policy: how long they take, and how good they are against schedules that know more.

    Needs neither Slurm nor torch. Takes two to four minutes.
    """
    from dynarl.bench.scheduler import measure

    figures = measure(output.note)
    if output_format == "json":
        output.print_json(figures)
        return
    table = output.table(">devices", ">components", ">live requests", ">median", ">p99")
    for row in figures["rows"]:
        table.add_row(*(f"{row[key]}" for key in ("devices", "components", "live_requests")),
                      *(f"{row[key]:.1f} ms" for key in ("p50_ms", "p99_ms")))
    console, to, search = output.console(), figures["seconds_to"], figures["ratio_to_exhaustive"]
    console.print(table)
    console.print(f"Forecast end, to that of the best of all allocations: {search['mean']:.4f} in the mean, {search['worst']:.4f} at worst.")
    console.print(f"Iterations on paper took {to['clairvoyant']:.3f} of the time of the best schedule found that knows all lengths, "
                  f"{to['bound']:.2f} of what no schedule beats, {to['threshold']:.2f} of threshold's and {to['colocated']:.2f} of colocated's.")


@command.command(cls=output.Command)
@output.format_option("table", "json")
def sim(output_format: str) -> None:
    """The simulator: events per second, memory, and how both grow with GPUs and sequences.

    Needs neither Slurm nor torch. Takes a few minutes.
    """
    from dynarl.bench.sim import measure
    from dynarl.report.units import size

    figures = measure(output.note)
    if output_format == "json":
        output.print_json(figures)
        return
    table = output.table("policy", ">GPUs", ">sequences", ">CPU time", ">events", ">events/s", ">memory")
    for row in figures["rows"]:
        table.add_row(row["policy"], f"{row['gpus']}", f"{row['sequences']}", f"{row['seconds']:.2f} s", f"{row['events']:,}",
                      f"{row['events_per_s']:,.0f}", size(row["peak_bytes"]))
    console = output.console()
    console.print(table)
    grows = ", ".join(f"{exponent:.2f} ({policy})" for policy, exponent in figures["growth"].items())
    console.print(f"Time grows with the number of sequences to the power of {grows}.")


@command.command(cls=output.Command)
@output.format_option("table", "json")
def plan(output_format: str) -> None:
    """The search for a plan on 8 to 16384 devices: CPU seconds that it takes.

    Needs neither Slurm nor torch. Takes about a minute.
    """
    from dynarl.bench.plan import measure

    figures = measure()
    if output_format == "json":
        output.print_json({"bench": "plan", "rows": figures})
        return
    table = output.table("case", ">stages", "unit", ">devices", ">posed in", ">found in", ">published", "plan")
    for row in figures:
        published = f"{row['published_s']:g} s" if row["published_s"] else ""
        table.add_row(
            row["case"], str(row["stages"]), row["unit"], str(row["devices"]), f"{row['pose_s']:.3f} s",
            f"{row['search_s']:.3f} s", published, row["plan"],
        )  # fmt: skip
    output.console().print(table)


def _show_moves(figures: dict) -> None:
    """One line for each comparison."""
    lines = []
    if "state" in figures:
        lines += [(f"optimizer state, {name}", ratio) for name, ratio in figures["state"]["times_faster"].items()]
    if "weights" in figures:
        ratios = figures["weights"]["times_faster_than_megatron"].items()
        lines += [(f"weights by {name}, than megatron.core.resharding", ratio) for name, ratio in ratios]
    if "wire" in figures:
        lines += [(f"bytes per second of the wire, to {name}", ratio) for name, ratio in figures["wire"]["ratio_to"].items()]
    if lines:
        table = output.table("comparison", ">times")
        for name, ratio in lines:
            table.add_row(name, f"{ratio:.2f}")
        output.console().print(table)
    if "phases" in figures:
        table = output.table("phase of a change of layout", ">seconds", ">of CPU", ">in the kernel")
        for name, seconds in figures["phases"].items():
            cpu = seconds["user_s"] + seconds["kernel_s"]
            table.add_row(name, *(f"{1e3 * each:.0f} ms" for each in (seconds["elapsed_s"], cpu, seconds["kernel_s"])))
        output.console().print(table)
    if "sync" in figures:
        sync = figures["sync"]
        click.echo(
            f"Weights of a model of {sync['parameters']:,} parameters to four nodes: {sync['median_ms']:.1f} ms, "
            f"the first time {sync['first_ms']:.1f} ms"
        )


def _show_planning(cases: list[dict]) -> None:
    from dynarl.report.units import size

    table = output.table(
        "model", "ranks", ">whole table", ">memory", ">one rank", ">moved", ">peak/state", ">projected", ">published"
    )
    for case in cases:
        table.add_row(
            case["model"],
            "{} to {}".format(*case["ranks"]),
            f"{case['whole_s']:.2f} s",
            size(case["whole_peak_bytes"]),
            f"{case['one_rank_s'] * 1e3:.0f} ms",
            f"{case['bytes_moved'] / case['bytes_held']:.0%}",
            f"{case['largest_peak'] / case['largest_state']:.2f}",
            f"{case['projected_s']:.2f} s",
            f"{case['published_s']:g} s",
        )
    console = output.console()
    console.print(table)
    console.print(
        f"Projected at {size(cases[0]['link_bytes_per_s'])}/s per rank, in the plan's order of messages; the busiest "
        f"link alone needs {', '.join('{:.2f}'.format(case['projected_at_best_s']) for case in cases)} s. "
        "Published: whole transitions on 128 A800, layouts not named."
    )


def _run_job(module: str, config: Path, nodes: int, cpu_quota: float, site: bool, keep: bool) -> bytes:
    """Run `python -m module` as the controller of a job; returns the bytes of its bench.json."""
    from dynarl.slurm.mini.handle import MiniSlurm

    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dynarl"
    home.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="bench-", dir=home))
    cluster = None
    try:
        env = dict(os.environ)
        if not site:
            output.note(f"starting a Slurm of {nodes} nodes with {cpu_quota:g} cores each")
            cluster = MiniSlurm.start(work / "slurm", nodes=nodes, cpus_per_node=1, cpu_quota=cpu_quota)
            env = cluster.env
        (work / "run").mkdir()
        # A copy, because nodes need not see where the original lies: theirs is another /tmp.
        shutil.copyfile(config, work / "job.yaml")
        source = Path(__file__).resolve().parents[2]
        quoted = {
            name: shlex.quote(str(value))
            for name, value in {
                "work": work,
                "source": source,
                "python": sys.executable,
                "config": work / "job.yaml",
                "run": work / "run",
            }.items()
        }
        script = (
            "cd {work}; PYTHONPATH={source} exec {python} -u -m {module} --config {config} --run-dir {run}"
        ).format(module=module, **quoted)
        job = _submit(
            [f"--nodes={nodes}", "--exclusive", "--mem=0", f"--output={work}/slurm.out", "--wrap", script], env
        )
        _follow(work, job, env)
        result = work / "run" / "bench.json"
        if not result.exists():
            raise DynarlError(f"the benchmark job left no result; the end of its output:\n{_tail(work / 'slurm.out')}")
        return result.read_bytes()
    finally:
        if cluster is not None and not keep:
            cluster.down()
        if keep:
            output.note(f"kept: {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)


def _submit(options: list[str], env: dict[str, str]) -> str:
    """sbatch; returns the job id. Raises SlurmError with what sbatch said."""
    try:
        done = subprocess.run(["sbatch", "--parsable", *options], env=env, capture_output=True, text=True)
    except FileNotFoundError:
        raise SlurmError("sbatch is not on the PATH; without --site the benchmark starts a Slurm of its own") from None
    if done.returncode:
        raise SlurmError(f"sbatch refused the benchmark's job: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def _follow(work: Path, job: str, env: dict[str, str]) -> None:
    """Wait for the job; say what it measured as it goes."""
    said, failures = 0, 0
    while True:
        asked = subprocess.run(["squeue", "-h", "-j", job, "-o", "%T"], env=env, capture_output=True, text=True)
        # A slurmctld that does not answer once is no end of the job; one that has forgotten the job says so each time.
        failures = failures + 1 if asked.returncode else 0
        state = asked.stdout.strip()
        lines = [line for line in _lines(work / "slurm.out") if " round " in line]
        for line in lines[said:]:
            output.note(line.partition("INFO ")[2])
        said = len(lines)
        if failures > 5 or (not failures and (not state or state in FINAL)):
            return
        time.sleep(POLL_S)


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _tail(path: Path) -> str:
    return "\n".join(_lines(path)[-12:])


def _show_roles(figures: dict) -> None:
    console, rates = output.console(), figures["tokens_per_s"]
    best, breakdown = figures["best_static"], figures["breakdown"]
    console.print(f"Medians on {figures['nodes']} nodes. Splits are rollout:inference:training.")
    table = output.table("nodes used as", ">tokens/s", ">against best static", ">prefill saved")
    for name, rate in sorted(rates.items(), key=lambda item: -item[1]):
        saved = f"{breakdown[name]['prefill_saved']:.0%}" if name in breakdown else ""
        table.add_row(name, f"{rate:,.0f}", f"{rate / rates[best]:.2f}", saved, style="bold" if name == best else None)
    console.print(table)
    for name, ratio in figures["priority_to_arrival"].items():
        console.print(f"{name}: {ratio:.2f} times as fast by priority as by arrival.")
    console.print("\nWhere the time goes: seconds; then, until the last gradient, node-seconds idle in a role or moving")
    keys = "enter_s", "generate_s", "finish_s", "update_s"
    idle = *(f"{role}_idle_node_s" for role in ("rollout", "inference", "training")), "moving_node_s"
    table = output.table("", ">begin", ">generate", ">finish", ">update", ">rollout", ">inference", ">training", ">moving")
    for name in (best, *figures["to_best_static"]):
        row = breakdown[name] | {"update_s": breakdown[name]["step_s"] + breakdown[name]["sync_s"]}
        table.add_row(name, *(f"{row[key]:.1f}" for key in (*keys, *idle)))
    console.print(table)
    if "move_pause_without_drain_ms" not in figures:
        return
    move = figures["move"]
    phases = ", ".join(
        f"{name.removesuffix('_ms')} {move[name]:.0f}" for name in move if name.endswith("_ms") and "pause" not in name
    )
    pause, without_drain = move["pause_ms"], figures["move_pause_without_drain_ms"]
    console.print(f"A move pauses its node {pause:.0f} ms, {without_drain:.0f} ms without the drain ({phases} ms).")
    restart, ratio = figures["restart_pause_ms"], figures["restart_to_move"]
    console.print(f"The same by ending and starting the step: {restart:,.0f} ms, {ratio:.0f} times as long.")
