"""Text to tokens and back, and chats to text, as the model's own files say.

Covers tokenizer.json (through `tokenizers`), the byte-level BPE in a GGUF file's metadata, and chat templates in jinja2's
sandbox. Always true: one tokenizer serves many threads, since nothing in it changes after it was made.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from forebay.engine.model_errors import DamagedModel, NoChatTemplate, TokenizerMissing, UnsupportedModel
from forebay.engine.weights import Weights
from forebay.engine.weights.folder import read_json
from forebay.engine.weights.gguf_file import GgufFile, Metadata


class BadChat(ValueError):
    """Messages that the model's chat template refuses."""


class Tokenizer:
    """special_tokens: the template's variables by name, "bos_token" and the like."""

    def __init__(
        self, backend: tokenizers.Tokenizer, chat_template: str | None, special_tokens: Mapping[str, str],
        eos_token_ids: tuple[int, ...],
    ) -> None:  # fmt: skip
        self._backend = backend
        self.chat_template = chat_template
        self.eos_token_ids = eos_token_ids
        self._special_tokens = dict(special_tokens)
        self._added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        bos = special_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else backend.token_to_id(bos)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """special: read special tokens' text as those tokens, as chats need it. Nothing is added in front."""
        backend = self._backend if special else self._plain
        return _ids(backend, text, add_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        """A plain prompt as the model expects it: special tokens are read, and its first token added if it has one."""
        return _ids(self._backend, text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text. Unknown ids (a vocabulary may be padded) add nothing."""
        if (added := self._added.get(token_id)) is not None:
            return added.content.encode()
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else bytes(_BYTE_OF[char] for char in token if char in _BYTE_OF)

    def check_template(self) -> None:
        """Raises: DamagedModel: there is a chat template, and it can't be read."""
        _ = self._template

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **more: Any,
    ) -> str:
        """Raises: NoChatTemplate; BadChat, which is the caller's mistake."""
        if self.chat_template is None:
            raise NoChatTemplate("the model comes without a chat template: send a plain prompt")
        try:
            text: str = self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt,
                **self._special_tokens, **more,
            )  # fmt: skip
            return text
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as exc:
            raise BadChat(f"the chat template refuses these messages: {exc}") from exc

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """`render_chat`, then tokens. Special tokens are the template's alone: their texts in messages are plain text, unless
        the template changes such a text. Raises: as `render_chat` does."""
        rendered = self.render_chat(messages, **options)
        nonce = secrets.token_hex(16)  # that no message can hold
        found: list[str] = []

        def mark(match: re.Match[str]) -> str:
            found.append(match[0])
            return f"\ue000{nonce}:{len(found) - 1}\ue001"

        marked = [
            {
                k: self._special_text.sub(mark, v) if k != "role" and isinstance(v, str) else v
                for k, v in message.items()
            }
            for message in messages
        ]
        if not found:
            return self.encode(rendered, special=True)
        parts = re.split(f"\ue000{nonce}:([0-9]+)\ue001", self.render_chat(marked, **options))
        parts[1::2] = (found[int(number)] for number in parts[1::2])
        if "".join(parts) != rendered:
            return self.encode(rendered, special=True)
        plain = {text: self.encode(text) for text in set(found)}
        between = self._backend.encode_batch_fast(parts[0::2], add_special_tokens=False)
        ids: list[int] = list(between[0].ids)
        for text, part in zip(parts[1::2], between[1:], strict=True):
            ids += plain[text]
            ids += part.ids
        return ids

    @cached_property
    def _special_text(self) -> re.Pattern[str]:
        texts = sorted((self._added[i].content for i in self.special_ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A second backend, since whether special text is read is a property of the object."""
        plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _template(self) -> Any:
        try:
            return _environment().from_string(self.chat_template or "")
        except (TemplateError, RecursionError) as exc:
            raise DamagedModel(f"the model's chat template can't be read: {exc}") from exc


def _ids(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    # As a batch of one, since only batches leave other threads running, which for a long text may be seconds.
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def load_tokenizer(path: Path, weights: Weights) -> Tokenizer:
    """Raises: TokenizerMissing, UnsupportedModel, DamagedModel."""
    if isinstance(weights, GgufFile):
        try:
            return _from_gguf(weights.metadata, weights.config.eos_token_ids)
        except (TokenizerMissing, UnsupportedModel, DamagedModel):
            raise
        except Exception as exc:  # the library raises no narrower type
            raise DamagedModel(f"{path} holds a vocabulary that can't be read: {exc}") from exc
    return _from_folder(path, weights.config.eos_token_ids)


def _from_folder(path: Path, eos: tuple[int, ...]) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise TokenizerMissing(f"{path} holds no tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as exc:  # the library raises no narrower type
        raise DamagedModel(f"{file} can't be read: {exc}") from exc
    if "ByteLevel" not in json.loads(backend.to_str())["decoder"].values():
        raise UnsupportedModel("tokenizer", f"{file} is no byte-level BPE")
    config = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    if backend.normalizer is None and str(config.get("tokenizer_class", "")).startswith("Qwen2Tokenizer"):
        backend.normalizer = normalizers.NFC()  # that class brings it along, and folders made from GGUF don't say so
    special = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        if (text := value.get("content") if isinstance(value, dict) else value) is not None:
            special[name] = text
    template = path / "chat_template.jinja"
    return Tokenizer(
        backend, template.read_text() if template.is_file() else _template_of(config.get("chat_template")), special, eos
    )


def _template_of(entry: Any) -> str | None:
    """A template, or several by name, of which "default" is the one for chats."""
    if isinstance(entry, list):
        entry = {one.get("name"): one.get("template") for one in entry}.get("default")
    return entry if isinstance(entry, str) else None


# Pre-tokenizers by GGUF's names for them: how text is split before BPE. They differ in how many digits stay together.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"qwen2": _SPLIT.replace("DIGITS", ""), "llama-bpe": _SPLIT.replace("DIGITS", "{1,3}")}
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


def _from_gguf(metadata: Metadata, eos: tuple[int, ...]) -> Tokenizer:
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind is None:
        raise TokenizerMissing("the GGUF file has no tokenizer.ggml.model")
    if kind != "gpt2" or split not in _SPLITS:
        raise UnsupportedModel("tokenizer", f"tokenizer {kind!r} with pre-tokenizer {split!r} isn't supported")
    tokens: list[str] = metadata.need("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.need("tokenizer.ggml.merges")]
    kinds: Iterable[int] = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    added = [(i, kind) for i, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)]
    # Llama 3 takes a word that is in the vocabulary whole, whatever the merges say.
    bpe: Any = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=split == "llama-bpe"
    )
    backend = tokenizers.Tokenizer(bpe)
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLITS[split]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(tokens[i], special=kind == _CONTROL, normalized=False) for i, kind in added])
    special = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            special[name] = tokens[token_id]
    if metadata.get("tokenizer.ggml.add_bos_token", split == "llama-bpe") and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return Tokenizer(backend, metadata.get("tokenizer.chat_template"), special, eos)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte: itself where it prints, else the next free code point from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers sets it up, so that a template renders the same text."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
