import math

import pytest

torch = pytest.importorskip("torch")

from dynarl.rl.losses import k3, policy_loss, supervised_loss  # noqa: E402

CLIPS = dict(clip_low=0.2, clip_high=0.28)


def run(ratios, advantages, weight=None, **options):
    logprobs = torch.log(torch.tensor(ratios)).requires_grad_()
    old = torch.zeros(len(ratios))
    weight = torch.ones(len(ratios)) if weight is None else torch.tensor(weight)
    loss, stats = policy_loss(logprobs, old, torch.tensor(advantages), weight, **CLIPS, **options)
    loss.backward()
    return loss.item(), logprobs.grad.tolist(), {name: value.item() for name, value in stats.items()}


def test_the_gradient_vanishes_beyond_the_high_clip_for_good_and_below_the_low_clip_for_bad_samples():
    _, grad, stats = run([1.0, 1.27, 1.29, 0.7, 0.79, 0.81, 1.5], [1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    # d(-A r)/d logprob = -A r where it is not clipped.
    assert grad == pytest.approx([-1.0, -1.27, 0.0, -0.7, 0.0, 0.81, 1.5])
    assert stats["pg_clipfrac"] == 2 and stats["tokens"] == 7


def test_the_loss_is_a_sum_so_cutting_a_batch_anywhere_changes_nothing():
    ratios, advantages = [0.5, 0.9, 1.1, 1.4], [1.0, -2.0, 0.5, -0.3]
    whole, grad, stats = run(ratios, advantages)
    parts = [run(ratios[a:b], advantages[a:b]) for a, b in ((0, 1), (1, 4))]
    assert whole == pytest.approx(sum(part[0] for part in parts))
    assert grad == pytest.approx(parts[0][1] + parts[1][1])
    for name in stats:
        assert stats[name] == pytest.approx(sum(part[2][name] for part in parts)), name


def test_a_sample_of_weight_zero_counts_in_no_sum():
    with_it = run([1.1, 1.9], [1.0, -5.0], weight=[1.0, 0.0])
    without = run([1.1], [1.0])
    assert with_it[0] == pytest.approx(without[0]) and with_it[1] == pytest.approx([*without[1], 0.0])
    assert with_it[2] == pytest.approx(without[2])


def test_k3_is_zero_for_equal_models_positive_otherwise_and_unbiased():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    assert k3(p.log(), p.log()).tolist() == [0.0, 0.0, 0.0]
    estimate = k3(p.log(), q.log())
    assert (estimate > 0).all()
    assert (p * estimate).sum().item() == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-5)


def test_the_kl_term_pulls_towards_the_reference():
    ref = torch.log(torch.tensor([2.0]))
    _, grad, stats = run([1.0], [0.0], ref_logprobs=ref, kl_coef=0.1)
    # d k3 / d logprob = 1 - p_ref / p: negative here, so descent raises the log-probability.
    assert grad == pytest.approx([0.1 * (1 - 2.0)])
    assert stats["kl_loss"] == pytest.approx(2.0 - 1.0 - math.log(2.0))
    with pytest.raises(ValueError, match="reference"):
        run([1.0], [0.0], kl_coef=0.1)


def test_a_log_ratio_far_out_of_range_stays_finite():
    loss, _, stats = run([1.0], [-1.0])
    far = policy_loss(torch.tensor([0.0]), torch.tensor([-200.0]), torch.tensor([-1.0]), torch.ones(1), **CLIPS)
    assert math.isfinite(far[0].item()) and all(math.isfinite(v.item()) for v in far[1].values())


def test_supervised_loss_is_the_sum_of_negative_logprobs_of_counted_tokens():
    loss, stats = supervised_loss(torch.tensor([-1.0, -2.0, -4.0]), torch.tensor([1.0, 1.0, 0.0]))
    assert loss.item() == 3.0 and stats["tokens"].item() == 2.0
