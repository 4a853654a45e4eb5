"""The configuration reference, made from the schema: `python -m dynarl.config.reference > docs/configuration.md`."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from dynarl.config import text
from dynarl.config.schema import Config, Section

HEAD = """\
# Configuration

<!-- Made from dynarl/config/schema.py by: python -m dynarl.config.reference > docs/configuration.md -->

A job file is YAML with the sections below; whatever it leaves out has the default. Lengths are in tokens, times in
seconds. Values come from four layers, a later one wins key by key:

1. built-in defaults (this page);
2. the cluster's file: `$DYNARL_CLUSTER` (a path, a name in `/etc/dynarl/clusters.d`, or `none`), else the file there
   that is named like `$SLURM_CLUSTER_NAME`, else the only one there. It has the same sections; `configs/clusters/` has
   examples;
3. the job file;
4. `--set SECTION.KEY=VALUE` on the command line.

`dynarl config show JOB.yaml --origin` prints every value with the file and line it comes from, `dynarl config validate
JOB.yaml` checks it. `1e-3` is a number, `1:00:00` is text, and only `true` and `false` are yes and no.
"""


def rendered() -> str:
    """The whole page as Markdown."""
    return HEAD + "".join(_section(name, kind) for name, kind in typing.get_type_hints(Config).items())


def _section(name: str, kind: type[Section]) -> str:
    rows = "".join(
        f"| `{key}` | {_type(hint)} | {_default(kind, key)} | {_meaning(hint)} |\n"
        for key, hint in typing.get_type_hints(kind, include_extras=True).items()
    )
    about = " ".join((kind.__doc__ or "").split()) if kind.__doc__ != Section.__doc__ else ""
    return (
        f"\n## {name}\n\n"
        + (f"{about}\n\n" if about else "")
        + f"| key | value | default | meaning |\n|---|---|---|---|\n{rows}"
    )


def _metas(hint: Any) -> Iterator[msgspec.Meta]:
    if typing.get_origin(hint) is typing.Annotated:
        inner, *metas = typing.get_args(hint)
        yield from metas
        yield from _metas(inner)


def _bare(hint: Any) -> Any:
    return _bare(typing.get_args(hint)[0]) if typing.get_origin(hint) is typing.Annotated else hint


def _meaning(hint: Any) -> str:
    return next((meta.description for meta in _metas(hint) if meta.description), "").replace("|", "\\|")


def _type(hint: Any) -> str:
    """In a person's words: `integer >= 1`, `one of a, b`, `text or null`."""
    bounds = "".join(
        f" {sign} {value:g}"
        for meta in _metas(hint)
        for sign, value in ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt))
        if value is not None
    )
    return _words(_bare(hint)) + bounds


def _words(kind: Any) -> str:
    names = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}
    if kind in names:
        return names[kind]
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in arguments)
    if typing.get_origin(kind) is list:
        return f"list of {_words(arguments[0])}"
    if typing.get_origin(kind) is dict:
        return f"table of {_words(_bare(arguments[1]))}"
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(_words(_bare(argument)) for argument in arguments)
    raise TypeError(f"no words for the type {kind}")


def _default(kind: type[Section], key: str) -> str:
    lines = text.dump(getattr(kind(), key)).removesuffix("...\n").strip().splitlines()
    return f"`{lines[0]}`" if len(lines) == 1 else f"`{{{', '.join(lines)}}}`"


if __name__ == "__main__":
    print(rendered(), end="")
