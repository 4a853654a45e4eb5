import pytest

from dynarl.errors import SlurmError
from dynarl.slurm.version import Version, parse, require


@pytest.mark.parametrize(
    "text, version",
    [
        ("slurm 22.05.8\n", (22, 5, 8)),
        ("slurm-wlm 22.05.8", (22, 5, 8)),
        ("slurm 24.11.0-0rc1", (24, 11, 0)),
        ("slurm 26.05-pre", (26, 5, 0)),
        ("module loaded\nslurm 23.02.7", (23, 2, 7)),
    ],
)
def test_what_srun_prints_is_read(text, version):
    assert parse(text) == Version(*version)


def test_what_holds_no_version_is_quoted():
    with pytest.raises(SlurmError, match="'command not found'"):
        parse("command not found\n")


def test_releases_before_22_05_are_refused():
    for old in (Version(21, 8, 8), Version(20, 11, 3)):
        with pytest.raises(SlurmError, match=f"this is Slurm {old}; dynarl needs 22.05 or newer"):
            require(old)
    require(Version(22, 5, 0))
    require(Version(26, 5, 3))
