import pytest

from dynarl.slurm.jobid import JobId, JobIdError, from_sbatch, parse


@pytest.mark.parametrize(
    "text, parts",
    [
        ("123", JobId(123)),
        ("123_4", JobId(123, array="4")),
        ("57829110_[5-100]", JobId(57829110, array="[5-100]")),
        ("57829110_[60-89,91-94%3]", JobId(57829110, array="[60-89,91-94%3]")),
        ("123+1", JobId(123, job_component=1)),
        ("123.0", JobId(123, step="0")),
        ("123.batch", JobId(123, step="batch")),
        ("123.0+2", JobId(123, step="0", step_component=2)),
        ("123+1.0", JobId(123, job_component=1, step="0")),
        ("123_4.extern", JobId(123, array="4", step="extern")),
        ("123;blue", JobId(123, cluster="blue")),
    ],
)
def test_every_form_is_read_and_printed_the_same(text, parts):
    assert parse(text) == parts
    assert str(parts) == text


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1.5.2", "1_", "1_[", "1+", "1.foo", "1 2", "nautilus"])
def test_what_fits_no_form_is_quoted(text):
    with pytest.raises(JobIdError, match="is none of: JOB, JOB_TASK") as error:
        parse(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    "output, job",
    [
        ("17\n", 17),
        ("17;nautilus\n", 17),
        ("Welcome to nautilus2\nyour project has 100 hours left\n17\n", 17),
    ],
)
def test_the_id_is_found_in_what_sbatch_printed(output, job):
    assert from_sbatch(output).job == job


def test_sbatch_that_printed_no_id_is_quoted():
    with pytest.raises(JobIdError, match="filter says no"):
        from_sbatch("filter says no\n")
