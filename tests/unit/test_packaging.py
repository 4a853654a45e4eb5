"""What a wheel must hold, seen from the checkout."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_core_brings_neither_torch_nor_mpi():
    names = {re.match(r"[\w-]+", requirement)[0].lower() for requirement in PROJECT["dependencies"]}
    assert names == {"click", "rich", "msgspec", "numpy", "pyyaml", "pyzmq"}


def test_extras_are_those_that_the_documentation_names():
    assert set(PROJECT["optional-dependencies"]) == {"train", "rollout", "sglang", "mpi", "pyslurm", "report", "dev"}


def test_packages_of_two_extras_are_pinned_alike():
    found = {}
    for extra in ("train", "rollout", "mpi", "report"):
        for requirement in PROJECT["optional-dependencies"][extra]:
            name, rest = re.match(r"([\w-]+)(.*)", requirement).groups()
            assert found.setdefault(name, rest) == rest, name


@pytest.mark.parametrize("name", ["slurm/dynarl.slurm", "configs/jobs/arithmetic-grpo.yaml"])
def test_the_job_script_and_examples_lie_in_the_package_too(name):
    assert (ROOT / "dynarl" / "share" / name).resolve() == ROOT / name


def test_every_folder_with_modules_is_a_package():
    """A folder without __init__.py would be missing from the wheel; sglang_cpu is package data."""
    folders = {path.parent for path in (ROOT / "dynarl").rglob("*.py") if "sglang_cpu" not in path.parts}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []
