"""The OpenAI API as this server speaks it: what a body may say, and what it means for the engine.

A parameter that is not supported and would change the answer is refused by name; one that asks for what happens anyway
(``presence_penalty: 0``) is accepted; nothing is dropped silently.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field

from kvtier.abc.store import NO_HINTS, Hints, Selection
from kvtier.engine.sampler import MAX_LOGPROBS, SamplingParams
from kvtier.errors import RequestError
from kvtier.params import nearest

MAX_PROMPTS = 128
"""Prompts in one completions body."""
MAX_TOOLS = 128
MAX_MESSAGES = 1 << 14
MAX_FIELDS = 1 << 12
"""Of one object anywhere in a body: each that has no business there is an error of its own."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "top_logprobs": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""Parameters that are not supported, at least by one kind of request, with the values that ask for nothing."""

_WITHOUT_EFFECT = frozenset(
    {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
)
"""Parameters of the OpenAI service itself, none of which has a say in the tokens."""

B = TypeVar("B", bound="_Strict")
E = TypeVar("E")


class _FirstWrong(FailFast):
    __hash__ = object.__hash__  # unions want that of their members


_List = Annotated[list[E], _FirstWrong()]
"""A list of which the first wrong entry is enough: millions of errors, one per entry, would take gigabytes and minutes."""


class ParameterError(RequestError):
    """A request's fault that one parameter can be blamed for."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Padding against guessing lengths from traffic; there is none either way on loopback."""


class HintsBody(_Strict):
    """``kv_hints``: see `kvtier.abc.store.Hints`."""

    priority: int | None = None
    pin_seconds: float | None = None
    no_store: bool | None = None
    no_load: bool | None = None
    max_wait_ms: float | None = None
    store_generated: bool | None = None

    def hints(self) -> Hints:
        """Raises `RequestError` for values that mean nothing."""
        try:
            return Hints(**self.model_dump(exclude_none=True))
        except ValueError as wrong:
            raise ParameterError(f"kv_hints: {wrong}", "kv_hints") from None


class Body(_Strict):
    """What both kinds of request have in common."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | _List[str] | None = None
    stop_token_ids: _List[int] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    """Requests share cached blocks only where their salts are equal."""
    kv_hints: HintsBody | None = None

    def hints(self) -> Hints:
        return NO_HINTS if self.kv_hints is None else self.kv_hints.hints()

    @property
    def usage_in_stream(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def token_limit(self) -> int | None:
        return self.max_tokens

    def alternatives(self) -> int | None:
        """How many alternatives are reported with each token; None: no log probabilities at all."""
        return None

    def sampling(self) -> SamplingParams:
        """Raises `RequestError` for values that mean nothing."""
        if self.stream_options is not None and not self.stream:
            raise ParameterError("stream_options is only allowed with stream=true", "stream_options")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=_or(self.top_k, 0),
            seed=self.seed,
            max_tokens=self.token_limit(),
            min_tokens=_or(self.min_tokens, 0),
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            n=_or(self.n, 1),
            logprobs=self.alternatives(),
        )


def _few_prompts(prompt: object) -> object:
    """A prompt, or as many as are taken; counted before each is looked at."""
    if isinstance(prompt, list) and len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int):
        raise ParameterError(f"prompt has {len(prompt)} prompts; at most {MAX_PROMPTS} are taken", "prompt")
    return prompt


class CompletionBody(Body):
    """``POST /v1/completions``."""

    prompt: Annotated[str | _List[int] | _List[str] | _List[_List[int]], BeforeValidator(_few_prompts)]
    logprobs: int | Literal[False] | None = None

    def token_limit(self) -> int | None:
        return _or(self.max_tokens, 16)

    def alternatives(self) -> int | None:
        return None if self.logprobs is False else self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself, as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ParameterError("prompt is empty", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


def _function(one: dict[str, Any]) -> dict[str, Any]:
    """A tool, or a call of one, as it was sent: templates get it in the client's own order of fields."""
    function = one.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if one.get("type") != "function" or not isinstance(name, str) or not name:
        raise ValueError('wanted is {"type": "function", "function": {"name": ..., ...}}')
    return one


Function = Annotated[dict[str, Any], AfterValidator(_function)]
Tools = Annotated[_List[Function], Field(max_length=MAX_TOOLS)]


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object: clients send them as JSON in a text, templates want them read."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise ParameterError("messages: the arguments of a tool call are not a JSON object", "messages")
    return {**call, "function": {**function, "arguments": arguments}}


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | _List[TextPart] | None = None
    tool_calls: Tools | None = None
    """What an assistant's turn called."""
    tool_call_id: str | None = None
    """Which call a tool's turn answers."""
    name: str | None = None
    """Of the tool that answers."""

    @pydantic.model_validator(mode="after")
    def _fits_its_role(self) -> ChatMessage:
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("tool_calls belong to messages of the assistant")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("messages of a tool, and only they, have a tool_call_id")
        if self.name is not None and self.role != "tool":
            raise ValueError("name is only supported in messages of a tool")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        return self

    def plain(self) -> dict[str, object]:
        """As chat templates read it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        more: dict[str, object] = {"tool_call_id": self.tool_call_id, "name": self.name}
        if self.tool_calls:
            more["tool_calls"] = [_with_arguments(call) for call in self.tool_calls]
        return {"role": role, "content": text, **{key: value for key, value in more.items() if value is not None}}


Messages = Annotated[_List[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatBody(Body):
    """``POST /v1/chat/completions``."""

    messages: Messages
    tools: Tools | None = None
    tool_choice: Literal["none", "auto"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None

    @property
    def shown_tools(self) -> Tools | None:
        """The tools that the model is told of."""
        return None if self.tool_choice == "none" else self.tools

    def alternatives(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ParameterError("top_logprobs is only allowed with logprobs=true", "top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise ParameterError(
                f"top_logprobs must be from 0 to {MAX_LOGPROBS}, got {self.top_logprobs}", "top_logprobs"
            )
        return _or(self.top_logprobs, 0) if self.logprobs else None

    def token_limit(self) -> int | None:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ParameterError("max_tokens and max_completion_tokens contradict each other", "max_completion_tokens")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeBody(_Strict):
    """``POST /tokenize``, as vLLM has it: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    """Whether what the model expects around a text is added; by default for a text, and not for a conversation."""
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    def text(self) -> str | None:
        """None where it is a conversation. Raises `RequestError` where it is both, or neither."""
        if (self.prompt is None) == (self.messages is None):
            raise ParameterError("either prompt or messages is wanted", "prompt")
        if self.messages is None and self.tools:
            raise ParameterError("tools go with messages", "tools")
        return self.prompt


def parse(kind: type[B], raw: bytes) -> B:
    """Read a body. Raises `RequestError` naming the parameter that is wrong, unknown or unsupported."""
    body = _object(raw)
    for name in (_NEUTRAL.keys() & body.keys()) - kind.model_fields.keys():
        value = body.pop(name)
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in _NEUTRAL[name]):
            raise ParameterError(f"{name} is not supported by this server", name)
    for name in _WITHOUT_EFFECT & body.keys():
        del body[name]
    if isinstance(messages := body.get("messages"), list):
        body["messages"] = [_without_nulls(message) for message in messages]
    try:
        return kind.model_validate(body)
    except pydantic.ValidationError as error:
        raise _named(error, body) from None


