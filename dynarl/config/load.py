"""From files and --set options to a Config, with the origin of every value.

Layers, a later one wins key by key (lists and free-form tables are replaced whole):

    built-in < cluster file < job file < --set

The cluster file holds the same sections as a job file. It is $DYNARL_CLUSTER (a path, a name, or `none`), else
/etc/dynarl/clusters.d/$SLURM_CLUSTER_NAME.yaml, else the only file in /etc/dynarl/clusters.d.
"""

from __future__ import annotations

import difflib
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dynarl.config import text, validate
from dynarl.config.schema import Config, Section
from dynarl.errors import ConfigError

SITE_CLUSTERS = Path("/etc/dynarl/clusters.d")
BUILT_IN = "built-in"
NO_CLUSTER = "none"


@dataclass(frozen=True)
class Loaded:
    """A configuration and, for every leaf ("cluster.nodes"), where its value was written ("job.yaml:12")."""

    config: Config
    origins: dict[str, str]


def load(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """The checked configuration of a job file with `--set` options laid over it. Raises ConfigError with every fault
    found.
    """
    loaded = load_layers(path, overrides)
    validate.check(loaded.config)
    return loaded.config


def load_layers(path: str | Path | None, overrides: Iterable[str] = ()) -> Loaded:
    """As `load`, with origins and without the cross-field checks. `path` None: built-in and cluster values only."""
    layers = []
    cluster = cluster_file()
    if cluster is not None:
        layers.append(_read(cluster))
    if path is not None:
        layers.append(_read(Path(path)))
    layers += [_override(option) for option in overrides]
    return _build(layers)


def from_text(job: str, source: str = "job") -> Loaded:
    """As `load_layers`, from YAML text alone (no cluster file)."""
    return _build([_mapping(text.parse(job, source), source)])


def dump(config: Config) -> str:
    """The whole configuration as YAML: a job file that gives this configuration on any cluster."""
    return text.dump(msgspec.to_builtins(config))


def cluster_file() -> Path | None:
    """The site's layer, or None. Raises ConfigError where $DYNARL_CLUSTER names nothing or the choice is unclear."""
    wanted = os.environ.get("DYNARL_CLUSTER")
    if wanted == NO_CLUSTER:
        return None
    if wanted:
        candidates = (
            [Path(wanted)]
            if "/" in wanted or wanted.endswith((".yaml", ".yml"))
            else [SITE_CLUSTERS / f"{wanted}.yaml"]
        )
        for candidate in candidates:
            if candidate.is_file():
                return candidate
        raise ConfigError(f"DYNARL_CLUSTER={wanted}: no file {candidates[0]}. {_known_clusters()}")
    files = sorted(SITE_CLUSTERS.glob("*.yaml"))
    named = SITE_CLUSTERS / f"{os.environ.get('SLURM_CLUSTER_NAME', '')}.yaml"
    if named in files:
        return named
    if len(files) > 1:
        raise ConfigError(f"which cluster is this? Set DYNARL_CLUSTER. {_known_clusters()}")
    return files[0] if files else None


def _known_clusters() -> str:
    names = ", ".join(sorted(file.stem for file in SITE_CLUSTERS.glob("*.yaml")))
    return f"In {SITE_CLUSTERS}: {names or 'nothing'}"


def _read(path: Path) -> text.Mapping:
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return _mapping(text.parse(content, str(path)), str(path))


def _mapping(node: text.Node, source: str) -> text.Mapping:
    if not isinstance(node, text.Mapping):
        raise ConfigError(f"{source}: expected sections such as `run:` and `cluster:`, found {_shown(_plain(node))}")
    return node


def _override(option: str) -> text.Mapping:
    """`a.b=c` as a layer of its own; c is YAML."""
    path, equals, value = option.partition("=")
    origin = f"--set {path}"
    if not equals or not re.fullmatch(r"\w+(\.[\w-]+)+", path):
        raise ConfigError(f"--set {option!r}: expected SECTION.KEY=VALUE, such as --set cluster.nodes=8")
    node: text.Node = text.parse(value, origin, numbered=False) if value else text.Scalar("", "", origin)
    for key in reversed(path.split(".")):
        node = text.Mapping({key: node}, origin)
    return typing.cast(text.Mapping, node)


def _build(layers: list[text.Mapping]) -> Loaded:
    faults: list[str] = []
    values: dict[str, Any] = {}
    origins = {path: BUILT_IN for path in _leaves(Config)}
    for layer in layers:
        _lay_over(values, layer, Config, "", origins, faults)
    if not faults:
        try:
            return Loaded(msgspec.convert(values, Config), origins)
        except msgspec.ValidationError as error:  # e.g. a rule of the schema that spans fields
            faults.append(str(error))
    raise ConfigError("\n".join(faults))


def _lay_over(
    values: dict, layer: text.Mapping, section: type[Section], prefix: str, origins: dict, faults: list[str]
) -> None:
    """Put a layer's values into `values`, checking each key and type on the way so that every fault is reported, not
    one.
    """
    known = typing.get_type_hints(section, include_extras=True)
    for key, node in layer.items.items():
        path = prefix + key
        if key not in known:
            faults.append(f"{node.origin}: unknown key {path}{_nearest(key, prefix, known)}")
        elif isinstance(known[key], type) and issubclass(known[key], Section):
            if isinstance(node, text.Scalar) and node.value is None:
                continue  # a section whose keys are all commented out
            if isinstance(node, text.Mapping):
                _lay_over(values.setdefault(key, {}), node, known[key], path + ".", origins, faults)
            else:
                faults.append(f"{node.origin}: {path} is a section with keys of its own, got {_shown(_plain(node))}")
        else:
            value = _plain(node, _wants(known[key]))
            try:
                msgspec.convert(value, known[key])
            except msgspec.ValidationError as error:
                faults.append(f"{node.origin}: {path}: {_reason(error, known[key])}, got {_shown(value)}")
            else:
                values[key], origins[path] = value, node.origin


def _nearest(key: str, prefix: str, known: dict) -> str:
    """What the writer may have meant: a key of this section, else the same key of another section."""
    if close := difflib.get_close_matches(key, known, n=1, cutoff=0.6):
        return f"; did you mean {prefix}{close[0]}?"
    leaves = list(_leaves(Config))
    if same := [leaf for leaf in leaves if leaf.rpartition(".")[2] == key]:
        return f"; there is {' and '.join(same)}"
    if close := difflib.get_close_matches(prefix + key, leaves, n=1, cutoff=0.6):
        return f"; did you mean {close[0]}?"
    return f"; known here: {', '.join(known)}"


def _leaves(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, kind in typing.get_type_hints(section).items():
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _leaves(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def _wants(kind: Any) -> str:
    """Where a field takes text: "itself", in its "items", or "" for nowhere. There `30` means "30"."""
    while typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if kind is str:
        return "itself"
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kinds = set(typing.get_args(kind)) - {type(None)}
        return "itself" if kinds == {str} else ""
    arguments = typing.get_args(kind)
    return "items" if typing.get_origin(kind) in (list, dict) and arguments[-1] is str else ""


def _plain(node: text.Node, wants: str = "") -> Any:
    """A node as plain Python values."""
    if isinstance(node, text.Mapping):
        return {key: _plain(item, "itself" if wants == "items" else "") for key, item in node.items.items()}
    if isinstance(node, text.Sequence):
        return [_plain(item, "itself" if wants == "items" else "") for item in node.items]
    return node.text if wants == "itself" and node.value is not None else node.value


def _reason(error: msgspec.ValidationError, kind: Any) -> str:
    """What was expected, and in which item; the value is added by the caller."""
    while typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is typing.Literal:
        return f"expected one of {', '.join(typing.get_args(kind))}"
    reason, _, where = str(error).partition(" - at ")
    inside = where.strip("`").removeprefix("$").replace("[...]", "its values")
    reason = re.sub(r", got `[^`]*`$", "", reason).replace("`", "")
    return (f"in {inside}: " if inside else "") + reason[0].lower() + reason[1:]


def _shown(value: Any) -> str:
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
