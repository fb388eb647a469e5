"""The tensors that do most damage, and which of them to keep in float."""

from qdqtune.commands.worst_tensors import Damage, to_exclude


def test_only_what_makes_a_tenth_of_the_error_is_to_be_excluded() -> None:
    levels = {("n1", "n2"): 12.0, ("n2",): 20.0, ("n3",): 20.1, ("n4",): None}
    found = [Damage(nodes[0], nodes, level, None) for nodes, level in levels.items()]
    for sqnr_db, most, expected in (
        (10.0, 4, ("n1", "n2")),
        (10.2, 4, ("n1", "n2", "n3")),
        (10.2, 2, ("n1", "n2")),
        (10.2, 1, ()),
        (1.0, 4, ()),
        (None, 4, ()),
    ):
        assert to_exclude(found, sqnr_db, lambda nodes, most=most: len(nodes) <= most) == expected  # type: ignore[misc]
