"""Prices of earlier runs: packed and unpacked, and what builds of this run make of them."""

import msgspec

from price_chain import FLOAT, chain, parts_of, placed, times
from qdqtune.search.costs.prices import UNMEASURED_SHARE, learn, learned_prior
from qdqtune.search.costs.priors import Prices, packed, unpacked


def test_prices_of_earlier_runs_are_shares_of_the_float_time_and_builds_take_precedence() -> None:
    """The third unit was never built in 8 bits: it has what units of its operators have."""
    parts = parts_of(chain())
    seen = times(placed(parts, "ab", "tu"), {}, {}, a=2.0, b=2.0, c=3.0, d=10.0)
    told = learned_prior(parts, [times(**FLOAT), seen])
    assert unpacked(msgspec.json.decode(msgspec.json.encode(packed(told)), type=Prices)) == told
    twice = {name: 2 * ms for name, ms in FLOAT.items()}
    costs = learn(parts, [times(**twice)], told)
    assert [(p.as_quantized, p.seen) for p in costs.prices] == [
        (4.0, True),
        (4.0, True),
        (UNMEASURED_SHARE * 6.0, False),
        (4.0, True),
    ]
    own = learn(parts, [times(**twice), times(placed(parts, "ab", "tu"), {}, {}, a=9.0, b=9.0, c=6.0, d=20.0)], told)
    assert own.prices[0].as_quantized == 9.0
