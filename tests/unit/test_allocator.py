"""The free list against a set: nothing handed out twice, nothing taken back twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minisgl.kvcache import PageAllocator

NUM_PAGES = 9


class AllocatorMachine(RuleBasedStateMachine):
    """A second allocator gets the same calls: every rank must hand out the same pages."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator, self.twin = PageAllocator(NUM_PAGES), PageAllocator(NUM_PAGES)
        self.held: list[int] = []

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def allocate(self, count: int) -> None:
        if count > NUM_PAGES - len(self.held):
            with pytest.raises(RuntimeError, match=f"{count} pages asked for"):
                self.allocator.allocate(count)
            return
        pages = self.allocator.allocate(count)
        assert pages == self.twin.allocate(count)
        assert len(set(pages)) == count
        assert not set(pages) & set(self.held)
        self.held += pages

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.held), unique=True))
        self.allocator.free(pages)
        self.twin.free(pages)
        self.held = [page for page in self.held if page not in pages]

    @precondition(lambda self: 0 < len(self.held) < NUM_PAGES)
    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        mine = data.draw(st.sampled_from(self.held))
        free = data.draw(st.sampled_from(sorted(set(range(NUM_PAGES)) - set(self.held))))
        for pages in ([mine, free], [mine, mine]):
            with pytest.raises(RuntimeError, match="freed twice"):
                self.allocator.free(pages)

    @invariant()
    def conserved(self) -> None:
        free = list(self.allocator.free_pages())
        assert sorted(free + self.held) == list(range(NUM_PAGES))
        assert self.allocator.num_free == len(free)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_page_freed_last_is_handed_out_first() -> None:
    allocator = PageAllocator(4)
    assert allocator.allocate(3) == [0, 1, 2]
    allocator.free([1, 2])
    assert allocator.allocate(3) == [1, 2, 3]
