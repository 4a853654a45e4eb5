"""The files in configs/ are examples that people copy: every one must load."""

from pathlib import Path

import pytest

from dynarl.config import load

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted((CONFIGS / "jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_a_job_file_is_valid(path, monkeypatch):
    monkeypatch.setenv("DYNARL_CLUSTER", "none")
    load.load(path)


@pytest.mark.parametrize("path", sorted((CONFIGS / "clusters").glob("*.yaml")), ids=lambda path: path.name)
def test_a_cluster_file_is_valid_beneath_a_job_file(path, monkeypatch):
    monkeypatch.setenv("DYNARL_CLUSTER", str(path))
    load.load(CONFIGS / "jobs" / "arithmetic-grpo.yaml")
    layers = load.load_layers(None)
    assert str(path) in {origin.partition(":")[0] for origin in layers.origins.values()}
