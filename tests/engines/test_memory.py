"""A memory budget: which builds are freed, and which models have one."""

from hypothesis import given
from hypothesis import strategies as st

from qdqtune.engines.memory import BUDGET_FACTOR, LARGE_MODEL, MemoryBudget

REQUESTS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(1, 40)), max_size=40)


@given(limit=st.integers(1, 100), requests=REQUESTS)
def test_builds_fit_the_budget_and_the_least_recently_used_are_freed_first(
    limit: int, requests: list[tuple[int, int, int]]
) -> None:
    """Two runners ask for builds, each of one size for good; a model of the budget keeps them by last use."""
    budget, held, used = MemoryBudget(limit), dict[tuple[int, int], int](), list[tuple[int, int]]()
    sizes: dict[tuple[int, int], int] = {}
    for runner, number, nbytes in requests:
        build = runner, number
        size = sizes.setdefault(build, nbytes)
        if build in held:
            budget.use(build)
            used.remove(build)
        else:
            before = list(used)
            needed = frozenset(before[-1:])  # the one of the last request, as in rounds of two builds
            budget.make_room(size, needed)
            freed = [b for b in before if b not in held]
            assert freed == [b for b in before if b not in needed][: len(freed)]
            if len(freed) < len(set(before) - needed):
                assert sum(held.values()) + size <= limit
            used = [b for b in before if b in held]
            budget.add(build, size, lambda build=build: held.pop(build))  # type: ignore[misc]
            held[build] = size
        used.append(build)
    for build in list(held):
        budget.remove(build)
        budget.remove(build)
    budget.make_room(limit + 1, frozenset())  # nothing is left to free


def test_only_large_models_have_a_budget() -> None:
    assert MemoryBudget.for_model(LARGE_MODEL - 1) is None
    budget = MemoryBudget.for_model(LARGE_MODEL)
    assert budget is not None
    budget.add((0, 0), LARGE_MODEL, lambda: freed.append(0))
    freed: list[int] = []
    budget.make_room(int((BUDGET_FACTOR - 1) * LARGE_MODEL), frozenset())
    assert freed == []
    budget.make_room(int((BUDGET_FACTOR - 1) * LARGE_MODEL) + 2, frozenset())
    assert freed == [0]
