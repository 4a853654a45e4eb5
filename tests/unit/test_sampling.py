import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dynarl.roles.rollout.engine import stream_key  # noqa: E402
from dynarl.roles.rollout.sampling import sample_tokens, uniforms  # noqa: E402


def stream(seed, sample, count):
    return uniforms(np.full(count, stream_key(seed, sample), np.uint64), np.arange(count))


def test_stream_is_splitmix64_seeded_with_the_key():
    # First outputs of the published generator for seed 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    ours = uniforms(np.full(3, 1234567, np.uint64), np.arange(3))
    np.testing.assert_array_equal(ours, [(value >> 16) / 2**48 for value in published])


def test_a_position_is_the_same_alone_and_in_any_batch():
    keys = np.array([stream_key(1, f"0:{i}:0") for i in range(7)], np.uint64)
    positions = np.array([0, 3, 3, 250, 9, 1, 4])
    together = uniforms(keys, positions)
    for i in (6, 0, 3):
        assert uniforms(keys[i : i + 1], positions[i : i + 1])[0] == together[i]


def test_streams_of_samples_seeds_and_positions_are_uniform_and_unrelated():
    values = np.concatenate([stream(1, f"0:{i}:{m}", 256) for i in range(32) for m in range(8)])
    assert len(np.unique(values)) == len(values)
    counts, _ = np.histogram(values, bins=64, range=(0, 1))
    expected = len(values) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 103  # chi-square, 63 degrees of freedom: p = 0.001
    for other in (stream(2, "0:0:0", 4096), stream(1, "0:0:1", 4096), stream(1, "0:0:0", 4097)[1:]):
        assert abs(np.corrcoef(stream(1, "0:0:0", 4096), other)[0, 1]) < 0.06


def test_drawn_frequencies_are_the_probabilities_at_that_temperature():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -torch.inf])
    for temperature in (1.0, 0.5, 2.0):
        n = 40_000
        drawn = torch.from_numpy(stream(5, "0:0:0", n))
        ids, logprobs = sample_tokens(logits.expand(n, 5), torch.full((n,), temperature), drawn)
        wanted = torch.softmax(logits / temperature, -1)
        seen = torch.bincount(ids, minlength=5) / n
        assert torch.all((seen - wanted).abs() <= 5 * (wanted * (1 - wanted) / n).sqrt())
        assert torch.allclose(logprobs, wanted.log()[ids])


def test_the_ends_of_the_unit_interval_never_draw_an_impossible_token():
    logits = torch.tensor([[-torch.inf, 0.3, 0.1, -torch.inf]]).expand(2, 4)
    ids, _ = sample_tokens(logits, torch.ones(2), torch.tensor([0.0, 1 - 2.0**-48], dtype=torch.float64))
    assert ids.tolist() == [1, 2]


def test_temperature_zero_is_the_most_likely_token_with_its_plain_log_probability():
    logits = torch.tensor([[0.0, 3.0, 1.0]]).expand(2, 3)
    ids, logprobs = sample_tokens(logits, torch.tensor([0.0, 1.0]), torch.tensor([0.99, 0.01], dtype=torch.float64))
    assert ids.tolist() == [1, 0]
    assert torch.allclose(logprobs, torch.log_softmax(logits, -1)[[0, 1], ids])
