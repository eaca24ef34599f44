"""Every error Forebay raises on purpose, in families by layer.

Callers branch on type and read fields; nobody parses text. Each layer translates the family below it at its edge with
`raise X(...) from exc`. A miss is `None` or a shorter run, never an exception; trouble is an exception, never a silent
`None`. Caller mistakes that never leave the process are plain `ValueError`.
"""

from __future__ import annotations


class ForebayError(Exception):
    """Root of all families."""


class InvariantViolation(ForebayError):
    """A rule of docs/architecture.md was found broken: a bug in Forebay, or memory damaged from outside."""


# --- tiers ---------------------------------------------------------------------------------------------------------


class TierError(ForebayError):
    """Trouble in a tier. `tier` is its name, `key` the object (None when the whole tier is meant)."""

    def __init__(self, message: str, *, tier: str, key: object = None) -> None:
        super().__init__(message)
        self.tier = tier
        self.key = key


class TierTimeout(TierError):
    """Not confirmed in time: try elsewhere. Safe to repeat, since objects never change."""


class TierUnavailable(TierError):
    """The medium refused or is gone: send nothing until a probe passes. `__cause__` has the original error."""


class TierClosed(TierError):
    """The tier was closed by its owner; not a fault of the medium."""


class TierFull(TierError):
    """No room even after eviction: safe to try a slower tier."""

    def __init__(self, message: str, *, tier: str, key: object = None, need_bytes: int, free_bytes: int) -> None:
        super().__init__(message, tier=tier, key=key)
        self.need_bytes = need_bytes
        self.free_bytes = free_bytes


class BlockCorrupt(TierError):
    """Identity or checksum failed: the object was dropped, the next read is a miss, recompute it."""


# --- session protocol: what a daemon answers and a client raises ----------------------------------------------------


class ProtocolError(ForebayError):
    """A request the daemon refuses. `code` is the stable name on the wire; `fatal` ends the session, not the daemon."""

    code = "protocol"
    fatal = False


class MalformedFrame(ProtocolError):
    """Bytes that are no frame, or a body that does not match its verb."""

    code = "malformed_frame"
    fatal = True


class FrameTooLarge(ProtocolError):
    """A frame longer than the daemon's limit."""

    code = "frame_too_large"
    fatal = True


class VersionMismatch(ProtocolError):
    """The two sides speak no common protocol version."""

    code = "version_mismatch"
    fatal = True


class UnknownVerb(ProtocolError):
    """A verb this daemon does not know."""

    code = "unknown_verb"


class NotIntroduced(ProtocolError):
    """A verb before `hello`, or a second `hello`."""

    code = "not_introduced"
    fatal = True


class AccessDenied(ProtocolError):
    """Credentials refused."""

    code = "access_denied"
    fatal = True


class Forbidden(ProtocolError):
    """A right that these credentials lack."""

    code = "forbidden"


class UnknownHandle(ProtocolError):
    """A namespace handle, group, lease or allocation that this session does not have."""

    code = "unknown_handle"


class BadRequest(ProtocolError):
    """A well-formed request whose values make no sense: key length, counts, sizes against the namespace."""

    code = "bad_request"


class ObjectTooLarge(ProtocolError):
    """An object that could never fit this domain's memory."""

    code = "object_too_large"


class OverLimit(ProtocolError):
    """A bound on this session's resources: uncommitted bytes, leases, quarantined bytes, handles."""

    code = "over_limit"


class Draining(ProtocolError):
    """The daemon is shutting down and takes no new work."""

    code = "draining"


class RequestTimeout(ProtocolError):
    """The daemon could not do it within the request's deadline; nothing is left half done."""

    code = "timeout"


class DaemonFault(ProtocolError):
    """An unexpected error inside the daemon while it served this request; the daemon logged it and goes on."""

    code = "daemon_fault"


# --- clients -------------------------------------------------------------------------------------------------------


class ClientError(ForebayError):
    """Trouble between a client and its daemon; adapters turn it into a counted miss."""


class DaemonUnavailable(ClientError):
    """Nothing answers at the address, or the connection broke."""


class DaemonTimeout(ClientError):
    """No answer within the call's deadline."""


class ClientClosed(ClientError):
    """The client was closed; open a new one."""


class UsedAfterFork(ClientError):
    """A client made before fork() was used in the child; open a new one there."""


class EpochEnded(ClientError):
    """The handle, lease or view belongs to an earlier life of the daemon."""


PROTOCOL_ERRORS: dict[str, type[ProtocolError]] = {
    cls.code: cls
    for cls in (
        ProtocolError,
        MalformedFrame,
        FrameTooLarge,
        VersionMismatch,
        UnknownVerb,
        NotIntroduced,
        AccessDenied,
        Forbidden,
        UnknownHandle,
        BadRequest,
        ObjectTooLarge,
        OverLimit,
        Draining,
        RequestTimeout,
        DaemonFault,
    )
}
