"""Values that all folders share refuse bad combinations, and say the same in every form."""

import pytest

from qdqtune.types import Edge, Placement, Turn, WeightFormat, noise_of, sqnr_of

X, W = Edge("x", "a", 0), Edge("w", "a", 1)
W4, W8 = WeightFormat(4, 32, symmetric=False), WeightFormat(8)


@pytest.mark.parametrize("name", ["w8", "w8b128", "w4b32", "w4b32a", "d8", "d7"])
def test_weight_formats_have_one_name(name: str) -> None:
    assert WeightFormat.named(name).name == name


@pytest.mark.parametrize("name", ["", "w4", "w2b32", "w8b24", "w4b8", "int8", "d4", "d8b32", "d8a"])
def test_what_is_no_weight_format_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"no weight format|blocks|dynamic"):
        WeightFormat.named(name)


def test_bytes_of_a_weight_hold_its_scales() -> None:
    assert W4.bytes_per_weight == 0.5 + 4.5 / 32
    assert W8.bytes_per_weight == 1.0


def test_a_placement_has_a_pair_or_a_format_on_an_edge() -> None:
    pair, stored = Placement.of([W]), Placement.of([X], [(W, W4)])
    assert stored | pair == pair | stored == Placement.of([X, W])
    assert stored.paired([W]) == Placement.of([W])
    assert stored - Placement.of([X]) == Placement.of((), [(W, W4)])
    assert len({p.digest for p in (pair, stored, Placement.of([X], [(W, W8)]), Placement())}) == 4
    for wrong in ([(W, W4), (W, W8)], [(X, W4)]):
        with pytest.raises(ValueError, match="one weight format or a pair"):
            Placement.of([X], wrong)


def test_slots_last_long_enough_and_long_inferences_have_one_turn() -> None:
    assert Turn.of(0.003, 0.01) == Turn(4, 2, 0.003)
    assert Turn.of(0.1, 0.01).per_round == Turn.of(0.003, 0.01, start=1.0).per_round == 1
    assert Turn.of(0.003, 0.01, start=1.0).round_seconds == pytest.approx(4 * 0.003 + 1.0)


def test_decibels_and_noise_are_inverse() -> None:
    assert [noise_of(db) for db in (0.0, 10.0, 20.0)] == pytest.approx([1.0, 0.1, 0.01])
    assert sqnr_of(noise_of(17.0)) == pytest.approx(17.0)
    assert sqnr_of(0.0) is None
