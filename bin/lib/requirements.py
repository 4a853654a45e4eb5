"""What to install, read from pyproject.toml, so that every pin stands there and nowhere else.

    requirements.py list EXTRA...         all requirements of the project and these extras, one per line
    requirements.py show NAME EXTRA...    the one requirement on NAME, without its environment marker

`list` leaves out what must be installed by itself (see ALONE). Standard library only: it runs before anything is installed.
"""

import re
import sys
import tomllib
from pathlib import Path

# megatron-core declares Python >= 3.12 although it runs on 3.11 (Debian 12), so pip has to be told to ignore that,
# and pip knows this switch for a whole command only.
ALONE = {"megatron-core"}


def name_of(requirement: str) -> str:
    """`name_of("Megatron_Core[x]==0.19.2; python_version > '3'") == "megatron-core"`."""
    match = re.match(r"\s*([A-Za-z0-9._-]+)", requirement)
    if match is None:
        raise SystemExit(f"pyproject.toml: {requirement!r} is no requirement")
    return re.sub(r"[-_.]+", "-", match[1]).lower()


def requirements(project: dict, extras: list[str]) -> list[str]:
    """Requirements of the project and the extras, in the order of pyproject.toml. Extras may name other extras."""
    optional = project.get("optional-dependencies", {})
    wanted = list(project.get("dependencies", []))
    for extra in extras:
        if extra not in optional:
            raise SystemExit(f"pyproject.toml has no extra {extra!r}; it has {', '.join(sorted(optional))}")
        for requirement in optional[extra]:
            if name_of(requirement) == name_of(project["name"]):
                inner = re.search(r"\[([^\]]*)\]", requirement)
                wanted += requirements(project, [part.strip() for part in inner[1].split(",")]) if inner else []
            else:
                wanted.append(requirement)
    return list(dict.fromkeys(wanted))


def main(action: str, *names: str) -> None:
    pyproject = Path(__file__).resolve().parents[2] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    if action == "list":
        print("\n".join(line for line in requirements(project, list(names)) if name_of(line) not in ALONE))
        return
    wanted, *extras = names
    found = [line for line in requirements(project, extras) if name_of(line) == wanted]
    if len(found) != 1:
        raise SystemExit(f"pyproject.toml: expected one requirement on {wanted} in {extras}, found {found}")
    print(found[0].partition(";")[0].strip())


if __name__ == "__main__":
    main(*sys.argv[1:])
