"""The index of one memory tier: which object lies where, who holds it, and what hangs under it.

Covers rows (flat arrays), tables (one a namespace and group: key -> row), prefix links, references and pins. Leaves memory to
tiers/extents.py, sizes and eviction to tiers/ram.py, order of eviction to kvstore/policy.py. Moves no bytes.
Always true: a key in a table's shards is visible and whole; a row without place has state FREE or GHOST; the sum of
`children` over a table's rows equals its rows with a parent.

No Python object is kept a block but its key and row number in a dict. The dict is split in 256 shards by the key's first byte:
one dict of 10^6 entries stops the interpreter for about 50 ms when it grows, a shard for 0.8 ms ([M]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from itertools import repeat
from operator import itemgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from forebay.kvstore.errors import InvariantViolation
from forebay.kvstore.keys import KEY_BYTES
from forebay.kvstore.pages import back_ahead
from forebay.kvstore.wire import KEY_DTYPE, LOCATION_DTYPE, FlatKeys

RowArray = npt.NDArray[np.int64]
ABSENT: Final = -1
_WORTH_GUESSING: Final = 32  # keys that must follow their predecessor's row for a guess to have paid
_MAX_LOOK_UPS: Final = 1024
_GUESS_EFFORT: Final = 16  # a guess costs as much as so many look-ups
UNLIMITED: Final = 1 << 60
_AHEAD: Final = 1 << 16  # rows that get their memory together: 5.5 MB
_MAX_DEPTH: Final = 16_384  # blocks: a run of a million tokens


class State(IntEnum):
    """What a row is now."""

    FREE = 0
    WRITING = 1  # has a place, invisible
    VISIBLE = 2
    GHOST = 3  # absent here, kept because children name it as their parent
    DETACHED = 4  # has a place that someone may still touch, but no key leads here


# One row is one cache line, so that gathering any number of its fields costs one miss. The first 24 bytes are a location.
_ROW: Final = (
    ("location", LOCATION_DTYPE, 0),
    ("generation", "<u8", 16),  # the location's own
    ("stamp", "<u8", 24),
    ("refs", "<i4", 32),
    ("children", "<i4", 36),
    ("parent", "<i4", 40),
    ("table", "<i4", 44),
    ("pins", "<i4", 48),
    ("state", "u1", 52),
    ("parked", "u1", 53),
    ("clean", "u1", 54),
    ("hits", "<u4", 56),
)
ROW_DTYPE: Final = np.dtype(
    {
        "names": [name for name, _, _ in _ROW],
        "formats": [form for _, form, _ in _ROW],
        "offsets": [offset for _, _, offset in _ROW],
        "itemsize": 64,
    }
)


class Table:
    """Rows of one namespace and group, by block key."""

    __slots__ = ("_index", "fresh_words", "group", "hidden", "namespace", "number", "object_bytes", "shards", "visible")

    def __init__(self, index: Index, number: int, namespace: bytes, group: int, object_bytes: int) -> None:
        self._index = index
        self.number = number
        fresh = np.zeros(1, ROW_DTYPE)
        fresh["table"], fresh["parent"], fresh["state"] = number, ABSENT, State.WRITING
        self.fresh_words = fresh.view(np.uint64)  # what a row of this table begins as
        self.namespace = namespace
        self.group = group
        self.object_bytes = object_bytes
        self.shards: list[dict[bytes, int]] = [{} for _ in range(256)]
        self.hidden: dict[bytes, int] = {}  # WRITING and GHOST rows
        self.visible = 0

    def get(self, key: bytes) -> int:
        """Row of a visible object, or ABSENT."""
        return self.shards[key[0]].get(key, ABSENT)

    def find(self, keys: Sequence[bytes]) -> RowArray:
        """Rows of visible objects, [keys], ABSENT where there is none."""
        return self.find_part(b"".join(keys))

    def find_part(self, keys: bytes, start: int = 0, effort: int = UNLIMITED) -> RowArray:
        """The same for keys side by side from the `start`-th on, and only until `effort` is spent: look-ups, or their like.

        Blocks stored together have rows side by side, so after a key is found the following keys are compared with the
        following rows, all at once, and only a key that isn't there costs a look-up: [M] 10 ns a key against 450 for a
        look-up in an index of 10^6, most of it cache misses. Where rows don't follow each other that is tried ever less.
        """
        count = len(keys) // KEY_BYTES - start
        rows = np.empty(count, np.int64)
        wanted = np.frombuffer(keys, np.uint64).reshape(-1, 2)[start:]
        at, look_ups = 0, 1
        while at < count and effort > 0:
            end = min(count, at + look_ups)
            some = np.frombuffer(keys, KEY_DTYPE, end - at, KEY_BYTES * (start + at)).tolist()
            shards = map(self.shards.__getitem__, map(itemgetter(0), some))  # the loops run in C
            rows[at:end] = list(map(dict.get, shards, some, repeat(ABSENT)))
            effort -= end - at + _GUESS_EFFORT
            at = end
            row = rows.item(at - 1) + 1
            if at == count:
                break
            if row == 0:  # after a key that isn't here the next ones are not here either, mostly
                look_ups = _MAX_LOOK_UPS
                continue
            following = self._following(row, wanted[at:])
            rows[at : at + following] = np.arange(row, row + following)
            at += following
            look_ups = 1 if following >= _WORTH_GUESSING else min(2 * look_ups, _MAX_LOOK_UPS)
        return rows[:at]

    def _following(self, row: int, wanted: npt.NDArray[np.uint64]) -> int:
        """How many of these keys, [keys, 2], the rows from `row` on hold in their order. It looks ever further ahead."""
        index, at, ahead = self._index, 0, _WORTH_GUESSING
        while at < len(wanted) and row < index.max_rows:
            part = slice(row, min(row + ahead, row + len(wanted) - at, index.max_rows))
            here, there = index.key_words[part], wanted[at : at + part.stop - part.start]
            same = (here[:, 0] == there[:, 0]) & (here[:, 1] == there[:, 1])  # a tenth of what all(axis=1) costs
            same &= index.state[part] == State.VISIBLE
            same &= index.table[part] == self.number
            if not same.all():
                return at + int(same.argmin())
            at, row, ahead = at + len(same), part.stop, 8 * ahead
        return at

    def leading_run(self, keys: Sequence[bytes] | FlatKeys) -> int:
        """How many leading keys are visible, by bisection: 14 look-ups for 8,192 keys.

        Exact while the table is closed under prefixes, which leaf-first eviction keeps. After a delete or a damaged block it
        may count past a hole; `acquire` looks at every key and stops there.
        """
        shards = self.shards
        low, high = 0, len(keys)
        if not high or keys[0] not in shards[keys[0][0]]:
            return 0
        while low < high:
            middle = (low + high + 1) >> 1
            key = keys[middle - 1]
            if key in shards[key[0]]:
                low = middle
            else:
                high = middle - 1
        return low

    def __iter__(self) -> Iterator[bytes]:
        for shard in self.shards:
            yield from list(shard)


class Index:
    """Rows of all tables of one tier."""

    def __init__(
        self,
        max_rows: int,
        *,
        on_leaf: Callable[[int], None] = lambda row: None,
        on_low: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            max_rows: capacity; memory is taken from the system only as rows are first used.
            on_leaf: called with a visible row that has just lost its last child.
            on_low: called once when few rows are left that have memory: time for `back_ahead`.
        """
        self.max_rows = max_rows
        self._on_leaf, self._on_low = on_leaf, on_low
        self._low_at = 0  # high water at which `on_low` is called next
        self.rows = np.zeros(max_rows, ROW_DTYPE)
        self.locations = self.rows["location"]
        self.extent = self.locations["extent"]
        self.board = self.locations["board"]
        self.offset = self.locations["offset"]
        self.generation = self.rows["generation"]
        self.stamp = self.rows["stamp"]
        self.refs = self.rows["refs"]
        self.children = self.rows["children"]
        self.parent = self.rows["parent"]
        self.table = self.rows["table"]
        self.pins = self.rows["pins"]
        self.state = self.rows["state"]
        self.parked = self.rows["parked"]
        self.clean = self.rows["clean"]
        self.hits = self.rows["hits"]
        self.key = np.zeros(max_rows, "V16")
        self.key_words = self.key.view(np.uint64).reshape(-1, 2)
        self._words = self.rows.view(np.uint64).reshape(-1, 8)  # a row's first three words are its location
        self._free = np.zeros(max_rows, np.int32)  # stack of used and freed row numbers
        self._free_top = 0
        self.high_water = 0  # rows from here on were never used
        self.tables: list[Table] = []
        self.ghosts = 0

    # --- rows -------------------------------------------------------------------------------------------------------

    @property
    def free_rows(self) -> int:
        return self._free_top + self.max_rows - self.high_water

    def take_rows(self, count: int) -> RowArray:
        """`count` free rows. Raises InvariantViolation if there are fewer: the caller sizes max_rows by its memory."""
        if count > self.free_rows:
            raise InvariantViolation(f"index has {self.free_rows} free rows, {count} needed")
        reused = min(count, self._free_top)
        rows = np.empty(count, np.int64)
        rows[:reused] = self._free[self._free_top - reused : self._free_top]
        self._free_top -= reused
        rows[:reused].sort()  # rows of one batch side by side are what `Table.find` hopes for
        fresh = count - reused
        rows[reused:] = np.arange(self.high_water, self.high_water + fresh)
        self.high_water += fresh
        if self.high_water > self._low_at:
            self._low_at = self.max_rows  # not again before `back_ahead` has ended
            self._on_low()
        return rows

    def back_ahead(self) -> None:
        """Have memory behind the rows that are used next. For another thread: it takes milliseconds, mostly without the GIL.

        [M] the first touch of a huge page of rows held a loop up for 5 ms.
        """
        start = self.high_water
        stop = min(start + _AHEAD, self.max_rows)
        for array in (self._words, self.key_words, self._free):
            back_ahead(array.data, start * array.strides[0], stop * array.strides[0])
        self._low_at = stop - _AHEAD // 2

    def _take_row(self) -> int:
        if self._free_top:
            self._free_top -= 1
            return self._free.item(self._free_top)
        if self.high_water == self.max_rows:
            raise InvariantViolation(f"index is full with {self.max_rows} rows")
        self.high_water += 1
        return self.high_water - 1

    def _give_row(self, row: int) -> None:
        self.state[row] = State.FREE
        self._free[self._free_top] = row
        self._free_top += 1

    def locations_of(self, rows: RowArray) -> bytes:
        """LOCATION_DTYPE records, [rows]. [M] whole lines gathered and cut: 30 ns a row; by the structured field: 65."""
        return self._words.take(rows, axis=0)[:, :3].tobytes()

    # --- tables -----------------------------------------------------------------------------------------------------

    def add_table(self, namespace: bytes, group: int, object_bytes: int) -> Table:
        table = Table(self, len(self.tables), namespace, group, object_bytes)
        self.tables.append(table)
        return table

    def key_of(self, row: int) -> bytes:
        return bytes(self.key[row])

    # --- life of a row ----------------------------------------------------------------------------------------------

    def row_of(self, table: Table, key: bytes) -> int:
        """Row that stands for `key` in any state that children may hang under, or ABSENT."""
        row = table.get(key)
        return row if row != ABSENT else table.hidden.get(key, ABSENT)

    def parent_row(self, table: Table, key: bytes) -> int:
        """Row that children of `key` hang under; a ghost is made when the object isn't here. ABSENT for the root."""
        if key == table.namespace:
            return ABSENT
        row = self.row_of(table, key)
        if row == ABSENT:
            row = self._take_row()
            self.rows[row] = 0
            self.state[row] = State.GHOST
            self.table[row] = table.number
            self.parent[row] = ABSENT
            self.key[row] = key
            table.hidden[key] = row
            self.ghosts += 1
        return row

    def begin(self, table: Table, keys: Sequence[bytes], rows: RowArray) -> RowArray:
        """Make fresh `rows` the WRITING rows of `keys` (not visible, not being written); a key's ghost is taken over instead.

        Returns the rows that serve. The caller sets their places and then their parents with `link`.
        """
        self._words[rows] = table.fresh_words
        self.key[rows] = np.frombuffer(b"".join(keys), "V16")
        hidden = table.hidden
        if hidden:
            rows = rows.copy()
            for i, key in enumerate(keys):
                ghost = hidden.get(key, ABSENT)
                if ghost != ABSENT:
                    self._give_row(rows.item(i))
                    self.ghosts -= 1
                    self.hits[ghost] = self.clean[ghost] = 0
                    self.state[ghost] = State.WRITING
                    rows[i] = ghost
        hidden.update(zip(keys, rows.tolist(), strict=True))
        return rows

    def link(self, rows: RowArray, parents: RowArray) -> None:
        """Hang rows under their parents' rows, [rows] each; ABSENT parents are roots."""
        self.parent[rows] = parents
        np.add.at(self.children, parents[parents >= 0], 1)

    def cut_cycles(self, rows: RowArray) -> None:
        """Make roots of those of `rows` that are their own ancestors, or hang deeper than any real run.

        Hashed keys form no cycle, but a caller may send what it likes, and nothing in a cycle could ever be evicted.
        """
        depths = {ABSENT: 0}  # of rows that a walk has passed: those of one run share nearly all of theirs
        for row in rows.tolist():
            walked = [row]
            above = self.parent.item(row)
            while above not in depths and above != row and len(walked) < _MAX_DEPTH:
                walked.append(above)
                above = self.parent.item(above)
            if depths.get(above, _MAX_DEPTH) + len(walked) > _MAX_DEPTH:
                self.unlink(row)
                continue
            depth = depths[above]
            for passed in reversed(walked):
                depth += 1
                depths[passed] = depth

    def show(self, table: Table, rows: RowArray) -> None:
        """WRITING rows of one table are whole: make them visible."""
        hidden, shards = table.hidden, table.shards
        for row, key in zip(rows.tolist(), self.key[rows].tolist(), strict=True):
            if hidden.pop(key, ABSENT) != row:
                raise InvariantViolation("committed a row that its table does not know as being written")
            shards[key[0]][key] = row
        table.visible += len(rows)
        self.state[rows] = State.VISIBLE

    def detach(self, row: int) -> None:
        """Part a WRITING or VISIBLE row from its key: the key misses and may be written anew, the place stays taken.

        For places that an orphaned writer or an unreleased reader may still touch. `drop` ends it.
        """
        table = self.tables[self.table.item(row)]
        key = bytes(self.key[row])
        if self.state.item(row) == State.VISIBLE:
            del table.shards[key[0]][key]
            table.visible -= 1
        else:
            del table.hidden[key]
        self.state[row] = State.DETACHED
        self.unlink(row)

    def unlink(self, row: int) -> None:
        """Take a row from under its parent, which may become a leaf by it."""
        parent = self.parent.item(row)
        if parent != ABSENT:
            self.parent[row] = ABSENT
            left = self.children.item(parent) - 1
            self.children[parent] = left
            if left == 0:
                self._lost_last_child(parent)

    def erase_family(self, rows: RowArray) -> npt.NDArray[np.void] | None:
        """Erase VISIBLE rows at once, if all may go when each one's children go along (they must be among them).

        The batch form of evictable, unlink and `erase_one`. Returns what the rows held, [rows] of ROW_DTYPE; None, and nothing
        is changed, if any may not go.
        """
        # One gather of whole lines, of which fields are views: a gather a field would cost as much each.
        lines: npt.NDArray[np.void] = self._words.take(rows, axis=0).view(ROW_DTYPE)[:, 0]
        if (lines["refs"] | lines["pins"]).any() or (lines["state"] != State.VISIBLE).any():
            return None
        parents = lines["parent"]
        parents = parents[parents >= 0]
        np.subtract.at(self.children, parents, 1)
        if self.children[rows].any():
            np.add.at(self.children, parents, 1)
            return None
        numbers = lines["table"]
        first = self.tables[numbers.item(0)]
        if (numbers == first.number).all():
            shards = first.shards
            for key in self.key[rows].tolist():
                del shards[key[0]][key]
            first.visible -= len(rows)
        else:
            for key, number in zip(self.key[rows].tolist(), numbers.tolist(), strict=True):
                table = self.tables[number]
                del table.shards[key[0]][key]
                table.visible -= 1
        self.parent[rows] = ABSENT
        self.state[rows] = State.FREE
        self._free[self._free_top : self._free_top + len(rows)] = rows
        self._free_top += len(rows)
        outside = parents[(self.children[parents] == 0) & (self.state[parents] != State.FREE)]
        for parent in dict.fromkeys(outside.tolist()):
            self._lost_last_child(parent)
        return lines

    def line_above(self, row: int, count: int) -> RowArray:
        """The row and up to `count` - 1 parked ones above it, each the only child of the next, as far as rows lie in line."""
        rows = np.arange(row, max(-1, row - count), -1)
        above = rows[1:]
        in_line = (self.parent[rows[:-1]] == above) & (self.parked[above] == 1) & (self.children[above] == 1)
        return rows if in_line.all() else rows[: int(in_line.argmin()) + 1]

    def erase_one(self, row: int) -> None:
        """A VISIBLE row without children, unlinked already, loses its key and goes."""
        table = self.tables[self.table.item(row)]
        key = bytes(self.key[row])
        del table.shards[key[0]][key]
        table.visible -= 1
        self._give_row(row)

    def drop(self, row: int) -> None:
        """A DETACHED row's place was given back. It stays as a ghost while it has children."""
        if self.state.item(row) != State.DETACHED:
            raise InvariantViolation("dropped a row that still has a key")
        if self.children.item(row) == 0:
            self._give_row(row)
            return
        self.state[row] = State.GHOST
        self.ghosts += 1
        table = self.tables[self.table.item(row)]
        key = bytes(self.key[row])
        if self.row_of(table, key) == ABSENT:  # else the key was written anew: this ghost stays nameless
            table.hidden[key] = row

    def _lost_last_child(self, row: int) -> None:
        state = self.state.item(row)
        if state == State.VISIBLE:
            self._on_leaf(row)
        elif state == State.GHOST:
            hidden = self.tables[self.table.item(row)].hidden
            key = bytes(self.key[row])
            if hidden.get(key) == row:
                del hidden[key]
            self.ghosts -= 1
            self._give_row(row)

    # --- references -------------------------------------------------------------------------------------------------

    def evictable(self, row: int) -> bool:
        """Whether the row may go now: visible, unleased, unpinned, without a child here (invariants 3 and 4)."""
        held: int = self.refs.item(row) | self.pins.item(row) | self.children.item(row)
        return held == 0 and self.state.item(row) == State.VISIBLE

    def check(self) -> None:
        """Recompute what is kept incrementally. Raises InvariantViolation. O(rows): for tests and `forebay` debugging."""
        used = self.rows[: self.high_water]
        live = used["state"] != State.FREE
        children = np.zeros(self.high_water, np.int64)
        linked = used["parent"][live]
        np.add.at(children, linked[linked >= 0], 1)
        if not np.array_equal(children[live], used["children"][live]):
            raise InvariantViolation("children counts differ from the parents that rows name")
        if int(np.count_nonzero(used["state"] == State.GHOST)) != self.ghosts:
            raise InvariantViolation("ghost count is off")
        if (used["refs"] < 0).any() or (used["pins"] < 0).any():
            raise InvariantViolation("a reference or pin count is negative")
        if self.high_water - self._free_top != int(np.count_nonzero(live)):
            raise InvariantViolation("free rows and live rows don't add up")
        for table in self.tables:
            rows = [row for shard in table.shards for row in shard.values()]
            if len(rows) != table.visible or (rows and (self.state[rows] != State.VISIBLE).any()):
                raise InvariantViolation("a table names a row that is not visible")
