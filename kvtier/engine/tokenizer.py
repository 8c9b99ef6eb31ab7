"""Text to token ids and back, with the checkpoint's own vocabulary and chat template.

Decoding works on bytes: every token stands for some bytes, and text is their concatenation read as UTF-8. So the streaming
decoder and the whole-text decoder agree by construction, and neither cuts a character in half.
"""

from __future__ import annotations

import codecs
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as _Backend

from kvtier.errors import ModelError, RequestError

Message = Mapping[str, object]
"""One chat message: ``role``, ``content``, and whatever else the template reads."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A byte-level BPE vocabulary as GGUF files carry it."""

    pre: str
    """Name of the pre-tokenizer (``smollm``, ``llama-bpe``, ``gpt-2``, ...)."""
    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    """Pairs in rank order, each ``left right``."""
    special: frozenset[int]
    """Ids of control tokens: matched as a whole in text, left out of decoded text."""
    added: frozenset[int] = frozenset()
    """Ids of user-defined tokens: matched as a whole and decoded as they are."""
    prefix: tuple[int, ...] = ()
    """Ids that ``add_special`` puts in front."""


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """What a tokenizer is built from."""

    vocabulary: str | Vocabulary
    """The text of a ``tokenizer.json``, or a GGUF's vocabulary."""
    chat_template: str | None = None
    special: Mapping[str, str] = field(default_factory=dict)
    """``bos_token``, ``eos_token``, ... as chat templates may name them."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
"""As Llama 3, but every digit is a word of its own."""


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that llama.cpp knows by ``name`` (``llama-vocab.cpp``)."""
    if name == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), _split(_GPT2)]
    elif name in ("gpt-2", "default"):
        steps = [_split(_GPT2)]
    elif name in ("llama-bpe", "llama3", "llama-v3"):
        steps = [_split(_LLAMA3)]
    elif name == "qwen2":
        steps = [_split(_QWEN2)]
    else:
        raise ModelError(f"the GGUF pre-tokenizer {name!r} is not supported; use the model's safetensors directory")
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _from_vocabulary(vocabulary: Vocabulary) -> _Backend:
    merges = [(left, right) for left, space, right in (merge.partition(" ") for merge in vocabulary.merges) if space]
    if len(merges) != len(vocabulary.merges):
        raise ModelError("the GGUF's merges are malformed; download the model again")
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    try:
        backend = _Backend(models.BPE(vocab=ids, merges=merges, fuse_unk=False))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"the GGUF's vocabulary is malformed ({error}); download the model again") from error
    backend.pre_tokenizer = _pre_tokenizer(vocabulary.pre)
    backend.decoder = decoders.ByteLevel()
    whole = sorted(vocabulary.special | vocabulary.added)
    backend.add_tokens(
        [AddedToken(vocabulary.tokens[i], special=i in vocabulary.special, normalized=False) for i in whole]
    )
    return backend


