"""Settings: one typed model, filled from flags, then the environment, then a TOML file, then defaults.

Covers parsing, checking and the origin of each value. Opens nothing and starts nothing (daemon.py does). Always true:
a name that is not a setting is an error wherever it is written, since a misspelt limit is a limit that isn't there.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from forebay.kvstore.address import default_socket_path
from forebay.server.auth import DEFAULT_TENANT, PLAIN_NAME, Access, Credential, Right, read_tenant_secret

ENV_PREFIX = "FOREBAY_"
CONFIG_VARIABLE = "FOREBAY_CONFIG"
# Names under our prefix that other parts of the project read; everything else must be a setting.
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "FOREBAY_CACHE_DIR", "FOREBAY_TOKEN", "FOREBAY_TOKEN_FILE"})
OTHER_PREFIXES = ("FOREBAY_TEST_", "FOREBAY_BENCH_", "FOREBAY_ENGINE_")

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MAX_DEFAULT_RAM_BYTES = 8 * GIB

_UNITS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


class BadSettings(ValueError):
    """Settings that cannot be used. `problems` holds one line each: what is wrong and what to do about it."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def parse_bytes(value: object) -> int:
    """A size in bytes from an int or from text such as "64MiB", "1.5 GiB", "500 MB".

    Raises: ValueError that says what to write instead.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("is not a size: write bytes or a number with a unit, such as 8GiB or 500MB")
    number, unit = match[1], match[2].lower()
    if unit not in _UNITS:
        hint = f"{unit[0].upper()}iB (powers of 1024) or {unit[0].upper()}B (powers of 1000)"
        raise ValueError(
            f"has the unknown unit {match[2]!r}: write {hint if unit in 'kmgt' else 'KiB, MiB, GiB or TiB'}"
        )
    size = float(number) * _UNITS[unit] if "." in number else int(number) * _UNITS[unit]
    if size != int(size):
        raise ValueError("is not a whole number of bytes")
    return int(size)


def format_bytes(count: int) -> str:
    """The shortest exact text for a size that `parse_bytes` reads back."""
    for unit, size in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def _octal(value: object) -> object:
    if isinstance(value, str):
        try:
            value = int(value, 8)  # int() takes the 0o of TOML habits too
        except ValueError:
            raise ValueError("is not a file mode: write octal digits such as 0600") from None
    if isinstance(value, int) and not 0 <= value <= 0o777:  # a TOML file's 660 without quotes is decimal
        raise ValueError('is not a file mode: write octal digits such as 0600, in a TOML file as text: "0600"')
    return value


def _port(value: object) -> object:
    return -1 if isinstance(value, str) and value.strip().lower() in ("none", "off") else value


def _none_if_empty(value: object) -> object:
    return None if value == "" else value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _names(value: object) -> object:
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0, json_schema_extra={"kind": "bytes"})]
BytesOrZero = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0, json_schema_extra={"kind": "bytes"})]
FileMode = Annotated[int, BeforeValidator(_octal), Field(ge=0, le=0o777, json_schema_extra={"kind": "mode"})]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class DomainOptions(BaseModel):
    """What one trust domain may do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    read_only: bool = Field(
        default=False, description="its sessions map extents read-only and write through the socket"
    )


class TenantOptions(BaseModel):
    """What one tenant has. Its namespaces are named under the secret, so tenants can't find each other's blocks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    secret_file: Path | None = Field(default=None, description="file of mode 0600 with the key of its namespace ids")
    ram_bytes: Bytes | None = Field(default=None, description="most memory of the ram tier, in whole extents")
    uncommitted_bytes: Bytes | None = Field(default=None, description="most memory allocated and not yet committed")


class CredentialOptions(BaseModel):
    """What one token stands for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant: str = Field(description="the tenant it acts for")
    token_sha256: str = Field(
        pattern="^[0-9a-f]{64}$", description="digest of the token; `forebay token new` makes both"
    )
    rights: tuple[Right, ...] = Field(min_length=1, description="read, write, admin")


