"""How far a metric may have fallen: intervals for paired samples, against brute force and by simulation."""

from math import inf, log, sqrt

import numpy as np
import pytest

from qdqtune.numerics.label_metrics import LEAST_CHANGED, Z2, Score, can_tell, loss_high, samples_to_tell


def hits(*, lost: int, won: int, count: int, name: str = "top1") -> tuple[Score, Score]:
    """Float and quantized model with so many answers that only one of them has right; both are right elsewhere."""
    before = [1.0] * lost + [0.0] * won + [1.0] * (count - lost - won)
    after = [0.0] * lost + [1.0] * won + [1.0] * (count - lost - won)
    return tuple(Score(float(np.mean(s)), tuple(s), name) for s in (before, after))  # type: ignore[return-value]


@pytest.mark.parametrize(("lost", "won", "count"), [(3, 1, 50), (9, 2, 50), (1, 0, 30), (0, 2, 40), (12, 12, 400)])
def test_the_score_interval_ends_where_the_score_is_z(lost: int, won: int, count: int) -> None:
    """The nuisance share is found by maximizing the likelihood, not by the closed formula."""
    from scipy.optimize import minimize_scalar  # slow to import

    high = loss_high(*hits(lost=lost, won=won, count=count))
    assert high is not None

    def unlikely(share_won: float) -> float:
        cells = (lost, share_won + high), (won, share_won), (count - lost - won, 1 - 2 * share_won - high)
        return -sum(n * log(max(share, 1e-300)) for n, share in cells if n)

    bounds = max(0.0, -high), (1 - high) / 2
    q = minimize_scalar(unlikely, bounds=bounds, method="bounded", options={"xatol": 1e-10}).x
    z = (lost - won - count * high) / sqrt(count * (2 * q + high * (1 - high)))
    assert z == pytest.approx(-sqrt(Z2), rel=1e-3)


def test_without_any_change_the_interval_ends_by_the_number_of_samples() -> None:
    assert loss_high(*hits(lost=0, won=0, count=100)) == pytest.approx(Z2 / (100 + Z2))
    assert loss_high(*hits(lost=10, won=0, count=10)) == 1.0
    fewer = [loss_high(*hits(lost=n, won=3, count=60)) or 0.0 for n in range(6)]
    assert fewer == sorted(fewer)


def test_the_interval_holds_the_loss_as_often_as_it_says() -> None:
    random, held, share_lost, share_won = np.random.default_rng(0), 0, 0.04, 0.02
    for _ in range(400):
        lost, won, _ = random.multinomial(200, [share_lost, share_won, 1 - share_lost - share_won])
        high = loss_high(*hits(lost=int(lost), won=int(won), count=200))
        assert high is not None
        held += high >= share_lost - share_won
    assert 0.92 <= held / 400 <= 0.985


def test_the_samples_that_it_takes() -> None:
    few, _ = hits(lost=0, won=0, count=100)
    assert samples_to_tell(few, 0.01) == 268
    assert not can_tell(few, 0.01)
    for count, enough in ((267, False), (268, True)):
        before, after = hits(lost=0, won=0, count=count)
        assert can_tell(before, 0.01) is enough
        assert ((loss_high(before, after) or 0) <= 0.01) is enough
    assert not can_tell(few, 0.0)
    assert samples_to_tell(few, 0.0) == inf
    assert not can_tell(Score(0.9), 0.01)


def test_other_scores_take_students_t_of_the_differences() -> None:
    random = np.random.default_rng(1)
    before = random.normal(0.9, 0.2, 40)
    after = before - random.normal(0.01, 0.005, 40)
    high = loss_high(*(Score(float(s.mean()), tuple(s), "cosine") for s in (before, after)))
    lost = before - after
    assert high == pytest.approx(lost.mean() + 1.684875 * lost.std(ddof=1) / sqrt(40), rel=1e-5)


def test_too_few_changes_tell_nothing_of_other_scores() -> None:
    before = Score(0.5, (0.5,) * 30, "cosine")
    changed = [0.4] * (LEAST_CHANGED - 1) + [0.5] * (31 - LEAST_CHANGED)
    assert loss_high(before, Score(0.48, tuple(changed), "cosine")) is None
    assert loss_high(before, before) is None
    assert loss_high(Score(0.5), Score(0.4)) is None
    assert samples_to_tell(before, 0.01) == LEAST_CHANGED
