"""Tokens, tenants and rights: who gets in, what each verb needs, and that nothing secret is ever shown."""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import aiohttp
import msgspec
import pytest
from typer.testing import CliRunner

from forebay import cli
from forebay.clients import Client
from forebay.kvstore import errors, wire
from forebay.kvstore.secretfile import read_secret_file, token_from_environment, write_secret_file
from forebay.server import auth
from forebay.server.auth import Access, Credential
from forebay.server.blocks import Blocks
from forebay.server.http import HttpDoor
from forebay.server.settings import BadSettings, Settings
from tests.daemon_process import DaemonProcess, RawSession, facts_of, payload_of, serving, tokens_of

from .fakes import FakeDaemon

TOKENS = {
    "reader": auth.new_token(),
    "writer": auth.new_token(),
    "both": auth.new_token(),
    "admin": auth.new_token(),
    "other": auth.new_token(),
    "operator": auth.new_token(),
}
TENANTS = {"other": "globex", "operator": "default"}  # of the others it is acme
RIGHTS = {
    "reader": ("read",),
    "writer": ("write",),
    "both": ("read", "write"),
    "admin": ("admin",),
    "other": ("read", "write", "admin"),
    "operator": ("admin",),
}


def table(folder: Path) -> dict[str, Any]:
    """Settings with these credentials."""
    for tenant in ("acme", "globex"):
        write_secret_file(folder / tenant, auth.new_secret())
    return {
        "tenants": {tenant: {"secret_file": str(folder / tenant)} for tenant in ("acme", "globex")},
        "credentials": {
            name: {
                "tenant": TENANTS.get(name, "acme"),
                "token_sha256": auth.token_digest(token).hex(),
                "rights": list(RIGHTS[name]),
            }
            for name, token in TOKENS.items()
        },
    }


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("auth")
    yield from serving(folder, http_port=0, **table(folder))


@pytest.fixture
def daemon(running: DaemonProcess) -> DaemonProcess:
    return running


def introduce(daemon: DaemonProcess, token: str) -> tuple[RawSession, wire.HelloReply]:
    session = RawSession(daemon.socket)
    reply = session.call(wire.Hello(wire.PROTOCOL_VERSION, wire.PROTOCOL_VERSION, token, "e", 0))
    return session, reply


# --- tokens -----------------------------------------------------------------------------------------------------------------


def test_a_token_is_random_and_its_digest_is_what_sha256sum_prints() -> None:
    first, second = auth.new_token(), auth.new_token()
    assert first != second and len(first) >= 43 and first.startswith("fby_")
    assert auth.token_digest(first) == hashlib.sha256(first.encode()).digest()


def test_without_a_table_everybody_is_the_default_tenant_and_a_token_is_a_mistake() -> None:
    assert Access().authenticate("", unix=True) == Access().authenticate(None, unix=False) == auth.LOCAL
    with pytest.raises(errors.AccessDenied, match="no credentials table"):
        Access().authenticate("anything", unix=True)


def test_with_a_table_only_its_tokens_are_let_in() -> None:
    token = auth.new_token()
    access = Access((Credential("ci", "acme", frozenset({"read"}), auth.token_digest(token)),), {"acme": b"s" * 32})
    assert access.authenticate(token, unix=False) == auth.Principal("acme", frozenset({"read"}), "ci")
    wrong = ("", None, token[:-1], token + "x", token.upper(), "x" * 10_000_000, "\udcff")
    for unix, bad in itertools.product((True, False), wrong):
        with pytest.raises(errors.AccessDenied) as caught:
            access.authenticate(bad, unix=unix)
        assert token not in str(caught.value) and (not bad or bad not in str(caught.value))


def test_unix_rights_let_the_socket_in_without_a_token_and_no_network_door() -> None:
    credential = Credential("ci", "acme", frozenset({"read"}), auth.token_digest("t"))
    access = Access((credential,), {"acme": b"s" * 32}, frozenset({"read"}))
    assert access.authenticate("", unix=True) == auth.Principal("default", frozenset({"read"}))
    with pytest.raises(errors.AccessDenied):
        access.authenticate("", unix=False)