class Tokenizer:
    """One checkpoint's tokenizer. Safe to share between threads: every call leaves it as it was."""

    def __init__(self, source: TokenizerSource) -> None:
        """Raises `ModelError` for a vocabulary that cannot be read or decoded."""
        if isinstance(source.vocabulary, Vocabulary):
            self._backend = _from_vocabulary(source.vocabulary)
            self._prefix = source.vocabulary.prefix
        else:
            try:
                self._backend = _Backend.from_str(source.vocabulary)
            except Exception as error:  # the library raises bare Exception
                raise ModelError(f"tokenizer.json cannot be read ({error}); download the model again") from error
            self._backend.no_truncation()
            self._backend.no_padding()
            self._prefix = ()
        self._alphabet = _alphabet(self._backend)
        added = self._backend.get_added_tokens_decoder()
        self._added = {index: token.content.encode() for index, token in added.items()}
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        """Ids of control tokens, which decoded text leaves out."""
        self._special = dict(source.special)
        self._template = None if source.chat_template is None else _compiled(source.chat_template)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of ``text``; ``add_special`` adds what the model expects around a text (usually BOS, or nothing).

        Special tokens spelled out in the text are recognised. Text that UTF-8 cannot hold raises `RequestError`.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode: {error.reason} at {error.start}") from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special).ids
        return [*self._prefix, *ids] if add_special and self._prefix else ids

    def token_bytes(self, token: int, skip_special: bool = True) -> bytes:
        """The bytes a token stands for; nothing for ids outside the vocabulary and, by default, for control tokens."""
        if token in self._added:
            return b"" if skip_special and token in self.special_ids else self._added[token]
        text = self._backend.id_to_token(token) if 0 <= token < 1 << 32 else None
        return b"" if text is None else self._alphabet.encode(text)

    def token_text(self, token: int) -> str:
        """A token by itself, for a person: bytes that are no text as ``bytes:\\xe2\\x80``, one without any as ``token_id:5``."""
        raw = self.token_bytes(token, skip_special=False)
        if not raw:
            return f"token_id:{token}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def decode(self, tokens: Iterable[int], skip_special: bool = True) -> str:
        """The text of ``tokens``; bytes that are no UTF-8 become U+FFFD."""
        joined = b"".join(self.token_bytes(token, skip_special) for token in tokens)
        return self._alphabet.begin(joined).decode("utf-8", errors="replace")

    def detokenizer(self) -> Detokenizer:
        """A fresh streaming decoder."""
        return Detokenizer(self)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **extra: object,
    ) -> str:
        """The prompt that the checkpoint's template makes of a conversation; ``extra`` reaches the template as it is.

        Whether ``tools`` are in it is the template's business.

        Encode it with ``add_special=False``. Raises `RequestError` where there is no template or it refuses the messages.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; use plain completions")
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **{**self._special, **extra},
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error


class Detokenizer:
    """Text from tokens as they come. Feeding tokens one by one gives, joined, what `Tokenizer.decode` gives at once.

    A character whose bytes are spread over several tokens appears with its last byte. Constant work per token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._begun = False

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is unfinished."""
        piece = self._tokenizer.token_bytes(token)
        if piece and not self._begun:
            self._begun = True
            piece = self._tokenizer._alphabet.begin(piece)
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """What is left at the end of the stream: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)


class _ByteLevel:
    """GPT-2's alphabet: every byte is one printable character."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in set(printable)]
        self._bytes = {chr(byte): byte for byte in printable}
        self._bytes.update({chr(256 + index): byte for index, byte in enumerate(others)})

    def encode(self, token: str) -> bytes:
        try:
            return bytes([self._bytes[character] for character in token])
        except KeyError:
            return token.encode()

    def begin(self, text: bytes) -> bytes:
        return text


class _Metaspace:
    """SentencePiece's alphabet: U+2581 for a space, ``<0xNN>`` for a byte; the text's first space is not part of it."""

    def encode(self, token: str) -> bytes:
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def begin(self, text: bytes) -> bytes:
        return text.removeprefix(b" ")


def _alphabet(backend: _Backend) -> _ByteLevel | _Metaspace:
    """How the backend's tokens spell bytes. Raises `ModelError` for a decoder of another kind."""
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    kinds = {step.get("type") for step in decoder.get("decoders", [decoder])}
    if kinds == {"ByteLevel"}:
        return _ByteLevel()
    if kinds in ({"Metaspace"}, {"Replace", "ByteFallback", "Fuse", "Strip"}):
        return _Metaspace()
    raise ModelError(
        f"a tokenizer whose decoder is {sorted(map(str, kinds))} is not supported (ByteLevel and Metaspace are)"
    )


def _compiled(template: str) -> jinja2.Template:
    """A chat template in a sandbox, with the functions that ``transformers`` gives templates."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

    def refuse(message: str) -> str:
        raise jinja2.TemplateError(message)

    def to_json(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().astimezone().strftime(pattern)
    environment.filters["tojson"] = to_json
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ModelError(f"the checkpoint's chat template cannot be compiled: {error}") from error
