"""The bytes of an object: header, then payload, the same in a RAM slot and in every tier below.

Covers the layout that follows from a namespace, writing and checking headers, part checksums. Moves no payload. Always
true: a header names its key, parent, namespace, position and every token, so an object in the wrong place is noticed
without trusting the place; nothing past the fixed layout is ever read from lengths found in stored bytes.

Header, little-endian: the 96 bytes of HEADER_DTYPE; token ids, u32 each; zeros to a multiple of 8; part checksums,
XXH3-64 as u64 each; zeros to a multiple of 64. `header_xxh3` is XXH3-64 of the whole header with that field zero (1
where that would be 0); it stays 0 while the object lives in RAM only and is sealed in before it leaves.

Payload: parts, head group major, then layer range; inside [head_group][layer][2][token][head][dim], or
[layer][token][latent] for latents.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from forebay.kvstore.identity import NamespaceFacts
from forebay.kvstore.keys import KEY_BYTES, TokenIds, token_words
from forebay.kvstore.tier import Buffer, WritableBuffer

MAGIC = b"FBO1"
VERSION = 1

# Every field lies on a multiple of its size, and keys are two words, so that many headers can be compared at once as
# u64 words of shared memory.
HEADER_DTYPE = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("group", "<u2"),
        ("part_count", "<u4"),
        ("token_count", "<u4"),
        ("key", "<u8", (2,)),
        ("parent", "<u8", (2,)),
        ("namespace", "<u8", (2,)),
        ("position", "<u8"),
        ("created_ns", "<u8"),
        ("encryption_key_id", "<u8"),
        ("header_xxh3", "<u8"),
    ]
)
"""The fixed first 96 bytes of a header. `key`, `parent` and `namespace` are their 16 bytes seen as two words."""

PREFIX_BYTES = 16
"""The first 16 bytes (magic to token_count) are the same in all objects of a layout: `ObjectLayout.prefix`."""

KEY_OFFSET, PARENT_OFFSET, NAMESPACE_OFFSET, POSITION_OFFSET = 16, 32, 48, 64
CREATED_OFFSET, ENCRYPTION_OFFSET, XXH3_OFFSET, TOKENS_OFFSET = 72, 80, 88, 96

_FIXED = struct.Struct("<4sHHII16s16s16sQQQQ")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Header:
    """A header read back. Token ids are a user's text: they stay out of the repr, and so out of logs."""

    group: int
    key: bytes
    parent: bytes
    namespace: bytes
    position: int
    created_ns: int
    encryption_key_id: int
    header_xxh3: int
    token_ids: tuple[int, ...] = field(repr=False)
    checksums: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True)