def test_a_tenant_without_a_secret_has_no_name_for_its_namespaces_but_the_default_one() -> None:
    assert Access().secret_of("default")
    with pytest.raises(errors.AccessDenied, match="no secret"):
        Access().secret_of("acme")


# --- rights: every verb ----------------------------------------------------------------------------------------------------


def test_every_verb_has_its_line_and_a_verb_without_one_keeps_the_daemon_from_starting() -> None:
    auth.check_verbs(wire.VERBS)
    with pytest.raises(ValueError, match="a_new_verb"):
        auth.check_verbs(wire.VERBS | {"a_new_verb"})
    with pytest.raises(ValueError, match="hello"):
        auth.check_verbs(wire.VERBS - {"hello"})


def sample(cls: type[wire.Request[Any]]) -> wire.Request[Any]:
    """A request of the verb with values of the right types."""
    values: dict[Any, Any] = {int: 1, str: "x", bytes: b"k" * 16}
    fields = [
        values.get(field.type) or ([] if "list" in str(field.type) else {}) if field.required else None
        for field in msgspec.structs.fields(cls)
    ]
    return cls(*[value for value in fields if value is not None])


def has(name: str, verb: str) -> bool:
    needed = auth.VERB_RIGHTS[verb]
    operator = TENANTS.get(name) == "default" and "admin" in RIGHTS[name]
    return (not needed or bool(needed & set(RIGHTS[name]))) and (operator or verb not in auth.OPERATOR_VERBS)


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("cls", [cls for cls in wire.REQUESTS if cls is not wire.Hello], ids=lambda cls: cls.__name__)
def test_a_verb_is_forbidden_exactly_where_the_table_says_so(
    daemon: DaemonProcess, name: str, cls: type[wire.Request[Any]]
) -> None:
    session, _ = introduce(daemon, TOKENS[name])
    with session:
        verb = str(cls.__struct_config__.tag)
        try:
            session.call(sample(cls))
            refused = False
        except errors.ProtocolError as exc:
            refused = isinstance(exc, errors.Forbidden)
            assert not refused or verb in str(exc)
        assert refused is not has(name, verb)
        session.call(wire.Settle([]))  # a forbidden verb ends no session


def test_an_unknown_token_and_none_end_the_session_before_it_has_begun(daemon: DaemonProcess) -> None:
    for token in ("", auth.new_token()):
        with RawSession(daemon.socket) as session:
            with pytest.raises(errors.AccessDenied):
                session.call(wire.Hello(wire.PROTOCOL_VERSION, wire.PROTOCOL_VERSION, token, "e", 0))
            assert session.ended()


def test_one_without_the_right_to_write_gets_memory_that_it_cannot_write(daemon: DaemonProcess) -> None:
    tokens = tokens_of(1, 4)
    with Client(daemon.socket, token=TOKENS["both"]) as writer, Client(daemon.socket, token=TOKENS["reader"]) as reader:
        space = writer.open(facts_of(salt=b"ro"))
        keys = space.keys(tokens)
        payloads = [payload_of(space.id, key, space.layout().payload_bytes) for key in keys]
        assert space.put(keys, tokens, payloads).stored == 4
        seen = reader.open(facts_of(salt=b"ro"))
        assert seen.id == space.id
        with seen.acquire(keys, tokens) as lease:
            assert [bytes(view) for view in lease.views] == payloads
            number = int(lease.places[0]["extent"])
        with pytest.raises(errors.ProtocolError, match="the right to write"):
            seen.put(keys, tokens, payloads)
    session, reply = introduce(daemon, TOKENS["reader"])
    with session:
        assert reply.read_only
        session.open(facts_of(salt=b"ro"))
        session.call(wire.MapExtents([number]))
        descriptor = session.descriptors[-1]
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, reply.extent_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError):
            os.pwrite(descriptor, b"x", 0)


