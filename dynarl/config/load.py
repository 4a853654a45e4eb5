"""From files and --set options to a Config, with the origin of every value.

Layers, a later one wins key by key (lists and free-form tables are replaced whole):

    built-in < cluster file < job file < --set

The cluster file holds the same sections as a job file. It is $DYNARL_CLUSTER (a path, a name, or `none`), else
/etc/dynarl/clusters.d/$SLURM_CLUSTER_NAME.yaml, else the only file in /etc/dynarl/clusters.d.
"""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dynarl.config import text, validate
from dynarl.config.schema import Config, Section
from dynarl.config.structs import leaves, nearest, plain, reason, shown, wants
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
        raise ConfigError(f"{source}: expected sections such as `run:` and `cluster:`, found {shown(plain(node))}")
    return node


def _override(option: str) -> text.Mapping:
    """`a.b=c` as a layer of its own; c is YAML."""
    path, equals, value = option.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.[\w-]+)+", path):
        raise ConfigError(f"--set {option!r}: expected SECTION.KEY=VALUE, such as --set cluster.nodes=8")
    return text.layer(path, value)


def _build(layers: list[text.Mapping]) -> Loaded:
    faults: list[str] = []
    values: dict[str, Any] = {}
    origins = {path: BUILT_IN for path in leaves(Config)}
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
            faults.append(f"{node.origin}: unknown key {path}{nearest(key, prefix, known, Config)}")
        elif isinstance(known[key], type) and issubclass(known[key], Section):
            if isinstance(node, text.Scalar) and node.value is None:
                continue  # a section whose keys are all commented out
            if isinstance(node, text.Mapping):
                _lay_over(values.setdefault(key, {}), node, known[key], path + ".", origins, faults)
            else:
                faults.append(f"{node.origin}: {path} is a section with keys of its own, got {shown(plain(node))}")
        else:
            value = plain(node, wants(known[key]))
            try:
                msgspec.convert(value, known[key])
            except msgspec.ValidationError as error:
                faults.append(f"{node.origin}: {path}: {reason(error, known[key])}, got {shown(value)}")
            else:
                values[key], origins[path] = value, node.origin
