"""YAML with a line number for every value, and without the surprises of YAML 1.1.

`1:00:00` stays text (1.1 makes 3600 of it), `1e-3` is a number (1.1 makes it text), `on` and `no` are text, a key given
twice is an error. Only true, false, null and numbers are anything else than text.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import yaml

from dynarl.errors import ConfigError

_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = {
    "": None,
    "~": None,
    "null": None,
    "true": True,
    "false": False,
    ".inf": math.inf,
    "-.inf": -math.inf,
    ".nan": math.nan,
}


class Scalar(NamedTuple):
    """A single value, with the text it was written as (a field of type str takes `30` as "30")."""

    value: Any
    text: str
    origin: str


class Mapping(NamedTuple):
    items: dict[str, Any]  # values: Mapping, Sequence or Scalar
    origin: str


class Sequence(NamedTuple):
    items: list[Any]
    origin: str


Node = Mapping | Sequence | Scalar


def parse(text: str, source: str, numbered: bool = True) -> Node:
    """The document as nodes. `source` names it in origins ("job.yaml" gives "job.yaml:3"). Raises ConfigError."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark and numbered else source
        line = text.splitlines()[mark.line].strip() if mark and mark.line < len(text.splitlines()) else ""
        raise ConfigError(
            f"{where}: not YAML: {getattr(error, 'problem', None) or error}" + (f" in {line!r}" if line else "")
        ) from None
    if root is None:
        return Mapping({}, source)
    try:
        return _convert(root, source, numbered)
    except RecursionError:
        raise ConfigError(f"{source}: nested without end (an alias inside its own anchor?)") from None


def _convert(node: yaml.Node, source: str, numbered: bool) -> Node:
    origin = f"{source}:{node.start_mark.line + 1}" if numbered else source
    if isinstance(node, yaml.MappingNode):
        items: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{origin}: a key must be a word")
            if key.value == "<<":
                raise ConfigError(
                    f"{origin}: merge keys (<<) are not supported; use a cluster file for what several jobs share"
                )
            if key.value in items:
                raise ConfigError(f"{source}:{key.start_mark.line + 1}: key {key.value!r} is given twice")
            items[key.value] = _convert(value, source, numbered)
        return Mapping(items, origin)
    if isinstance(node, yaml.SequenceNode):
        return Sequence([_convert(item, source, numbered) for item in node.value], origin)
    return Scalar(node.value if node.style else _plain(node.value), node.value, origin)


def _plain(text: str) -> Any:
    """The value of an unquoted scalar."""
    if text.lower() in _SPECIAL:
        return _SPECIAL[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def values(node: Node) -> Any:
    """As plain dicts, lists and values.

    >>> values(parse("{lr: 1e-3, layers: [1, 2]}", "example"))
    {'lr': 0.001, 'layers': [1, 2]}
    """
    if isinstance(node, Mapping):
        return {key: values(value) for key, value in node.items.items()}
    if isinstance(node, Sequence):
        return [values(item) for item in node.items]
    return node.value


def node(value: Any, origin: str) -> Node:
    """Plain dicts, lists and values as nodes, all of one origin: the inverse of `values`."""
    if isinstance(value, dict):
        return Mapping({key: node(item, origin) for key, item in value.items()}, origin)
    if isinstance(value, (list, tuple)):
        return Sequence([node(item, origin) for item in value], origin)
    return Scalar(value, str(value), origin)


def layer(path: str, value: str) -> Mapping:
    """A `--set PATH=VALUE`, the value in YAML, as what a file would say.

    >>> values(layer("rollout.tp", "2"))
    {'rollout': {'tp': 2}}
    """
    origin = f"--set {path}"
    inner: Node = parse(value, origin, numbered=False) if value else Scalar("", "", origin)
    for key in reversed(path.split(".")):
        inner = Mapping({key: inner}, origin)
    return inner


def laid_over(below: Mapping, above: Mapping) -> Mapping:
    """Key by key; lists are replaced whole.

    >>> values(laid_over(parse("{a: {x: 1, y: 2}, b: 3}", "below"), parse("a: {x: 7}", "above")))
    {'a': {'x': 7, 'y': 2}, 'b': 3}
    """
    merged = dict(below.items)
    for key, value in above.items.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = laid_over(old, value) if both else value
    return Mapping(merged, above.origin)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `parse` would read as something else."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    plain = isinstance(_plain(text), str)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else "'")


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    text = repr(value) if math.isfinite(value) else {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")  # the one form that readers of YAML 1.1 take for a number too
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(float, _represent_float)


def dump(value: Any) -> str:
    """YAML that `parse` reads back to the same values."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=1000, allow_unicode=True)
