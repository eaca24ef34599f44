"""The index: what happens to rows, ghosts, links and free numbers in every transition."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from forebay.kvstore.errors import InvariantViolation
from forebay.kvstore.index import ABSENT, ROW_DTYPE, Index, RowArray, State, Table
from forebay.kvstore.wire import LOCATION_DTYPE

NAMESPACE = b"n" * 16


def key(number: int) -> bytes:
    return bytes([number * 31 % 256]) + number.to_bytes(15, "little")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


class Book:
    """An index with one table, and the leaves it has told of."""

    def __init__(self, max_rows: int = 64) -> None:
        self.leaves: list[int] = []
        self.index = Index(max_rows, on_leaf=self.leaves.append)
        self.table: Table = self.index.add_table(NAMESPACE, 0, 1000)

    def write(self, *numbers: int, parent: bytes = NAMESPACE) -> RowArray:
        """Rows of a run being written."""
        rows = self.index.begin(self.table, keys(*numbers), self.index.take_rows(len(numbers)))
        above = np.concatenate([[self.index.parent_row(self.table, parent)], rows[:-1]])
        self.index.link(rows, above)
        return rows

    def store(self, *numbers: int, parent: bytes = NAMESPACE) -> RowArray:
        rows = self.write(*numbers, parent=parent)
        self.index.show(self.table, rows)
        return rows

    def evict(self, row: int) -> None:
        self.index.unlink(row)
        self.index.erase_one(row)

    def free(self, row: int) -> None:
        self.index.detach(row)
        self.index.drop(row)


@pytest.fixture
def book() -> Book:
    return Book()


def test_a_row_is_one_cache_line_that_begins_with_its_location() -> None:
    assert ROW_DTYPE.itemsize == 64 and LOCATION_DTYPE.itemsize == 24
    fields = ROW_DTYPE.fields
    assert fields is not None and fields["location"][1] == 0 and fields["generation"][1] == 16


def test_locations_are_the_records_of_the_wire(book: Book) -> None:
    rows = book.store(1, 2, 3)
    book.index.extent[rows], book.index.board[rows], book.index.offset[rows] = 7, [4, 5, 6], [0, 1000, 2**40]
    book.index.generation[rows] = [10, 11, 2**63]
    found = np.frombuffer(book.index.locations_of(rows[::-1]), LOCATION_DTYPE)
    assert found.tolist() == [(7, 6, 2**40, 2**63), (7, 5, 1000, 11), (7, 4, 0, 10)]


def test_what_is_being_written_is_not_found_until_it_is_shown(book: Book) -> None:
    rows = book.write(1, 2)
    assert book.table.get(key(1)) == ABSENT and book.table.leading_run(keys(1, 2)) == 0
    assert not any(book.index.evictable(row) for row in rows.tolist())
    book.index.show(book.table, rows)
    assert book.table.find(keys(1, 2, 3)).tolist() == [*rows, ABSENT] and book.table.visible == 2
    with pytest.raises(InvariantViolation):
        book.index.show(book.table, rows)
    book.index.check()


def test_a_leaf_may_go_and_its_parent_only_after_it(book: Book) -> None:
    head, tail = book.store(1, 2).tolist()
    assert book.index.evictable(tail) and not book.index.evictable(head)
    book.evict(tail)
    assert book.leaves == [head] and book.index.evictable(head)
    book.index.check()


@pytest.mark.parametrize("column", ["refs", "pins", "children"])
def test_a_held_row_may_not_go(book: Book, column: str) -> None:
    row = book.store(1).item(0)
    assert book.index.evictable(row)
    getattr(book.index, column)[row] = 1
    assert not book.index.evictable(row)


def test_a_parent_that_is_not_here_is_a_ghost_for_as_long_as_it_has_children(book: Book) -> None:
    child, other = book.store(2, parent=key(1)).item(0), book.store(3, parent=key(1)).item(0)
    assert book.index.ghosts == 1 and book.table.get(key(1)) == ABSENT
    book.evict(child)
    assert book.index.ghosts == 1
    book.evict(other)
    assert book.index.ghosts == 0 and not book.table.hidden and book.index.free_rows == book.index.max_rows
    assert not book.leaves, "a ghost is no leaf that could be evicted"
    book.index.check()


def test_an_object_that_comes_takes_over_its_ghost_with_its_children(book: Book) -> None:
    child = book.store(2, parent=key(1)).item(0)
    parent = book.store(1).item(0)
    assert book.index.ghosts == 0 and not book.index.evictable(parent)
    assert book.index.parent.item(child) == parent
    book.evict(child)
    assert book.index.evictable(parent)
    book.index.check()


def test_a_deleted_parent_stays_as_a_ghost_and_its_grandparent_becomes_a_leaf(book: Book) -> None:
    rows = book.store(1, 2, 3).tolist()
    book.free(rows[1])
    assert book.leaves == [rows[0]] and book.index.ghosts == 1
    assert book.table.leading_run(keys(1)) == 1 and book.table.get(key(3)) == rows[2]
    again = book.store(2, parent=key(1)).item(0)
    assert again == rows[1] and not book.index.evictable(rows[0]) and not book.index.evictable(again)
    book.index.check()


def test_a_detached_row_keeps_its_place_and_loses_its_key(book: Book) -> None:
    row = book.store(1).item(0)
    book.index.detach(row)
    assert book.table.get(key(1)) == ABSENT and book.index.row_of(book.table, key(1)) == ABSENT
    other = book.store(1).item(0)
    assert other != row and book.table.get(key(1)) == other
    book.index.drop(row)
    assert book.table.get(key(1)) == other
    book.index.check()


def test_a_row_detached_with_children_and_written_anew_leaves_a_nameless_ghost(book: Book) -> None:
    old, child = book.store(1, 2).tolist()
    book.index.detach(old)
    anew = book.store(1).item(0)
    book.index.drop(old)
    assert book.index.ghosts == 1 and not book.table.hidden and book.table.get(key(1)) == anew
    book.evict(child)  # and with its last child the nameless one goes, too, without hurting its namesake
    assert book.index.ghosts == 0 and book.table.get(key(1)) == anew
    book.index.check()


def test_a_child_that_goes_while_its_parent_is_detached_leaves_no_ghost(book: Book) -> None:
    old, child = book.store(1, 2).tolist()
    book.index.detach(old)
    book.evict(child)
    assert not book.leaves
    book.index.drop(old)
    assert book.index.ghosts == 0 and book.index.free_rows == book.index.max_rows


def test_only_a_detached_row_can_be_dropped(book: Book) -> None:
    row = book.store(1).item(0)
    with pytest.raises(InvariantViolation):
        book.index.drop(row)


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1), (2, 1, 3), (3, 1, 2), (1, 3, 2)])
def test_a_ring_of_parents_is_cut_wherever_it_is_closed(book: Book, order: tuple[int, ...]) -> None:
    above = {1: 3, 2: 1, 3: 2}
    for number in order:
        rows = book.index.begin(book.table, [key(number)], book.index.take_rows(1))
        adopted = rows[book.index.children[rows] != 0]
        book.index.link(rows, np.array([book.index.parent_row(book.table, key(above[number]))]))
        book.index.cut_cycles(adopted)
        book.index.show(book.table, rows)
    book.index.check()
    for _ in order:  # all can go, one after the other
        row = next(row for row in book.table.find(keys(*order)).tolist() if row >= 0 and book.index.evictable(row))
        book.evict(row)
    assert book.index.free_rows == book.index.max_rows


def test_an_index_without_rows_says_so_and_loses_none() -> None:
    book = Book(max_rows=4)
    rows = book.store(1, 2, 3).tolist()
    with pytest.raises(InvariantViolation):
        book.index.take_rows(2)
    assert book.index.free_rows == 1
    assert book.index.parent_row(book.table, key(9)) != ABSENT
    with pytest.raises(InvariantViolation):
        book.index.parent_row(book.table, key(8))
    for row in reversed(rows):
        book.evict(row)
    assert book.index.free_rows == 3


def test_tables_keep_equal_keys_apart(book: Book) -> None:
    other = book.index.add_table(b"m" * 16, 0, 1000)
    book.store(1)
    assert other.get(key(1)) == ABSENT and list(other) == []
    assert list(book.table) == [key(1)]


def test_a_recycled_row_remembers_nothing(book: Book) -> None:
    row = book.store(1).item(0)
    book.index.hits[row] = book.index.clean[row] = book.index.parked[row] = 1
    book.index.stamp[row] = 99
    book.evict(row)
    assert book.store(5).item(0) == row
    for column in ("hits", "clean", "parked", "stamp", "refs", "pins", "children"):
        assert getattr(book.index, column).item(row) == 0, column


def test_memory_for_further_rows_is_asked_for_once_and_before_they_are_used() -> None:
    asked: list[int] = []
    index = Index(1 << 18, on_low=lambda: asked.append(index.high_water))
    index.back_ahead()
    index.take_rows(1 << 15)
    assert asked == []
    index.take_rows(1)
    index.take_rows(1000)
    assert asked == [(1 << 15) + 1]
    index.back_ahead()
    index.take_rows(1 << 15)
    assert len(asked) == 1
    index.take_rows(1)
    assert len(asked) == 2


def test_asking_for_memory_leaves_rows_as_they_are(book: Book) -> None:
    rows = book.store(1, 2, 3)
    before = book.index.rows.tobytes()
    book.index.back_ahead()
    assert book.index.rows.tobytes() == before
    assert book.table.find(keys(1, 2, 3)).tolist() == rows.tolist()


@given(present=st.integers(0, 40), asked=st.integers(0, 40))
def test_the_leading_run_of_a_prefix_is_found_by_bisection(present: int, asked: int) -> None:
    book = Book()
    if present:
        book.store(*range(1, present + 1))
    assert book.table.leading_run(keys(*range(1, asked + 1))) == min(present, asked)


@given(data=st.data())
def test_check_finds_what_is_kept_wrongly(data: st.DataObject) -> None:
    book = Book()
    rows = book.store(1, 2, 3)
    book.store(5, parent=key(4))
    book.index.check()
    row = data.draw(st.sampled_from(rows.tolist()))
    match data.draw(st.sampled_from(["children", "refs", "pins", "ghosts", "state", "visible"])):
        case "children":
            book.index.children[row] += 1
        case "refs":
            book.index.refs[row] = -1
        case "pins":
            book.index.pins[row] = -1
        case "ghosts":
            book.index.ghosts += 1
        case "state":
            book.index.state[row] = State.WRITING
        case _:
            book.table.visible += 1
    with pytest.raises(InvariantViolation):
        book.index.check()


# --- erasing many at once ---------------------------------------------------------------------------------------------------


def test_rows_that_go_with_all_their_children_go_at_once(book: Book) -> None:
    rows = book.store(1, 2, 3, 4)
    lines = book.index.erase_family(rows[1:][::-1])
    assert lines is not None and (lines["table"] == book.table.number).all()
    assert book.table.find(keys(1, 2, 3, 4)).tolist() == [rows[0], ABSENT, ABSENT, ABSENT]
    assert book.leaves == [rows[0]] and book.table.visible == 1
    book.index.check()


@pytest.mark.parametrize("held", ["child", "refs", "pins", "writing"])
def test_a_family_of_which_one_may_not_go_stays_as_it_is(book: Book, held: str) -> None:
    rows = book.store(1, 2, 3, 4)
    family = rows[1:3] if held == "child" else rows[1:]
    if held in ("refs", "pins"):
        getattr(book.index, held)[rows[2]] = 1
    if held == "writing":
        family = np.append(family, book.write(5, parent=keys(4)[0]))
    before = book.index.rows.copy()
    assert book.index.erase_family(family) is None
    assert (book.index.rows == before).all() and book.leaves == []
    book.index.check()


def test_the_line_above_a_row_ends_where_a_row_waits_for_another_child_or_not_at_all(book: Book) -> None:
    rows = book.store(1, 2, 3, 4, 5, 6)
    book.store(7, parent=keys(2)[0])
    book.index.parked[rows[:-1]] = 1
    assert book.index.line_above(rows.item(5), 64).tolist() == rows[[5, 4, 3, 2]].tolist()  # block 2 has two children
    assert book.index.line_above(rows.item(5), 3).tolist() == rows[[5, 4, 3]].tolist()
    book.index.parked[rows[4]] = 0
    assert book.index.line_above(rows.item(5), 64).tolist() == [rows[5]]


@pytest.mark.parametrize("seed", range(20))
def test_find_agrees_with_single_look_ups_wherever_rows_lie(seed: int) -> None:
    rng = np.random.default_rng(seed)
    book = Book(4096)
    numbers = rng.permutation(2000).tolist()
    while numbers:
        run = [numbers.pop() for _ in range(min(len(numbers), int(rng.integers(1, 200))))]
        rows = book.store(*run)
        for row in rows[::-1].tolist()[: int(rng.integers(0, len(rows)))]:
            book.evict(row)  # leaves holes, and numbers to be used again out of order
    asked = [int(n) for start in rng.integers(0, 2100, 40) for n in range(start, start + int(rng.integers(1, 90)))]
    rng.shuffle(asked[: len(asked) // 2])
    wanted = [book.table.get(key) for key in keys(*asked)]
    assert book.table.find(keys(*asked)).tolist() == wanted, f"seed {seed}"
