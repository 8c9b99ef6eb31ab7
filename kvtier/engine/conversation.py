"""A conversation as the model is shown it: nothing that a client sends is dropped by a template without a word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.engine.protocol import ChatMessage, ParameterError
from kvtier.engine.tokenizer import Message, Tokenizer
from kvtier.errors import RequestError


def rendered(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, object]] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt that the checkpoint's chat template makes of a conversation; takes as long as the template does.

    Whether the template shows tools, calls of them and their answers is found by rendering without them: a template that
    gives the same text then ignores them. Raises `RequestError` for that, and for what the template itself refuses.
    """

    def render(turns: Sequence[Message], tools: Sequence[Mapping[str, object]] | None) -> str | None:
        try:
            return tokenizer.apply_chat_template(turns, add_generation_prompt, tools or None)
        except RequestError:
            return None

    turns = [message.plain() for message in messages]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt, tools or None)
    if tools and render(turns, None) == text:
        raise ParameterError("this model's chat template shows it no tools: they would be ignored", "tools")
    uncalled = [{name: value for name, value in turn.items() if name != "tool_calls"} for turn in turns]
    if uncalled != turns and render(uncalled, tools) == text:
        raise ParameterError("messages: this model's chat template does not show it tool_calls", "messages")
    unanswered = [turn for turn in turns if turn["role"] != "tool"]
    if unanswered != turns and render(unanswered, tools) == text:
        raise ParameterError("messages: this model's chat template does not show it what tools answer", "messages")
    return text