def test_tenants_share_nothing_though_all_else_is_equal(daemon: DaemonProcess) -> None:
    tokens = tokens_of(2, 4)
    facts = facts_of(salt=b"shared")
    with Client(daemon.socket, token=TOKENS["both"]) as ours, Client(daemon.socket, token=TOKENS["other"]) as theirs:
        assert (ours.domain, theirs.domain) == (f"acme/{os.getuid()}", f"globex/{os.getuid()}")
        mine, foreign = ours.open(facts), theirs.open(facts)
        assert mine.id != foreign.id
        keys = mine.keys(tokens)
        payloads = [payload_of(mine.id, key, mine.layout().payload_bytes) for key in keys]
        assert mine.put(keys, tokens, payloads).stored == 4
        for asked in (keys, foreign.keys(tokens)):
            assert foreign.match(asked).blocks == 0
            assert foreign.delete(asked) == 0
        assert mine.match(keys).blocks == 4


# --- files and settings -----------------------------------------------------------------------------------------------------


def test_a_secret_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_secret_file(path, b"s" * 40)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_secret_file(path) == b"s" * 40
    with pytest.raises(FileExistsError):
        write_secret_file(path, b"other")
    for mode in (0o640, 0o604, 0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(ValueError, match="chmod 600"):
            read_secret_file(path)
    for bad, words in ((tmp_path, "not a regular file"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(ValueError, match=words):
            read_secret_file(bad)


def test_a_client_finds_its_token_in_the_environment_or_in_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_secret_file(path, b"from-file")
    assert token_from_environment({}) == ""
    assert token_from_environment({"FOREBAY_TOKEN_FILE": str(path)}) == "from-file"
    assert token_from_environment({"FOREBAY_TOKEN": "given", "FOREBAY_TOKEN_FILE": str(path)}) == "given"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"credentials": {"a": {"tenant": "acme", "token_sha256": "ab" * 32, "rights": ["read"]}}}, "no secret_file"),
        ({"credentials": {"a": {"tenant": "default", "token_sha256": "ab" * 32, "rights": ["root"]}}}, "'read'"),
        ({"credentials": {"a": {"tenant": "default", "token_sha256": "ab" * 32, "rights": []}}}, "at least 1"),
        ({"credentials": {"a b": {"tenant": "default", "token_sha256": "ab" * 32, "rights": ["read"]}}}, "letters"),
        (
            {
                "credentials": {
                    name: {"tenant": "default", "token_sha256": "ab" * 32, "rights": ["read"]} for name in "ab"
                }
            },
            "the same token_sha256",
        ),
        ({"unix_rights": "read"}, "without credentials"),
        ({"http_host": "0.0.0.0"}, "without credentials"),
        ({"tenants": {"a": {"ram_byte": 1}}}, "did you mean ram_bytes?"),
    ],
)
def test_a_table_that_cannot_hold_is_refused_with_what_to_do(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadSettings) as caught:
        Settings.load(None, **change)
    assert words in str(caught.value)


def test_a_token_in_the_wrong_line_is_not_repeated_in_the_error() -> None:
    token = auth.new_token()
    for field in ("token_sha256", "rights", "token"):
        given = {"tenant": "default", "token_sha256": "ab" * 32, "rights": ["read"], field: token}
        with pytest.raises(BadSettings) as caught:
            Settings.load(None, credentials={"a": given})
        assert token not in str(caught.value) and f"credentials.a.{field}" in str(caught.value)


def test_a_short_secret_is_refused_and_no_secret_is_in_a_repr(tmp_path: Path) -> None:
    settings = Settings.load(None, **table(tmp_path))
    secret = read_secret_file(tmp_path / "acme")
    access = settings.access()
    assert access.secret_of("acme") == secret
    shown = repr(access) + repr(settings) + settings.as_toml() + json.dumps(settings.shown())
    assert secret.decode() not in shown and not any(token in shown for token in TOKENS.values())
    (tmp_path / "acme").write_bytes(b"short")
    with pytest.raises(BadSettings, match="at least 32"):
        settings.access()


def test_with_a_table_any_address_is_allowed() -> None:
    credentials = {"a": {"tenant": "default", "token_sha256": "ab" * 32, "rights": ["read"]}}
    assert Settings.load(None, http_host="0.0.0.0", credentials=credentials).http_host == "0.0.0.0"