class Settings(BaseSettings):
    """Everything `forebay serve` can be told. Field order is the order of `forebay config` and docs/operations.md."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, validate_default=True
    )

    socket: Path = Field(default_factory=default_socket_path, description="Unix socket of the session door")
    socket_mode: FileMode = Field(default=0o600, description="file mode of the socket: who may connect")
    http_host: str = Field(
        default="127.0.0.1", description="address of the HTTP door; without credentials loopback only"
    )
    http_port: Annotated[int, BeforeValidator(_port)] = Field(
        default=7090, ge=-1, le=65535, description="port of the HTTP door; 0 takes a free one, off (-1) closes the door"
    )
    tcp_host: str = Field(
        default="127.0.0.1", description="address of the session door on TCP; others than loopback need tokens"
    )
    tcp_port: Annotated[int, BeforeValidator(_port)] = Field(
        default=-1,
        ge=-1,
        le=65535,
        description="port of the session door on TCP; 0 takes a free one, off (-1) closes the door",
    )
    tcp_tls_cert: Annotated[Path | None, BeforeValidator(_none_if_empty)] = Field(
        default=None, description="PEM file of the TCP door's certificate chain; with it the door is TLS"
    )
    tcp_tls_key: Annotated[Path | None, BeforeValidator(_none_if_empty)] = Field(
        default=None, description="PEM file of the certificate's private key"
    )
    tcp_handshake_s: Seconds = Field(
        default=5.0, gt=0, description="longest time from a TCP connection to its introduction; later it is dropped"
    )
    network_uid: Annotated[int | None, BeforeValidator(_none_if_empty)] = Field(
        default=None,
        ge=0,
        description="user whose trust domain those share who come over the network with a token; default the daemon's own",
    )
    extent_bytes: Bytes = Field(
        default=64 * MIB, description="step in which shared memory grows; a power of two of at least 1MiB"
    )
    ram_bytes: Bytes = Field(
        default_factory=lambda values: default_ram_bytes(values.get("extent_bytes", 64 * MIB)),
        description="most memory the ram tier may take; default a quarter of what this machine allows, at most 8GiB",
    )
    memory_reserve_bytes: BytesOrZero = Field(
        default=512 * MIB, description="memory left to others: the ram tier stops growing before it"
    )
    ssd_bytes: BytesOrZero = Field(
        default=20 * GIB, description="most disk the ssd tier may take, over all of ssd_dirs; 0 turns it off"
    )
    ssd_dirs: Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_names)] = Field(
        default_factory=lambda: (default_cache_path(),),
        min_length=1,
        description="directories of the ssd tier, best each on a disk of its own; default forebay in the user's cache folder",
    )
    ssd_reserve_bytes: BytesOrZero = Field(
        default=GIB, description="free disk space left to others: the ssd tier stops growing before it"
    )
    ssd_scrub_bytes_per_s: BytesOrZero = Field(
        default=8 * MIB, description="how fast each directory is read to find damage; 0 turns it off"
    )
    copy_bytes_per_s: Bytes = Field(
        default=256 * MIB, description="most that clean_ahead writes to the tiers below ram, a second, over all tenants"
    )
    tiers: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)] = Field(
        default=(), description="tiers below ram, fastest first, by their forebay.tiers entry point names"
    )
    tier_options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="keyword arguments for each tier named in tiers"
    )
    write_policy: Literal["clean_ahead", "write_through", "write_back"] = Field(
        default="clean_ahead", description="when objects are copied to the tiers below ram"
    )
    domains: dict[str, DomainOptions] = Field(
        default_factory=dict, description='options by trust domain, named "tenant/uid"; "*" means all others'
    )
    credentials: dict[str, CredentialOptions] = Field(
        default_factory=dict, description="tokens by label; with any here, every door asks for one"
    )
    tenants: dict[str, TenantOptions] = Field(
        default_factory=dict, description="tenants that credentials name: secrets and quotas"
    )
    unix_rights: Annotated[tuple[Right, ...], NoDecode, BeforeValidator(_names)] = Field(
        default=(), description="with credentials: rights of Unix sessions without a token, as tenant default"
    )
    max_sessions: int = Field(default=256, ge=1, description="sessions open at the same time")
    max_frame_bytes: Bytes = Field(default=64 * MIB, ge=64 * KIB, le=1 << 31, description="longest request frame")
    max_uncommitted_bytes_per_session: Bytes = Field(
        default=1 * GIB, description="memory a session may hold allocated and not yet committed"
    )
    max_leased_blocks_per_session: int = Field(
        default=262_144, ge=1, description="blocks a session may keep from eviction by leases"
    )
    max_quarantine_bytes: Bytes = Field(
        default_factory=lambda values: max(1, values.get("ram_bytes", 4 * GIB) // 4),
        description="memory of vanished writers and readers kept out of use; default a quarter of ram_bytes",
    )
    lease_deadline_s: Seconds = Field(
        default=60.0, gt=0, description="age at which a lease ends its session and its memory is quarantined"
    )
    busy_poll_us: int = Field(
        default=100, ge=0, le=10_000, description="microseconds to look for a next request before sleeping; 0 never"
    )
    nice: int = Field(
        default=-15,
        ge=-20,
        le=0,
        description="priority of the thread that serves engines, where it may be raised (CAP_SYS_NICE); 0 leaves it as it is",
    )
    drain_s: Seconds = Field(default=10.0, description="longest wait for running work on SIGTERM")
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = Field(
        default="info", description="least severe event that is logged"
    )
    log_format: Annotated[Literal["text", "json"], BeforeValidator(_lower)] = Field(
        default="text", description="readable lines, or one JSON object a line"
    )

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(cls, config_path: Path | str | None = None, **flags: object) -> Settings:
        """Settings from all sources. Flags that are None were not given.

        Args:
            config_path: the TOML file; None looks where `find_config` says.
        Raises:
            BadSettings: one line a problem, from all sources at once.
        """
        path = find_config() if config_path is None else Path(config_path)
        given = {name: value for name, value in flags.items() if value is not None}
        from_file = read_toml(path) if path is not None else {}
        problems = _unknown(given, cls.model_fields, spell=_flag)
        problems += _unknown(from_file, cls.model_fields, where=f"{path}: ")
        problems += _unknown(_environment(), cls.model_fields, spell=_variable)
        if problems:
            raise BadSettings(problems)
        origins = dict.fromkeys(from_file, str(path))
        origins |= {name: _variable(name) for name in _environment()}
        origins |= {name: _flag(name) for name in given}
        # The file's values go in below the environment: BaseSettings itself puts arguments above it.
        below = {name: value for name, value in from_file.items() if origins[name] == str(path)}
        try:
            settings = cls(**(below | given))
        except ValidationError as exc:
            # A default computed from a bad value is no news beside that value.
            errors = [error for error in exc.errors() if error["type"] != "default_factory_not_called"]
            raise BadSettings([_explain(error, origins) for error in errors]) from exc
        except SettingsError as exc:  # a variable that should hold JSON and doesn't
            name = re.search(r'field "(\w+)"', str(exc))
            where = _variable(name[1]) if name else str(exc)
            raise BadSettings([f"{where} is not JSON: write JSON, or put it into the TOML file"]) from exc
        settings._origins.update(origins)
        return settings

    def provenance(self) -> dict[str, str]:
        """Where each value came from: a flag, a variable's name, a file's path, or "default"."""
        return {name: self._origins.get(name, "default") for name in type(self).model_fields}

    def domain(self, tenant: str, uid: int | str) -> DomainOptions:
        """The options of the trust domain of `tenant` and `uid` ("net" for those who come over the network)."""
        return self.domains.get(f"{tenant}/{uid}") or self.domains.get("*") or DomainOptions()

    def tenant(self, name: str) -> TenantOptions:
        """The options of a tenant."""
        return self.tenants.get(name) or TenantOptions()

    def access(self) -> Access:
        """The credentials table.

        Raises: BadSettings: a secret can't be read, or others may read it.
        """
        secrets, problems = {}, []
        for name, options in self.tenants.items():
            if options.secret_file is not None:
                try:
                    secrets[name] = read_tenant_secret(options.secret_file)
                except ValueError as exc:
                    problems.append(f"tenants.{name}.secret_file: {exc}")
        if problems:
            raise BadSettings(problems)
        table = tuple(
            Credential(name, each.tenant, frozenset(each.rights), bytes.fromhex(each.token_sha256))
            for name, each in self.credentials.items()
        )
        return Access(table, secrets, frozenset(self.unix_rights))

    def shown(self) -> dict[str, str]:
        """Each value as text that a TOML file or a flag would take."""
        return {name: _show(name, getattr(self, name)) for name in type(self).model_fields}

    def as_toml(self) -> str:
        """A TOML file that gives these settings; those at their default stand in it as comments."""
        lines = []
        for name, field in type(self).model_fields.items():
            value = self.shown()[name] if _kind(name) else self.model_dump(mode="json", exclude_none=True).get(name, "")
            mark = "# " if self.provenance()[name] == "default" else ""
            lines += [f"# {field.description}", f"{mark}{name} = {_toml(value)}", ""]
        return "\n".join(lines[:-1]) + "\n"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # No .env files: a daemon must not change with the folder it was started in.
        return init_settings, env_settings

    @field_validator("extent_bytes")
    @classmethod
    def _extent_is_power_of_two(cls, size: int) -> int:
        if size < MIB or size & (size - 1):
            above = max(MIB, 1 << size.bit_length())
            raise ValueError(f"must be a power of two of at least 1MiB: write {format_bytes(above)}")
        return size

    @field_validator("socket")
    @classmethod
    def _socket_fits(cls, path: Path) -> Path:
        path = path.expanduser().absolute()
        if len(os.fsencode(path)) > 107:  # sun_path of unix(7), with its terminating zero
            raise ValueError(f"is {len(os.fsencode(path))} bytes long and Linux allows 107: choose a shorter path")
        return path

    @field_validator("ram_bytes")
    @classmethod
    def _ram_holds_an_extent(cls, size: int, info: ValidationInfo) -> int:
        extent = info.data.get("extent_bytes", MIB)
        if size < extent:
            raise ValueError(f"is less than one extent ({format_bytes(extent)}): raise it, or lower extent_bytes")
        return size

    @field_validator("ssd_dirs")
    @classmethod
    def _ssd_dirs_are_absolute(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        found = tuple(path.expanduser().absolute() for path in paths)
        if len(set(found)) != len(found):
            raise ValueError("names a directory twice: write each once")
        return found

    @field_validator("domains")
    @classmethod
    def _domains_are_named(cls, domains: dict[str, DomainOptions]) -> dict[str, DomainOptions]:
        for name in domains:
            if name != "*" and not re.fullmatch(r"[^/]+/(\d+|net)", name):
                raise ValueError(
                    f'names the domain {name!r}: write "tenant/uid", such as "default/1000", "tenant/net" or "*"'
                )
        return domains

    @field_validator("credentials", "tenants")
    @classmethod
    def _names_are_plain(cls, table: dict[str, Any]) -> dict[str, Any]:
        for name in table:
            if not PLAIN_NAME.fullmatch(name):
                raise ValueError(f"has the name {name!r}: use up to 64 letters, digits, _ and -")
        return table

    @model_validator(mode="after")
    def _network_doors_ask_for_tokens(self) -> Settings:
        # Invariant: every network door is authenticated or loopback-only.
        if not self.credentials and not is_loopback(self.http_host):
            raise ValueError(
                f"http_host = {self.http_host!r} is not a loopback address, and without credentials the HTTP door asks "
                "for none: write 127.0.0.1 or ::1, or add credentials (`forebay token new`)"
            )
        return self

    @model_validator(mode="after")
    def _tenants_are_declared(self) -> Settings:
        for name, credential in self.credentials.items():
            secret = self.tenant(credential.tenant).secret_file
            if credential.tenant != DEFAULT_TENANT and secret is None:
                raise ValueError(
                    f"credentials.{name} acts for tenant {credential.tenant!r}, which has no secret_file: add "
                    f"[tenants.{credential.tenant}] with one (`forebay token secret FILE` makes it)"
                )
        digests = [credential.token_sha256 for credential in self.credentials.values()]
        if len(set(digests)) < len(digests):
            raise ValueError(
                "two credentials have the same token_sha256: a token stands for one tenant and set of rights"
            )
        if self.unix_rights and not self.credentials:
            raise ValueError("unix_rights is set without credentials: then Unix sessions have all rights; remove it")
        return self

    @model_validator(mode="after")
    def _tcp_door_is_guarded(self) -> Settings:
        # Invariant: every network door is authenticated or loopback-only.
        if self.tcp_port != -1 and not self.credentials and not is_loopback(self.tcp_host):
            raise ValueError(
                f"tcp_host = {self.tcp_host!r} is not a loopback address, and without credentials the TCP door asks for "
                "none: write 127.0.0.1 or ::1, or add credentials (`forebay token new`)"
            )
        if (self.tcp_tls_cert is None) != (self.tcp_tls_key is None):
            missing = "tcp_tls_key" if self.tcp_tls_key is None else "tcp_tls_cert"
            raise ValueError(f"{missing} is not set: TLS needs both tcp_tls_cert and tcp_tls_key")
        return self

    @model_validator(mode="after")
    def _options_belong_to_tiers(self) -> Settings:
        for name in self.tier_options:
            if name not in self.tiers:
                raise ValueError(
                    f"tier_options.{name} is set, but tiers does not name {name!r}: add it, or remove this"
                )
        return self


def is_loopback(host: str) -> bool:
    """Whether an address or name is one of this machine alone, without asking DNS."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def find_config(environ: Mapping[str, str] | None = None, *, root: Path = Path("/")) -> Path | None:
    """The file that FOREBAY_CONFIG names, else forebay/config.toml below $XDG_CONFIG_HOME or ~/.config, else
    /etc/forebay/config.toml; None when there is none. Only one is read."""
    environ = os.environ if environ is None else environ
    if named := environ.get(CONFIG_VARIABLE):
        return Path(named)
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "/nonexistent"), ".config")
    for path in (Path(home) / "forebay" / "config.toml", root / "etc" / "forebay" / "config.toml"):
        if path.is_file():
            return path
    return None


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file. Raises: BadSettings when it cannot be read or parsed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise BadSettings(
            [f"{path}: cannot be read ({exc.strerror}): check the path in --config or {CONFIG_VARIABLE}"]
        ) from exc
    except ValueError as exc:  # tomllib.TOMLDecodeError, UnicodeDecodeError
        raise BadSettings([f"{path}: is not TOML: {exc}"]) from exc


