"""Text to tokens and back, streamed or whole, and chat templates."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kvtier.engine.checkpoint import open_checkpoint
from kvtier.engine.tokenizer import Tokenizer, TokenizerSource, Vocabulary
from kvtier.errors import ModelError, RequestError

from .conftest import RealModel
from .tiny import CONTROL, TEMPLATE, byte_tokenizer, make_tiny_checkpoint

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  \n\n\t",
    "naïve café – Größe, Ångström, e\u0301 combining",
    "日本語のテキスト、한국어, العربية, עברית",
    "👩‍👩‍👧‍👦 🇩🇪 🤗🤗",
    "def f(x):\n    return x**2  # 12345.678\r\n",
    "\u0000\u0001\ufffd\u2028",
]


@pytest.fixture
def tiny(tmp_path: Path) -> Tokenizer:
    return open_checkpoint(str(make_tiny_checkpoint(tmp_path / "tiny"))).tokenizer()


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(tiny: Tokenizer, text: str) -> None:
    assert tiny.decode(tiny.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_whole_text_and_never_half_a_character(tiny: Tokenizer, text: str) -> None:
    stream = tiny.detokenizer()
    pieces = [stream.push(token) for token in tiny.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_streaming_agrees_with_decoding_on_arbitrary_tokens(tiny: Tokenizer, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        tokens = [chance.randrange(320) for _ in range(60)]
        stream = tiny.detokenizer()
        assert "".join(map(stream.push, tokens)) + stream.finish() == tiny.decode(tokens)


def test_an_unfinished_character_at_the_end_shows_as_such(tiny: Tokenizer) -> None:
    stream = tiny.detokenizer()
    assert [stream.push(token) for token in tiny.encode("a€")[:-1]] == ["a", "", ""]
    assert stream.finish() == "\ufffd"


def test_control_tokens_are_recognised_in_text_and_left_out_of_it(tiny: Tokenizer) -> None:
    tokens = tiny.encode("<|im_start|>hi<|im_end|>")
    assert tokens[0] == 1
    assert tiny.decode(tokens) == "hi"
    assert tiny.decode(tokens, skip_special=False) == "<|im_start|>hi<|im_end|>"
    assert tiny.special_ids == {0, 1, 2}


def test_ids_outside_the_vocabulary_decode_to_nothing(tiny: Tokenizer) -> None:
    assert tiny.decode([-1, 319, 1 << 40, *tiny.encode("x")]) == "x"


def test_lone_surrogates_are_refused(tiny: Tokenizer) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        tiny.encode("a\ud800b")


def test_the_template_makes_the_prompt(tiny: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert tiny.apply_chat_template(messages) == head + "<|im_start|>assistant\n"
    assert tiny.apply_chat_template(messages, add_generation_prompt=False) == head


def with_template(template: str | None) -> Tokenizer:
    return Tokenizer(TokenizerSource(byte_tokenizer().to_str(), template, {"bos_token": CONTROL[0]}))


def test_templates_are_sandboxed() -> None:
    """A template comes from a downloaded file: it must not reach Python's insides."""
    hostile = with_template("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RequestError, match="template"):
        hostile.apply_chat_template([{"role": "user", "content": "x"}])
    with pytest.raises(RequestError, match="template"):
        with_template("{{ messages.append(1) }}").apply_chat_template([])


def test_templates_have_the_functions_that_transformers_gives_them() -> None:
    template = with_template(
        "{{ bos_token }}{{ tools | tojson }}{% for m in messages %}{% if m.role == 'odd' %}{{ raise_exception('no odd roles') }}"
        "{% endif %}{% continue %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    assert template.apply_chat_template([{"role": "user"}], tools=[{"ü": 1}]) == CONTROL[0] + '[{"ü": 1}]4'
    with pytest.raises(RequestError, match="no odd roles"):
        template.apply_chat_template([{"role": "odd"}], tools=[])


def test_messages_that_do_not_fit_the_template_are_the_requests_fault(tiny: Tokenizer) -> None:
    with pytest.raises(RequestError, match="template"):
        tiny.apply_chat_template([{"role": "user", "content": None}])


def test_no_template_and_a_broken_one() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        with_template(None).apply_chat_template([])
    with pytest.raises(ModelError, match="template"):
        with_template("{% for %}")


def test_sentencepiece_style_vocabularies_decode_bytes_and_spaces() -> None:
    vocab = {"<unk>": 0, "<0xE2>": 1, "<0x82>": 2, "<0xAC>": 3, "▁costs": 4, "▁5": 5, "▁": 6}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<unk>", special=True)])
    tokenizer = Tokenizer(TokenizerSource(backend.to_str()))
    tokens = [4, 5, 6, 1, 2, 3]
    stream = tokenizer.detokenizer()
    assert tokenizer.decode(tokens) == backend.decode(tokens) == "costs 5 €"
    assert [stream.push(token) for token in tokens] == ["costs", " 5", " ", "", "", "€"]


def test_unknown_decoders_and_pre_tokenizers_are_refused_by_name() -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(TokenizerSource(backend.to_str()))
    with pytest.raises(ModelError, match="tekken"):
        Tokenizer(TokenizerSource(Vocabulary("tekken", ("a",), (), frozenset())))
    with pytest.raises(ModelError, match="merges"):
        Tokenizer(TokenizerSource(Vocabulary("gpt-2", ("a", "b"), ("ab",), frozenset())))
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(TokenizerSource("{}"))


def test_a_gguf_vocabulary_may_want_bos_in_front() -> None:
    tokenizer = Tokenizer(
        TokenizerSource(Vocabulary("llama-bpe", ("<s>", "a", "b"), (), frozenset({0}), prefix=(0,)), TEMPLATE)
    )
    assert tokenizer.encode("ab") == [0, 1, 2]
    assert tokenizer.encode("ab", add_special=False) == [1, 2]


@pytest.mark.model
@pytest.mark.parametrize("text", [t for t in TEXTS if "\u2028" not in t])
def test_smollm2_round_trip(smollm2: RealModel, text: str) -> None:
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text


@pytest.mark.model
def test_smollm2_tokens_are_those_of_the_published_tokenizer(smollm2: RealModel, prose: str) -> None:
    """SmolLM2's tokenizer.json has Digits(individual) then ByteLevel with GPT-2's pattern; here it is built with those parts."""
    tokenizer = smollm2.tokenizer
    source = smollm2.checkpoint.tokenizer_source
    assert source is not None
    vocabulary = source.vocabulary
    assert isinstance(vocabulary, Vocabulary)
    published = Backend(
        models.BPE(
            vocab={token: i for i, token in enumerate(vocabulary.tokens)},
            merges=[(a, b) for a, _, b in (merge.partition(" ") for merge in vocabulary.merges)],
        )
    )
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    for text in (prose[:40_000], *TEXTS, "1234 ½ x² ١٢٣"):
        assert tokenizer.encode(text) == published.encode(text).ids
    assert [tokenizer.decode([i]) for i in tokenizer.encode("2024")] == ["2", "0", "2", "4"]
    assert tokenizer.encode("<|im_start|>user")[0] == 1
    # The ids that the published tokenizer gives.
    assert tokenizer.encode("Hello, world!") == [19556, 28, 905, 17]


@pytest.mark.model
def test_smollm2_chat_prompt(smollm2: RealModel) -> None:
    prompt = smollm2.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
