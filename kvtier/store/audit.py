"""Index against media, both ways: one tier at rest for ``kvtier doctor``, and the leases of a store that runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

from kvtier.abc.audit import Finding, FindingKind, Progress, Seals
from kvtier.codec.seal import Sealer
from kvtier.errors import KvtierError
from kvtier.pool import BlockPool, Slot
from kvtier.quantity import counted
from kvtier.registry import TierPlan


@dataclass(frozen=True, slots=True)
class Treated:
    """A finding, and what came of it."""

    finding: Finding
    repaired: str | None = None
    """How it was repaired; None where it was not."""
    why_not: str | None = None
    """Why it was not repaired although that was asked for."""


@dataclass(slots=True)
class Audited:
    """What the audit of one tier came to."""

    tier: str
    looked_at: int = 0
    found: list[Treated] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    """Why it could not be run, or not to its end."""


def audit_tier(plan: TierPlan, progress: Progress, *, fix: bool, most: int) -> Audited | None:
    """Look through a tier at rest and, where ``fix`` asks for it, repair what can be; None where nothing of it lasts."""
    audited = Audited(str(plan.url).partition("?")[0])
    try:
        auditor = plan.auditor()
        if auditor is None:
            return None
        with closing(auditor):
            auditor.most = most
            key_file = plan.options.encrypt
            auditor.seals = Seals(None if key_file is None else Sealer.from_file(key_file).open)
            try:
                for finding in auditor.look(progress):
                    audited.found.append(Treated(finding))
            finally:
                audited.looked_at, audited.notes = auditor.looked_at, auditor.notes
                if auditor.seals.unproven:
                    frames = counted(auditor.seals.unproven, "sealed frame")
                    audited.notes.append(
                        f"{frames} proven but for the payload, which takes the tier's key (encrypt=KEYFILE)"
                    )
            if fix:
                audited.found = [_mended(each.finding) for each in audited.found]
    except (KvtierError, OSError) as failed:
        audited.error = str(failed)
    return audited


def _mended(finding: Finding) -> Treated:
    if finding.repair is None:
        return Treated(finding, why_not="not kvtier's to change")
    try:
        return Treated(finding, finding.repair())
    except (KvtierError, OSError) as failed:
        return Treated(finding, why_not=str(failed))


def lease_faults(tier: str, pool: BlockPool, held: Sequence[int], *, settled: bool) -> list[str]:
    """Slots whose references are not those of ``held`` (how many live holders each slot has), in words.

    Fewer are a fault at any time; more are one where the tier is ``settled``: no copy is under way.
    """
    found = []
    for number, count in enumerate(held):
        references = pool.references(Slot(number))
        if references < count or (settled and references > count):
            kind = FindingKind.LEAKED_LEASE.value if references > count else "lost lease"
            found.append(f"{kind}: {tier} slot {number} has {references} references, {count} are held")
    return found