def default_cache_path(environ: Mapping[str, str] | None = None) -> Path:
    """forebay below $XDG_CACHE_HOME or ~/.cache."""
    environ = os.environ if environ is None else environ
    home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "/nonexistent"), ".cache")
    return Path(home) / "forebay"


def default_ram_bytes(extent_bytes: int, allowed_bytes: int | None = None) -> int:
    """A quarter of what this machine allows, at most 8 GiB, in whole extents and at least one."""
    allowed = allowed_memory_bytes() if allowed_bytes is None else allowed_bytes
    return max(extent_bytes, min(allowed // 4, MAX_DEFAULT_RAM_BYTES) // extent_bytes * extent_bytes)


def allowed_memory_bytes(root: Path = Path("/")) -> int:
    """The least of MemTotal and the memory limits of this process's cgroup and of all cgroups above it (v1 and v2)."""
    total = re.search(r"MemTotal:\s+(\d+) kB", (root / "proc/meminfo").read_text())
    limits = [int(total[1]) * KIB] if total else []
    limits += _cgroup_limits(root)
    return min(limits) if limits else GIB  # 1 GiB: no /proc/meminfo to ask, so be modest


def _cgroup_limits(root: Path) -> Iterable[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's and not exist here; the mount itself then is the container's own.
        folder = mount / group.lstrip("/")
        for at in (folder, *folder.parents):
            try:
                text = (at / name).read_text().strip()
            except OSError:
                text = "max"
            if text.isdigit():
                yield int(text)
            if at == mount:
                break


_TABLES: Mapping[str, type[BaseModel]] = {
    "domains": DomainOptions,
    "tenants": TenantOptions,
    "credentials": CredentialOptions,
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _environment() -> dict[str, str]:
    """Setting-like variables: what follows FOREBAY_, in lower case, less empty ones and the names that others read."""
    return {
        name[len(ENV_PREFIX) :].lower(): value
        for name, value in ((name.upper(), value) for name, value in os.environ.items())
        if value and name.startswith(ENV_PREFIX) and name not in OTHER_VARIABLES and not name.startswith(OTHER_PREFIXES)
    }


def _unknown(
    given: Mapping[str, object], known: Iterable[str], *, where: str = "", spell: Callable[[str], str] = str
) -> list[str]:
    problems = []
    for name in given:
        if name in known:
            continue
        close = difflib.get_close_matches(name, list(known), n=1)
        advice = f"did you mean {spell(close[0])}?" if close else "`forebay config` lists all settings"
        problems.append(f"{where}{spell(name)} is not a setting: {advice}")
    return problems


def _explain(error: Any, origins: Mapping[str, str]) -> str:
    path = [str(part) for part in error["loc"]]
    message: str = error["msg"].removeprefix("Value error, ")
    if not path:
        return message
    name = ".".join(path)
    if error["type"] == "extra_forbidden":
        known = _TABLES[path[0]].model_fields if path[0] in _TABLES else {}
        close = difflib.get_close_matches(path[-1], list(known), n=1)
        advice = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
        return f"{name} is not a setting: {advice}"
    origin = origins.get(path[0], "default")
    if error["type"] != "value_error":
        message = f"cannot be used: {message[0].lower()}{message[1:]}"
    if path[0] == "credentials":  # a token may have got into the wrong line
        return f"{name} ({origin}) {message}"
    given = str(error["input"]) if isinstance(error["input"], Path) else error["input"]
    return f"{name} = {given!r} ({origin}) {message}"


def _kind(name: str) -> object:
    """How a setting is written where that isn't its plain value: "bytes", "mode" or None."""
    field = Settings.model_fields[name]
    extras = [field.json_schema_extra] + [getattr(part, "json_schema_extra", None) for part in field.metadata]
    return next((extra["kind"] for extra in extras if isinstance(extra, dict) and "kind" in extra), None)


def _show(name: str, value: Any) -> str:
    if _kind(name) == "bytes":
        return format_bytes(value)
    if _kind(name) == "mode":
        return f"{value:04o}"
    if name in ("http_port", "tcp_port") and value == -1:
        return "off"
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return _toml({key: _plain(part) for key, part in value.items()})
    return str(value)


def _plain(part: Any) -> Any:
    return part.model_dump(mode="json", exclude_none=True) if isinstance(part, BaseModel) else part


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # JSON's strings, numbers and booleans are TOML's; \x7f alone must be escaped in one and not in the other.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
