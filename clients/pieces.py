"""A long run cut in requests, several of which are under way at a time."""

from __future__ import annotations


def growing_pieces(
    count: int, object_bytes: int, *, first_bytes: int, most_bytes: int, most_objects: int
) -> list[tuple[int, int]]:
    """(start, end) of each piece of `count` objects.

    The first is small, so that bytes move soon; each next one is twice as large, up to the bounds. None is empty.
    """
    most = max(1, min(most_objects, most_bytes // object_bytes))
    size = max(1, min(most, first_bytes // object_bytes))
    pieces: list[tuple[int, int]] = []
    start = 0
    while start < count:
        pieces.append((start, min(count, start + size)))
        start, size = start + size, min(most, 2 * size)
    return pieces