def test_token_new_prints_a_token_and_lines_that_let_it_in(tmp_path: Path) -> None:
    secret = tmp_path / "acme.secret"
    assert CliRunner().invoke(cli.app, ["token", "secret", str(secret)]).exit_code == 0
    again = CliRunner().invoke(cli.app, ["token", "secret", str(secret)])
    assert again.exit_code == cli.EXIT_USAGE and "new secret would rename" in " ".join(again.stderr.split())
    shown = CliRunner().invoke(
        cli.app, ["token", "new", "my engines", "--tenant", "acme", "--right", "read", "--right", "admin"]
    )
    assert shown.exit_code == cli.EXIT_USAGE and "letters" in shown.stderr
    shown = CliRunner().invoke(cli.app, ["token", "new", "engines", "--tenant", "acme", "--right", "read"])
    assert shown.exit_code == 0
    token, lines = shown.stdout.split("\n", 1)
    path = tmp_path / "forebay.toml"
    path.write_text(f'{lines}\n[tenants.acme]\nsecret_file = "{secret}"\n')
    access = Settings.load(path).access()
    assert access.authenticate(token, unix=False) == auth.Principal("acme", frozenset({"read"}), "engines")
    told = json.loads(CliRunner().invoke(cli.app, ["token", "new", "x", "--json"]).stdout)
    assert tomllib.loads(told["settings"])["credentials"]["x"]["token_sha256"] == auth.token_digest(told["token"]).hex()
    assert CliRunner().invoke(cli.app, ["token", "new", "x", "--right", "root"]).exit_code == cli.EXIT_USAGE
    assert set(get_args(auth.Right)) == set(auth.RIGHTS)


def test_no_token_is_in_the_log(daemon: DaemonProcess) -> None:
    session, _ = introduce(daemon, TOKENS["both"])
    session.close()
    with RawSession(daemon.socket) as wrong, pytest.raises(errors.AccessDenied):
        wrong.call(wire.Hello(wire.PROTOCOL_VERSION, wire.PROTOCOL_VERSION, "fby_this-is-a-wrong-token", "e", 0))
    assert "principal=both" in daemon.log
    assert not any(token in daemon.log for token in (*TOKENS.values(), "fby_this"))


# --- the HTTP door ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*TOKENS, "nobody", "unknown"])
async def test_every_route_asks_for_its_rights(daemon: DaemonProcess, name: str) -> None:
    """The table is the door's own, so a new route is asked here, too."""
    session, _ = introduce(daemon, TOKENS["operator"])
    with session:
        url = session.call(wire.Stats()).stats["http_url"]
    door = HttpDoor(FakeDaemon(), blocks=Blocks.__new__(Blocks))
    token = "" if name == "nobody" else TOKENS.get(name, "fby_unknown")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    rights = set(RIGHTS.get(name, ()))
    async with aiohttp.ClientSession(url, headers=headers) as http:
        for route in door.routes():
            path = route.path.format(namespace="ab" * 16, key="cd" * 16)
            async with http.request(route.method, path, json={} if route.method == "POST" else None) as response:
                await response.read()
                if route.rights is None:
                    assert response.status == 200
                elif name not in TOKENS:
                    assert response.status == 401 and response.headers["WWW-Authenticate"].startswith("Bearer"), path
                elif not route.rights & rights or (route.operator and name != "operator"):
                    assert response.status == 403, path
                else:
                    assert response.status not in (401, 403), path
        async with http.get("/healthz", headers={"Authorization": "Basic eA=="}) as response:
            assert response.status == 200
        async with http.get("/v1/stats", headers={"Authorization": "Basic eA=="}) as response:
            assert response.status == 401


async def test_without_a_table_a_foreign_page_is_refused_and_with_one_a_token_is_enough() -> None:
    for access, status in (
        (Access(), 403),
        (Access((Credential("a", "default", auth.ADMIN, auth.token_digest("t")),)), 200),
    ):
        daemon = FakeDaemon()
        daemon.access = access
        door = HttpDoor(daemon)
        await door.start()
        token = {"Authorization": "Bearer t"} if access.required else {}
        async with aiohttp.ClientSession(door.url, headers=token) as http:
            for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}):
                async with http.get("/v1/stats", headers=headers) as response:
                    assert response.status == status
            async with http.get("/v1/stats", headers={"Origin": door.url}) as response:
                assert response.status == 200
        await door.stop()
