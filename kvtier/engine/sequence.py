"""One continuation of a request: its tokens, its block table, and how far both have come."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from kvtier.abc.store import Hints
from kvtier.engine.request import FinishReason, Request, RequestStats
from kvtier.engine.sampler import Draw, continuation_seed
from kvtier.engine.stop import StopMatcher
from kvtier.engine.tokenizer import Detokenizer, Tokenizer
from kvtier.key import Address, BlockKey, Origin, Shard, Span, address, chain_keys
from kvtier.pool import Slot

_SHARD = Shard()


@dataclass(slots=True, eq=False)
class Chain:
    """Keys of a growing token list: extended as blocks fill, never computed twice."""

    origin: Origin
    root: BlockKey
    block_tokens: int
    keys: list[BlockKey] = field(default_factory=list)
    addresses: list[Address] = field(default_factory=list)
    former: list[BlockKey] = field(default_factory=list)
    """Root, then keys, that the same tokens had under the epoch before; empty where nobody asks for them."""

    def extend(self, tokens: list[int]) -> None:
        """Name every full block of ``tokens`` that has no name yet."""
        start = len(self.keys)
        if len(tokens) // self.block_tokens == start:
            return
        parent = self.keys[-1] if self.keys else self.root
        added = chain_keys(parent, tokens[start * self.block_tokens :], self.block_tokens)
        self.keys += added
        self.addresses += [address(key, _SHARD) for key in added]
        if self.former:
            self.former += chain_keys(self.former[-1], tokens[start * self.block_tokens :], self.block_tokens)

    def span(self, start: int, stop: int) -> Span:
        parent = self.keys[start - 1] if start else self.root
        former = tuple(self.former[start + 1 : stop + 1])
        return Span(self.origin, parent, start, tuple(self.keys[start:stop]), former)

    def copy(self) -> Chain:
        copies = (self.keys.copy(), self.addresses.copy(), self.former.copy())
        return Chain(self.origin, self.root, self.block_tokens, *copies)


@dataclass(slots=True, eq=False)
class Group:
    """A request and its continuations."""

    request: Request
    stats: RequestStats
    seed: int
    unfinished: int = 1
    """Continuations that may still give something; those not forked yet are counted."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation. ``tokens`` are the prompt and what was generated; the first ``computed`` have their KV in ``slots``."""

    group: Group
    index: int
    """Which continuation of the request this is."""
    chain: Chain
    tokens: list[int]
    arrival: tuple[int, int]
    """Order of arrival; continuations of one request follow each other."""
    detokenizer: Detokenizer | None = None
    stops: StopMatcher = field(default_factory=lambda: StopMatcher(()))
    slots: list[Slot] = field(default_factory=list)
    """The block table: ``slots[i]`` holds tokens ``[i * block_tokens, (i + 1) * block_tokens)``."""
    computed: int = 0
    committed: int = 0
    """Leading blocks that the HBM pool has been told of."""
    offered: int = 0
    """Leading blocks that need not be offered for saving: found in HBM, loaded, or taken."""
    forks: int = 0
    """Continuations to split off at the first token."""
    tail_shared: bool = False
    """The partly filled last block may be another continuation's too: it is copied before it is written."""
    asked: float | None = None
    """Since when the connector has been answering "ask later"."""
    drawn: bool | None = None
    """Whether one block of its next load is to be recomputed; None: not drawn yet."""
    trusted: int | None = None
    """Leading blocks that it may still load, once a recheck has found one wrong; None: all."""
    recompute: bool = False
    """Nothing is loaded for it: it gave way, and computes again what HBM has lost."""
    admitted: bool = False
    """It has had slots before: what it finds now is its own work."""
    finish: FinishReason | None = None

    @property
    def id(self) -> str:
        """What the connector knows this continuation by."""
        return self.group.request.known_by(self.index)

    @property
    def hints(self) -> Hints:
        return self.group.request.hints

    @property
    def prompt_blocks(self) -> int:
        """Leading blocks that hold nothing but the prompt."""
        return len(self.group.request.prompt) // self.chain.block_tokens

    @property
    def seats(self) -> int:
        """Running sequences that this one stands for."""
        return 1 + self.forks

    @property
    def remaining(self) -> int:
        """Tokens whose KV is missing: 1 while decoding, more while filling."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.group.request.prompt)

    def draw(self) -> Draw:
        return Draw(self.group.request.sampling, continuation_seed(self.group.seed, self.index), self.generated)

    def say(self, token: int, eos: Container[int]) -> tuple[str, FinishReason | None]:
        """What a token that was just added gives to the text that may be shown, and whether it ends the sequence."""
        sampling = self.group.request.sampling
        counts = self.generated >= sampling.min_tokens
        if counts and (token in sampling.stop_token_ids or (token in eos and not sampling.ignore_eos)):
            return "", FinishReason.STOP
        piece = self.detokenizer.push(token) if self.detokenizer is not None else ""
        if not counts:
            return piece, None
        text, stopped = self.stops.push(piece)
        return text, FinishReason.STOP if stopped else None

    def rest(self) -> str:
        """What the text still held back, at the end."""
        if self.detokenizer is None:
            return ""
        rest, stopped = self.stops.push(self.detokenizer.finish())
        return rest if stopped else rest + self.stops.finish()

    def fork(self, index: int, tokenizer: Tokenizer | None) -> Sequence:
        """A sibling that shares every block so far. The caller counts the references."""
        sampling = self.group.request.sampling
        return Sequence(
            group=self.group,
            index=index,
            chain=self.chain.copy(),
            tokens=self.tokens.copy(),
            arrival=(self.arrival[0], index),
            detokenizer=tokenizer.detokenizer() if tokenizer is not None else None,
            stops=StopMatcher(sampling.stop),
            slots=self.slots.copy(),
            computed=self.computed,
            committed=self.committed,
            offered=self.offered,
            tail_shared=True,
            admitted=True,
        )
