"""Who may do what: tokens, tenants, rights, for every door alike.

Covers the credentials table, what a token stands for, the rights that each verb and HTTP route needs, and tenants' secrets.
Leaves quotas to server/quotas.py and sockets to the doors. Always true: a tenant comes from credentials, never from a
request; a verb without a line in `VERB_RIGHTS` keeps the daemon from starting; no token or secret is in an error, a log or
a repr.

A token is 256 random bits, so its SHA-256 can stand in a settings file: there is nothing to guess that a slow hash would
protect.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from forebay.kvstore.errors import AccessDenied, Forbidden
from forebay.kvstore.identity import PUBLIC_SECRET
from forebay.kvstore.secretfile import read_secret_file

Right: TypeAlias = Literal["read", "write", "admin"]
RIGHTS: Final[tuple[Right, ...]] = get_args(Right)

DEFAULT_TENANT: Final = "default"
"""The one tenant of a daemon without a credentials table, and the one of Unix sessions that present no token."""

PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Names of tenants and credentials: what TOML takes without quotes."""

TOKEN_PREFIX: Final = "fby_"  # so that secret scanners, and people, know one when they see it
MAX_TOKEN_CHARACTERS: Final = 256
MIN_SECRET_BYTES: Final = 32

NOBODY: Final[frozenset[Right]] = frozenset()
READ: Final[frozenset[Right]] = frozenset({"read"})
WRITE: Final[frozenset[Right]] = frozenset({"write"})
ADMIN: Final[frozenset[Right]] = frozenset({"admin"})
DATA: Final = READ | WRITE
ANY_RIGHT: Final = DATA | ADMIN

VERB_RIGHTS: Final[Mapping[str, frozenset[Right]]] = {
    # What gives back or only introduces needs none: refusing it would keep memory from others.
    "hello": NOBODY,
    "settle": NOBODY,
    "unmapped": NOBODY,
    "close_handle": NOBODY,
    "release": NOBODY,
    "abort": NOBODY,
    "open": ANY_RIGHT,
    "map": DATA,
    "match": DATA,  # a writer may ask what it need not write
    "acquire": READ,
    "attach": READ,
    "prefetch": READ,
    "get": READ,
    "put": WRITE,
    "fill": WRITE,
    "allocate": WRITE,
    "write": WRITE,
    "commit": WRITE,
    "pin": WRITE,
    "unpin": WRITE,
    "expire": WRITE,
    "delete": WRITE,
    "purge": ADMIN,
    "flush": WRITE,
    "report": DATA,
    "stats": ADMIN,
    "explain": READ | ADMIN,
}
"""Verb -> rights of which a session needs one; none for an empty set."""


OPERATOR_VERBS: Final = frozenset({"stats"})
"""Verbs whose answers tell of all tenants: for the operator only, an admin of the default tenant."""


@dataclass(frozen=True)
class Principal:
    """Who a session or a request acts for. `name` is the credential's label, for logs; empty without a token."""

    tenant: str
    rights: frozenset[Right]
    name: str = ""

    def may(self, rights: Set[Right]) -> bool:
        """Whether it has one of `rights`, or none is needed."""
        return not rights or bool(self.rights & rights)

    @property
    def operator(self) -> bool:
        """Whether it may see all tenants: an admin of the default one."""
        return self.tenant == DEFAULT_TENANT and "admin" in self.rights

    def check_operator(self, what: str) -> None:
        """Raises: Forbidden."""
        if not self.operator:
            raise Forbidden(f"{what} tells of all tenants: it is for admins of tenant {DEFAULT_TENANT!r}")

    def check_verb(self, verb: str) -> None:
        """Raises: Forbidden."""
        self.check(verb, VERB_RIGHTS[verb])
        if verb in OPERATOR_VERBS:
            self.check_operator(verb)

    def check(self, what: str, rights: Set[Right]) -> None:
        """Raises: Forbidden: `what` (a verb or a route) needs a right that this principal lacks."""
        if not self.may(rights):
            needs = " or ".join(right for right in RIGHTS if right in rights)
            has = ", ".join(right for right in RIGHTS if right in self.rights) or "no right"
            raise Forbidden(f"{what} needs the right to {needs}, and these credentials have {has}")