def _object(raw: bytes) -> dict[str, Any]:
    """A body as JSON has it. Raises `RequestError`, also for a name that stands twice: one of the two would be dropped."""
    try:
        body = json.loads(raw, object_pairs_hook=_fields)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(pairs) > MAX_FIELDS:
        raise RequestError(f"an object of the body has {len(pairs)} fields; at most {MAX_FIELDS} are taken")
    if len(found) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ParameterError(f"{twice!r} stands twice in one object of the body", twice)
    return found


class _ClearBody(BaseModel):
    """``POST /admin/clear``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tenant: str | None = None
    """Tenant id, 32 hexadecimal digits: never the secret."""
    adapter: str | None = None
    tier: str | None = None


def parse_clear(raw: bytes) -> tuple[Selection, str | None]:
    """What a clear is about, and the tier that is to be emptied. Raises `RequestError`."""
    try:
        body = _ClearBody.model_validate(_object(raw))
        tenant = None if body.tenant is None else bytes.fromhex(body.tenant)
        what = Selection(body.model, tenant, body.adapter)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise RequestError(f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}") from None
    except ValueError as error:
        raise RequestError(f"tenant: {error}") from None
    if body.tier is not None and what != Selection():
        raise RequestError("tier empties a whole tier; it cannot be combined with model, tenant or adapter")
    return what, body.tier


def _without_nulls(message: object) -> object:
    """Clients send an answer back with every field that it came with, most of them null."""
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if value is not None}


def _named(error: pydantic.ValidationError, body: dict[str, Any]) -> ParameterError:
    first = error.errors(include_url=False, include_input=False)[0]
    path = [str(step) for step in first["loc"]]
    name = path[0] if path else ""
    if first["type"] == "extra_forbidden" and name == "kv_hints":
        hint = path[-1]
        return ParameterError(
            f"kv_hints: unknown hint {hint!r}{nearest(hint, [each.name for each in fields(Hints)])}", name
        )
    if first["type"] == "extra_forbidden":
        return ParameterError(f"{'.'.join(path)} is not supported by this server", name)
    if first["type"] == "missing" and name not in body:
        return ParameterError(f"{name} is missing", name)
    return ParameterError(f"{'.'.join(path)}: {first['msg']}", name)


V = TypeVar("V")


def _or(value: V | None, default: V) -> V:
    return default if value is None else value
