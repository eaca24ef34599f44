"""Guards, and how to switch each one off: the proof that a test of docs/faults.md can fail.

A guard is named in docs/faults.md; `OFF` has the patch that takes it out and the test that must go red by it. As a pytest
plugin (`-p tests.faults.guards`) and in every daemon and engine process started by tests, `FOREBAY_TEST_GUARD_OFF` names the
guard to switch off. Always true: without that variable nothing here does anything.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

VARIABLE = "FOREBAY_TEST_GUARD_OFF"


class Off(NamedTuple):
    """`patch` switches the guard off; `test` must then fail. `quick`: worth running each time."""

    patch: Callable[[], None]
    test: str
    quick: bool = False


def put(owner: Any, name: str, value: Any) -> None:
    assert hasattr(owner, name), f"the guard {owner}.{name} has gone: switch off what replaced it"
    setattr(owner, name, value)


def _verify_object() -> None:
    from forebay.kvstore.objects import ObjectLayout

    put(ObjectLayout, "verify_object", lambda self, view, **names: None)


def _checksum_on_read() -> None:
    from forebay.clients.lease import Lease

    put(Lease, "verify", len)


def _token_comparison() -> None:
    from forebay.clients.memory import SharedMemory

    real = SharedMemory.leading_good

    def leading_good(self: Any, places: Any, keys: Any, namespace: Any, layout: Any, token_words: Any) -> int:
        return real(self, places, keys, namespace, layout, None)

    put(SharedMemory, "leading_good", leading_good)


def _header_comparison() -> None:
    from forebay.clients.memory import SharedMemory

    put(SharedMemory, "leading_good", lambda self, places, *rest: len(places))


def _generations() -> None:
    import numpy as np

    from forebay.clients.memory import SharedMemory

    put(SharedMemory, "current", lambda self, places: np.ones(len(places), bool))


def _epoch() -> None:
    from forebay.clients.lease import Lease

    put(Lease, "valid", lambda self: self._life is not None)


def _quarantine() -> None:
    from forebay.server.sessions import Registry

    put(Registry, "_process_is_gone", staticmethod(lambda pidfd: True))


def _exit_watch() -> None:
    from forebay.server.sessions import Registry

    put(Registry, "_process_exited", lambda self, orphan: self._loop.remove_reader(orphan.pidfd))


def _session_watch() -> None:
    from forebay.server.sessions import Registry

    def add(self: Any, session: Any) -> None:
        self.sessions[session.id] = session

    put(Registry, "add", add)


def _deadline_sweep() -> None:
    from forebay.server.sessions import Registry

    put(Registry, "overdue", lambda self, now_s: [])


def _orphan_bound() -> None:
    from forebay.server.sessions import Registry

    put(Registry, "orphans_of", lambda self, pid, besides=(): 0)


def _late_replies() -> None:
    from forebay.clients import transport

    put(transport, "undo", lambda reply: None)


def _call_deadline() -> None:
    from forebay.clients.transport import BlockingTransport, LoopTransport

    blocking, looping = BlockingTransport.wait, LoopTransport.wait
    put(BlockingTransport, "wait", lambda self, pending, deadline_s: blocking(self, pending, deadline_s + 4.0))
    put(LoopTransport, "wait", lambda self, pending, deadline_s: looping(self, pending, deadline_s + 4.0))


def _no_fork() -> None:
    put(mmap, "MADV_DONTFORK", mmap.MADV_NORMAL)


def _process_check() -> None:
    from forebay.clients.transport import OwnProcess

    put(OwnProcess, "check", lambda self: None)


def _size_seals() -> None:
    put(fcntl, "F_SEAL_SHRINK", 0)
    put(fcntl, "F_SEAL_GROW", 0)


def _write_seal() -> None:
    from forebay.tiers import ram

    put(ram, "forbid_new_writable_mappings", lambda fd: None)


def _trust_domains() -> None:
    from forebay.server.daemon import Daemon

    put(Daemon, "domain_of", lambda self, *who: self.ram.domain("default/0"))


def _socket_lock() -> None:
    put(fcntl, "flock", lambda *args: None)


def _frame_limit() -> None:
    from forebay.kvstore import framing

    real = framing.parse_header
    put(framing, "parse_header", lambda buffer, offset, limit: real(buffer, offset, 1 << 40))


def _namespaces() -> None:
    from forebay.server import daemon

    put(daemon, "namespace_id", lambda facts, **tenant: b"n" * 16)


def _stable_hash() -> None:
    from forebay.kvstore import keys

    seed = os.urandom(8)
    hashes = {name: lambda message, real=real: real(seed + message) for name, real in keys._HASHES.items()}
    put(keys, "_HASHES", hashes)


def _tagged_fields() -> None:
    from forebay.kvstore import identity

    put(identity, "_field", lambda tag, body: body)


def _every_fact() -> None:
    from forebay.kvstore import identity

    real = identity._encode_value
    put(identity, "_encode_value", lambda value, form: b"" if value in ("fp16", "bf16") else real(value, form))


def _single_flight() -> None:
    from forebay.kvstore.loader import Loader

    real = Loader.start

    def start(self: Any, key: Any, size: int, *, exact: bool, parent: bytes | None = None) -> Any:
        self._flights.pop(key, None)
        return real(self, key, size, exact=exact, parent=parent)

    put(Loader, "start", start)


def _breaker() -> None:
    from forebay.kvstore.breaker import Breaker

    put(Breaker, "failure", Breaker.success)


def _delete_fence() -> None:
    from forebay.kvstore.deletion import Watch

    put(Watch, "__init__", lambda self, owner, key, deleted: None)
    Watch.deleted = property(lambda self: False, lambda self, value: None)  # type: ignore[assignment,misc]
    put(Watch, "close", lambda self: None)


def _copy_queue_bound() -> None:
    from forebay.kvstore.writebehind import CopyQueue

    real = CopyQueue.__init__
    put(CopyQueue, "__init__", lambda self, limit: real(self, 1 << 40))


def _lease_validity() -> None:
    from forebay.engine_adapter.transformers import PrefixReuse

    real = PrefixReuse._copy_in

    def copy_in(self: Any, namespace: Any, *args: Any) -> Any:
        acquire = namespace.acquire

        @contextmanager
        def held(*acquire_args: Any, **options: Any) -> Iterator[Any]:
            with acquire(*acquire_args, **options) as lease:
                lease.valid = lambda: True
                yield lease

        namespace.acquire = held
        return real(self, namespace, *args)

    put(PrefixReuse, "_copy_in", copy_in)


OFF: dict[str, Off] = {
    "object verification": Off(
        _verify_object, "tests/kvstore/test_objects.py::test_a_changed_payload_byte_names_its_part", True
    ),
    "token comparison": Off(
        _token_comparison,
        "tests/clients/test_client.py::test_other_tokens_than_those_stored_are_a_miss_whatever_the_key",
        True,
    ),
    "header comparison": Off(
        _header_comparison,
        "tests/faults/test_trust.py::test_scribbling_over_its_own_domain_harms_bytes_there_and_nothing_of_the_daemon",
    ),
    "generations": Off(
        _generations, "tests/clients/test_client.py::test_deleted_blocks_are_gone_also_while_a_lease_still_reads_them"
    ),
    "boot epoch": Off(
        _epoch,
        "tests/clients/test_reconnect.py::test_a_killed_daemon_is_unavailable_at_once_and_found_again_when_it_is_back",
    ),
    "quarantine": Off(
        _quarantine,
        "tests/faults/test_orphans.py::test_a_copy_that_goes_on_after_its_session_ended_touches_nobodys_block",
        True,
    ),
    "exit watch": Off(
        _exit_watch, "tests/faults/test_orphans.py::test_what_a_vanished_session_held_comes_back_when_its_process_ends"
    ),
    "session watch": Off(
        _session_watch, "tests/faults/test_kill.py::test_a_process_that_only_its_forked_child_outlives_is_gone"
    ),
    "deadline sweep": Off(
        _deadline_sweep,
        "tests/faults/test_orphans.py::test_a_process_stopped_past_its_deadline_wakes_up_and_harms_nobody",
    ),
    "orphan bound": Off(
        _orphan_bound, "tests/faults/test_orphans.py::test_sessions_left_behind_by_one_process_are_bounded"
    ),
    "late replies": Off(
        _late_replies, "tests/clients/test_reconnect.py::test_replies_that_come_too_late_give_back_what_they_granted"
    ),
    "call deadline": Off(
        _call_deadline, "tests/clients/test_reconnect.py::test_a_stopped_daemon_is_a_timeout_within_the_calls_deadline"
    ),
    "no fork of writable memory": Off(
        _no_fork, "tests/clients/test_fork.py::test_a_child_cannot_write_through_its_parents_mapping"
    ),
    "process check": Off(
        _process_check,
        "tests/clients/test_fork.py::test_a_child_that_leaves_its_parents_blocks_gives_back_nothing_of_its_parents",
    ),
    "size seals": Off(
        _size_seals,
        "tests/faults/test_trust.py::test_extents_can_be_written_by_their_domain_and_neither_resized_nor_sealed",
    ),
    "write seal": Off(
        _write_seal,
        "tests/faults/test_trust.py::test_a_read_only_domain_is_written_through_the_socket_and_cannot_be_mapped_writable",
    ),
    "trust domains": Off(
        _trust_domains,
        "tests/faults/test_trust.py::"
        "test_another_users_session_is_another_domain_that_sees_none_of_our_blocks_and_maps_none_of_our_memory",
    ),
    "socket lock": Off(
        _socket_lock, "tests/faults/test_kill.py::test_two_daemons_on_one_socket_are_one_too_many_and_the_first_goes_on"
    ),
    "frame limit": Off(
        _frame_limit,
        "tests/server/test_verbs.py::test_a_frame_over_the_limit_is_named_and_ends_the_session_before_its_body_is_read",
    ),
    "namespaces": Off(
        _namespaces, "tests/clients/test_client.py::test_a_block_is_found_only_under_the_namespace_it_was_stored_in"
    ),
    "stable hash": Off(_stable_hash, "tests/kvstore/test_keys.py::test_keys_do_not_depend_on_the_process"),
    "tagged fields": Off(
        _tagged_fields,
        "tests/faults/test_faults_doc.py::test_a_value_moved_to_a_neighbouring_fact_gives_another_namespace",
    ),
    "every fact": Off(_every_fact, "tests/kvstore/test_identity.py::test_changing_one_fact_gives_another_id"),
    "single flight": Off(_single_flight, "tests/kvstore/test_store.py::test_however_many_ask_an_object_is_loaded_once"),
    "breaker": Off(
        _breaker, "tests/kvstore/test_channel.py::test_a_failing_tier_is_no_longer_asked_until_a_probe_passes"
    ),
    "delete fence": Off(_delete_fence, "tests/kvstore/test_store.py::test_a_delete_during_a_load_wins"),
    "copy queue bound": Off(
        _copy_queue_bound,
        "tests/kvstore/test_store.py::test_more_objects_than_the_copy_queue_holds_are_counted_and_never_block",
    ),
    "lease validity": Off(
        _lease_validity,
        "tests/engine_adapter/test_transformers.py::test_a_lease_that_turns_invalid_during_the_copy_is_a_miss",
    ),
    "checksum on read": Off(
        _checksum_on_read, "tests/clients/test_client.py::test_bytes_changed_after_their_commit_are_told_by_verify"
    ),
}


def switch_off() -> None:
    """Switch off what the environment names."""
    name = os.environ.get(VARIABLE)
    if name:
        OFF[name].patch()


def pytest_configure() -> None:
    switch_off()