class ObjectLayout:
    """Sizes and offsets of the objects of one group of a namespace, in bytes.

    part_bytes: size of each part in payload order. All else follows from the fields that `__init__` takes.
    """

    group: int
    block_tokens: int
    part_bytes: tuple[int, ...]

    header_bytes: int = field(init=False)
    payload_bytes: int = field(init=False)
    object_bytes: int = field(init=False)
    part_ranges: tuple[tuple[int, int], ...] = field(init=False, repr=False)
    tokens_offset: int = field(init=False, default=TOKENS_OFFSET)
    checksums_offset: int = field(init=False)
    prefix: bytes = field(init=False, repr=False)
    _struct: struct.Struct = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = len(self.part_bytes)
        tokens_end = TOKENS_OFFSET + 4 * self.block_tokens
        checksums_offset = _round_up(tokens_end, 8)
        checksums_end = checksums_offset + 8 * parts
        header_bytes = _round_up(checksums_end, 64)
        ends = list(accumulate(self.part_bytes, initial=0))
        derived = {
            "header_bytes": header_bytes,
            "payload_bytes": ends[-1],
            "object_bytes": header_bytes + ends[-1],
            "part_ranges": tuple(pairwise(ends)),
            "checksums_offset": checksums_offset,
            "prefix": struct.pack("<4sHHII", MAGIC, VERSION, self.group, parts, self.block_tokens),
            # The whole header in one pack: pad bytes are written as zeros.
            "_struct": struct.Struct(
                f"<16s16s16s16sQQQQ{4 * self.block_tokens}s{checksums_offset - tokens_end}x"
                f"{parts}Q{header_bytes - checksums_end}x"
            ),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, facts: NamespaceFacts, group: int = 0) -> ObjectLayout:
        """The layout of the group with this index in `facts.groups`. Raises: ValueError if there is none."""
        if not 0 <= group < len(facts.groups):
            raise ValueError(f"no group {group}: the namespace declares {len(facts.groups)}")
        return cls(group, facts.block_tokens, facts.part_bytes(group))

    def write_header(
        self,
        view: WritableBuffer,
        *,
        key: bytes,
        parent: bytes | None,
        namespace: bytes,
        position: int,
        token_ids: TokenIds | bytes,
        checksums: Sequence[int],
        created_ns: int,
    ) -> None:
        """Write an unsealed header at the start of `view`.

        Args:
            view: at least header_bytes.
            parent: key of the block before; None for the first block, whose parent is the namespace id.
            position: tokens before this block.
            token_ids: block_tokens of them, or the same already as u32le bytes (the fast way: slice them from one
                `token_words(...).tobytes()` for the whole run).
            checksums: as from `part_checksums`.
            created_ns: nanoseconds since the Unix epoch.
        Raises:
            ValueError: a length or range does not fit; the header area of `view` is then undefined.
        Cost: 1 to 2 us when token_ids are bytes.
        """
        tokens = token_ids if isinstance(token_ids, bytes) else token_words(token_ids).tobytes()
        if parent is None:
            parent = namespace
        # struct cuts and pads byte strings without a sound, so lengths are checked here.
        if len(key) != KEY_BYTES or len(parent) != KEY_BYTES or len(namespace) != KEY_BYTES:
            raise ValueError(f"key, parent and namespace must be {KEY_BYTES} bytes each")
        if len(tokens) != 4 * self.block_tokens:
            raise ValueError(f"a block has {self.block_tokens} tokens, not {len(tokens) / 4:g}")
        try:
            self._struct.pack_into(
                view, 0, self.prefix, key, parent, namespace, position, created_ns, 0, 0, tokens, *checksums
            )
        except struct.error as exc:
            raise ValueError(f"header for a layout of {len(self.part_bytes)} parts: {exc}") from exc

    def write_headers(
        self,
        out: npt.NDArray[np.uint8],
        *,
        keys: Sequence[bytes],
        parent: bytes | None,
        namespace: bytes,
        position: int,
        token_ids: TokenIds,
        checksums: npt.NDArray[np.uint64],
        created_ns: int,
    ) -> None:
        """Write unsealed headers of a run of blocks, each the parent of the next, in a few array operations.

        Args:
            out: [blocks, header_bytes], uint8, rows contiguous in themselves; written in place.
            parent, position: of the first block, as for `write_header`.
            token_ids: [blocks * block_tokens].
            checksums: [blocks, parts].
        Raises:
            ValueError: shapes, types or lengths disagree; nothing is written.
        """
        count, parts = len(keys), len(self.part_bytes)
        run = [namespace if parent is None else parent, *keys]
        words = token_words(token_ids)
        if len(namespace) != KEY_BYTES or any(len(key) != KEY_BYTES for key in run):
            raise ValueError(f"keys, parent and namespace must be {KEY_BYTES} bytes each")
        if out.shape != (count, self.header_bytes) or out.dtype != np.uint8:
            raise ValueError(f"out must be uint8 of shape {(count, self.header_bytes)}, not {out.dtype} {out.shape}")
        if len(words) != count * self.block_tokens:
            raise ValueError(f"{count} blocks have {count * self.block_tokens} tokens, not {len(words)}")
        if checksums.shape != (count, parts) or checksums.dtype != np.uint64:
            raise ValueError(
                f"checksums must be uint64 of shape {(count, parts)}, not {checksums.dtype} {checksums.shape}"
            )
        if position < 0 or created_ns < 0:
            raise ValueError(f"position and created_ns must not be negative: {position}, {created_ns}")
        chain = np.frombuffer(b"".join(run), dtype="<u8").reshape(count + 1, 2)
        fixed = np.zeros(count, HEADER_DTYPE)
        fixed["key"], fixed["parent"] = chain[1:], chain[:-1]
        fixed["namespace"] = np.frombuffer(namespace, dtype="<u8")
        fixed["position"] = position + self.block_tokens * np.arange(count, dtype=np.uint64)
        fixed["created_ns"] = created_ns
        raw = fixed.view(np.uint8).reshape(count, TOKENS_OFFSET)
        raw[:, :PREFIX_BYTES] = np.frombuffer(self.prefix, np.uint8)
        tokens_end, checksums_end = TOKENS_OFFSET + 4 * self.block_tokens, self.checksums_offset + 8 * parts
        out[:, :TOKENS_OFFSET] = raw
        out[:, TOKENS_OFFSET:tokens_end] = words.view(np.uint8).reshape(count, 4 * self.block_tokens)
        out[:, tokens_end : self.checksums_offset] = 0
        out[:, self.checksums_offset : checksums_end] = (
            np.ascontiguousarray(checksums, dtype="<u8").view(np.uint8).reshape(count, 8 * parts)
        )
        out[:, checksums_end:] = 0

    def read_header(self, view: Buffer) -> Header:
        """The header at the start of `view`. Checks its form only; `verify_object` checks the rest.

        Raises: ValueError if this is no header of this layout.
        """
        if len(view) < self.header_bytes:
            raise ValueError(f"a header has {self.header_bytes} bytes, not {len(view)}")
        if trouble := self._prefix_trouble(view):
            raise ValueError(f"no header of this layout: {trouble}")
        _, key, parent, namespace, position, created_ns, encryption, xxh3, tokens, *checksums = (
            self._struct.unpack_from(view)
        )
        return Header(
            group=self.group,
            key=key,
            parent=parent,
            namespace=namespace,
            position=position,
            created_ns=created_ns,
            encryption_key_id=encryption,
            header_xxh3=xxh3,
            token_ids=struct.unpack(f"<{self.block_tokens}I", tokens),
            checksums=tuple(checksums),
        )

    def part_checksums(self, payload: Buffer) -> list[int]:
        """XXH3-64 of each part. Raises: ValueError if `payload` is not payload_bytes long."""
        view = memoryview(payload).cast("B")
        if view.nbytes != self.payload_bytes:
            raise ValueError(f"a payload has {self.payload_bytes} bytes, not {view.nbytes}")
        return [xxhash.xxh3_64_intdigest(view[start:end]) for start, end in self.part_ranges]

    def seal_header(self, view: WritableBuffer) -> None:
        """Put the header's own checksum in. Idempotent. Done before an object leaves RAM."""
        _U64.pack_into(view, XXH3_OFFSET, self._header_xxh3(view))

    def verify_object(
        self,
        view: Buffer,
        *,
        key: bytes,
        namespace: bytes,
        token_ids: TokenIds | bytes | None = None,
        sealed: bool = False,
    ) -> str | None:
        """Check a whole object. None if it is good, else what is wrong, the first of:

        "size", "magic", "version", "layout" (group or counts), "key", "namespace", "encryption key", "tokens",
        "header checksum" (where sealed; with `sealed=True` an unsealed header is wrong too), "part 3 checksum".

        Args:
            view: exactly object_bytes.
            token_ids: compared if given, as ids or as u32le bytes.
        """
        if len(view) != self.object_bytes:
            return "size"
        trouble, checksums = self.check_header(view, key=key, namespace=namespace, token_ids=token_ids, sealed=sealed)
        if trouble:
            return trouble
        payload = memoryview(view)[self.header_bytes :]
        for index, ((start, end), checksum) in enumerate(zip(self.part_ranges, checksums, strict=True)):
            if xxhash.xxh3_64_intdigest(payload[start:end]) != checksum:
                return f"part {index} checksum"
        return None

    def check_header(
        self,
        view: Buffer,
        *,
        key: bytes,
        namespace: bytes,
        parent: bytes | None = None,
        token_ids: TokenIds | bytes | None = None,
        sealed: bool = False,
    ) -> tuple[str | None, Sequence[int]]:
        """Check the header at the start of `view`, at least header_bytes long, as `verify_object` does; "parent" if given.

        Returns: what is wrong, or None; and the checksum of each part.
        """
        if trouble := self._prefix_trouble(view):
            return trouble, ()
        _, found_key, found_parent, found_namespace, _, _, encryption, xxh3, tokens, *checksums = (
            self._struct.unpack_from(view)
        )
        if found_key != key:
            return "key", ()
        if found_namespace != namespace:
            return "namespace", ()
        if parent is not None and found_parent != parent:
            return "parent", ()
        if encryption:
            return "encryption key", ()  # reserved: these bytes are not readable as they are
        if token_ids is not None:
            expected = token_ids if isinstance(token_ids, bytes) else token_words(token_ids).tobytes()
            if tokens != expected:
                return "tokens", ()
        if (xxh3 or sealed) and xxh3 != self._header_xxh3(view):
            return "header checksum", ()
        return None, checksums

    def _prefix_trouble(self, view: Buffer) -> str | None:
        found = bytes(view[:PREFIX_BYTES])
        if found == self.prefix:
            return None
        if found[:4] != MAGIC:
            return "magic"
        return "version" if found[4:6] != self.prefix[4:6] else "layout"

    def _header_xxh3(self, view: Buffer) -> int:
        header = bytearray(view[: self.header_bytes])
        _U64.pack_into(header, XXH3_OFFSET, 0)
        return xxhash.xxh3_64_intdigest(header) or 1  # 0 means unsealed


def seal(view: WritableBuffer) -> None:
    """`seal_header` for a caller that has the object and not its layout: the header says how long it is."""
    group, parts, tokens = struct.unpack_from("<HII", view, 6)
    _header_layout(group, parts, tokens).seal_header(view)


@lru_cache(maxsize=256)
def _header_layout(group: int, parts: int, tokens: int) -> ObjectLayout:
    return ObjectLayout(group, tokens, (0,) * parts)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
