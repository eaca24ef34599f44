"""Looking before sleeping goes on while it pays, stops when it does not, and is tried again."""

from __future__ import annotations

from forebay.kvstore.looking import Looking


def test_looks_in_vain_end_it_and_one_in_sixteen_is_tried_again() -> None:
    looking = Looking()
    assert looking.worth_it()
    for _ in range(4):
        looking.in_vain()
    assert [looking.worth_it() for _ in range(33)].count(True) == 2


def test_a_look_that_pays_brings_it_back() -> None:
    looking = Looking()
    for _ in range(10):
        looking.in_vain()
    looking.paid()
    assert looking.worth_it()
    looking.in_vain()
    assert not looking.worth_it()


def test_one_look_in_vain_among_many_that_pay_changes_nothing() -> None:
    looking = Looking()
    for _ in range(20):
        looking.paid()
        looking.paid()
        looking.in_vain()
        assert looking.worth_it()