LOCAL: Final = Principal(DEFAULT_TENANT, frozenset(RIGHTS))
"""Everybody whom a daemon without a credentials table lets in."""


@dataclass(frozen=True)
class Credential:
    """One line of the table."""

    name: str
    tenant: str
    rights: frozenset[Right]
    token_sha256: bytes


@dataclass(frozen=True)
class Access:
    """The credentials table and the tenants' secrets.

    Args:
        credentials: empty for a daemon without a table: then everybody who gets in is the default tenant.
        tenant_secrets: tenant -> secret of at least 32 bytes; the default tenant has the public one unless given.
        unix_rights: with a table, rights of Unix sessions that present no token.
    """

    credentials: tuple[Credential, ...] = ()
    tenant_secrets: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    unix_rights: frozenset[Right] = NOBODY

    @property
    def required(self) -> bool:
        """Whether there is a table, so that network doors ask for a token."""
        return bool(self.credentials)

    def authenticate(self, token: str | None, *, unix: bool) -> Principal:
        """Who presents `token`; "" and None are no token.

        Args:
            unix: by the Unix socket, whose file mode has decided already who may connect. Other doors pass False, and
                without a table let in only whom they know to be on this machine.
        Raises:
            AccessDenied: the token is unknown, or one is needed. Never says which part of a token was wrong.
        """
        if not self.required:
            if token:
                raise AccessDenied("this daemon has no credentials table: connect without a token")
            return LOCAL
        if not token:
            if unix and self.unix_rights:
                return Principal(DEFAULT_TENANT, self.unix_rights)
            raise AccessDenied(
                "this daemon has a credentials table: present a token (FOREBAY_TOKEN, FOREBAY_TOKEN_FILE)"
            )
        # A token far too long is not worth hashing, and the empty one stands for nobody.
        digest = token_digest(token if len(token) <= MAX_TOKEN_CHARACTERS else "")
        found: Credential | None = None
        for credential in self.credentials:  # all of them, so that the time says nothing about which one it was
            if hmac.compare_digest(digest, credential.token_sha256):
                found = credential
        if found is None:
            raise AccessDenied("this token is not in the daemon's credentials table")
        return Principal(found.tenant, found.rights, found.name)

    def secret_of(self, tenant: str) -> bytes:
        """The key of the tenant's namespace ids."""
        found = self.tenant_secrets.get(tenant)
        if found is None:
            if tenant != DEFAULT_TENANT:
                raise AccessDenied(f"tenant {tenant!r} has no secret: its namespaces can't be named")
            return PUBLIC_SECRET
        return found


def token_digest(token: str) -> bytes:
    """SHA-256 of a token, as the table holds it in hex: what `printf %s TOKEN | sha256sum` prints."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def new_token() -> str:
    """A fresh token. Only its digest is kept anywhere."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def new_secret() -> bytes:
    """A fresh tenant's secret, as text for a file."""
    return secrets.token_hex(MIN_SECRET_BYTES).encode()


def read_tenant_secret(path: Path) -> bytes:
    """A tenant's secret from its file. Raises: ValueError that says what to do."""
    found = read_secret_file(path)
    if len(found) < MIN_SECRET_BYTES:
        raise ValueError(
            f"{path} holds {len(found)} bytes: a secret has at least {MIN_SECRET_BYTES}; `forebay token secret`"
        )
    return found


def check_verbs(verbs: Set[str]) -> None:
    """Raises: ValueError unless `VERB_RIGHTS` has exactly these verbs. A door calls it before it opens."""
    if verbs != VERB_RIGHTS.keys():
        names = ", ".join(sorted(verbs ^ VERB_RIGHTS.keys()))
        raise ValueError(f"rights and verbs differ: {names}")
