"""Values of a file as a msgspec.Struct: every fault is told, each with its line and, for an unknown key, the nearest one."""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from dynarl.config import text
from dynarl.errors import ConfigError

Struct = TypeVar("Struct", bound=msgspec.Struct)


def convert(node: text.Node, kind: type[Struct]) -> Struct:
    """Raises ConfigError with every fault found, one per line. A number must be finite, unless its default is infinite.

    >>> class Job(msgspec.Struct):
    ...     nodes: int
    >>> convert(text.parse("nodse: 4", "job.yaml"), Job)
    Traceback (most recent call last):
    ...
    dynarl.errors.ConfigError: job.yaml:1: unknown key nodse; did you mean nodes?
    job.yaml:1: nodes is missing
    """
    faults: list[str] = []
    values = _Checker(kind, faults).value(node, kind, "")
    if faults:
        raise ConfigError("\n".join(faults))
    return msgspec.convert(values, kind)


class _Checker:
    """Turns nodes into plain values, and adds what is wrong with them to `faults`. root: of the whole file."""

    def __init__(self, root: type[msgspec.Struct], faults: list[str]):
        self._root, self._faults = root, faults

    def value(self, node: text.Node, kind: Any, path: str, finite: bool = True) -> Any:
        bare = _bare(kind)
        struct, is_null = struct_of(bare), isinstance(node, text.Scalar) and node.value is None
        if struct is not None and not (is_null and bare is not struct):
            return self._struct(node, struct, path)
        origin, arguments = typing.get_origin(bare), typing.get_args(bare)
        if origin is dict and isinstance(node, text.Mapping):
            keys = typing.get_args(arguments[0]) if typing.get_origin(arguments[0]) is typing.Literal else ()
            return {key: self._entry(item, key, arguments[1], keys, path) for key, item in node.items.items()}
        if origin is list and struct_of(arguments[0]) is not None and isinstance(node, text.Sequence):
            return [self.value(item, arguments[0], f"{path}[{index}]") for index, item in enumerate(node.items)]
        return self._leaf(node, kind, path, finite)

    def _entry(self, node: text.Node, key: str, kind: Any, keys: Iterable[str], path: str) -> Any:
        if keys and key not in keys:
            self._faults.append(f"{node.origin}: unknown key {path}.{key}; known here: {', '.join(keys)}")
        return self.value(node, kind, f"{path}.{key}")

    def _struct(self, node: text.Node, kind: type[msgspec.Struct], path: str) -> Any:
        at, before = f"{path}: " if path else "", len(self._faults)
        if not isinstance(node, text.Mapping):
            what = f"{path} is a section with keys of its own" if path else "expected keys and values"
            self._faults.append(f"{node.origin}: {what}, got {shown(plain(node))}")
            return None
        known, prefix = typing.get_type_hints(kind, include_extras=True), f"{path}." if path else ""
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        values = {}
        for key, item in node.items.items():
            if key in known:
                values[key] = self.value(item, known[key], prefix + key, fields[key].default != math.inf)
            else:
                self._faults.append(f"{item.origin}: unknown key {prefix}{key}{nearest(key, prefix, known, self._root)}")
        missing = [name for name, field in fields.items() if field.required and name not in node.items]
        self._faults += [f"{node.origin}: {prefix}{name} is missing" for name in missing]
        if len(self._faults) == before:
            try:
                msgspec.convert(values, kind)
            except msgspec.ValidationError as error:  # a rule that spans fields
                self._faults.append(f"{node.origin}: {at}{reason(error, kind)}")
        return values

    def _leaf(self, node: text.Node, kind: Any, path: str, finite: bool) -> Any:
        value = plain(node, wants(kind))
        if (odd := list(_infinite(value))) and (finite or any(map(math.isnan, odd))):
            self._faults.append(f"{node.origin}: {path}: expected a finite number, got {shown(value)}")
            return value
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            self._faults.append(f"{node.origin}: {path}: {reason(error, kind)}, got {shown(value)}")
        return value


def _infinite(value: Any) -> Iterator[float]:
    """The numbers in a value that are not finite."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _infinite(item)
    elif isinstance(value, float) and not math.isfinite(value):
        yield value


def struct_of(kind: Any) -> type[msgspec.Struct] | None:
    """The Struct that a field takes, where it takes one or null and nothing else."""
    kind = _bare(kind)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kinds = set(typing.get_args(kind)) - {type(None)}
        kind = kinds.pop() if len(kinds) == 1 else None
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def nearest(key: str, prefix: str, known: Iterable[str], root: type[msgspec.Struct]) -> str:
    """What the writer may have meant: a key of this section, else the same key of another section."""
    if close := difflib.get_close_matches(key, known, n=1, cutoff=0.6):
        return f"; did you mean {prefix}{close[0]}?"
    paths = list(leaves(root))
    if same := [leaf for leaf in paths if leaf.rpartition(".")[2] == key]:
        return f"; there is {' and '.join(same)}"
    if close := difflib.get_close_matches(prefix + key, paths, n=1, cutoff=0.6):
        return f"; did you mean {close[0]}?"
    return f"; known here: {', '.join(known)}"


def leaves(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Paths of all values that a file may have."""
    for name, hint in typing.get_type_hints(kind).items():
        if (struct := struct_of(hint)) is not None:
            yield from leaves(struct, f"{prefix}{name}.")
        else:
            yield prefix + name


def _bare(kind: Any) -> Any:
    while typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    return kind


def wants(kind: Any) -> str:
    """Where a field takes text: "itself", in its "items", or "" for nowhere. There `30` means "30"."""
    kind = _bare(kind)
    if kind is str:
        return "itself"
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kinds = set(typing.get_args(kind)) - {type(None)}
        return "itself" if kinds == {str} else ""
    arguments = typing.get_args(kind)
    return "items" if typing.get_origin(kind) in (list, dict) and arguments[-1] is str else ""


def plain(node: text.Node, wants: str = "") -> Any:
    """A node as plain Python values."""
    if isinstance(node, text.Mapping):
        return {key: plain(item, "itself" if wants == "items" else "") for key, item in node.items.items()}
    if isinstance(node, text.Sequence):
        return [plain(item, "itself" if wants == "items" else "") for item in node.items]
    return node.text if wants == "itself" and node.value is not None else node.value


def reason(error: msgspec.ValidationError, kind: Any) -> str:
    """What was expected, and in which item; the value is added by the caller."""
    kind = _bare(kind)
    if typing.get_origin(kind) is typing.Literal:
        return f"expected one of {', '.join(typing.get_args(kind))}"
    said, _, where = str(error).partition(" - at ")
    inside = where.strip("`").removeprefix("$").replace("[...]", "its values")
    said = re.sub(r", got `[^`]*`$", "", said).replace("`", "")
    return (f"in {inside}: " if inside else "") + said[0].lower() + said[1:]


def shown(value: Any) -> str:
    """As it stands in a message."""
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
