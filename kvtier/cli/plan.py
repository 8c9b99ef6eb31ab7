"""``kvtier plan``: what a model's KV cache takes on a GPU, over which ways it can go, and which tiers are worth having."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from kvtier.bench.report import Row, check_json, table, write_json
from kvtier.cli.replay import about, add_sample_arguments, sample_of
from kvtier.errors import ConfigError
from kvtier.params import nearest
from kvtier.quantity import parse_bytes
from kvtier.sim.models import GPUS, LINKS, MODELS, gpu, model_shape
from kvtier.sim.planner import PUBLISHED_PAGED_SHARE, PUBLISHED_SLAB_SHARES, UTILISATION, Gpu, Link
from kvtier.sim.replay import Counting, Workload, read_workload
from kvtier.sim.sizing import HBM_SHARE, Demand, Plan, TraceNeeds, Way, gpus_for, planned
from kvtier.sim.traces import Trace, open_trace

CONTEXT, OUTPUT = 4096, 512
SHOWN_PAIRS = 5
NETWORK, LOWER = "400gb", ("nvme", "redis")
"""Links between machines, and to the tiers below DRAM."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "First-order estimates: products at a share of the peak, memory and links at their rated speed, nothing overlapped. "
        f"Models: {', '.join(MODELS)}; or the path of a config.json. GPUs: {', '.join(GPUS)}. Prices are assumptions."
    )
    add = parser.add_argument
    add("--model", dest="plan_model", required=True, metavar="NAME", help="a model of the list below, or a config.json")
    add("--gpu", default="h100", metavar="NAME", help="a GPU of the list below (default: h100)")
    add(
        "--gpus",
        type=int,
        metavar="N",
        help="that share the model (default: as many as hold it and the requests, at most 8)",
    )
    add("--context", type=int, metavar="TOKENS", help=f"of a prompt (default: {CONTEXT}, or the trace's mean)")
    add("--output", type=int, metavar="TOKENS", help=f"of an answer (default: {OUTPUT}, or the trace's mean)")
    add("--concurrency", type=int, default=64, metavar="N", help="requests that decode at once (default: 64)")
    add("--block-tokens", dest="plan_block_tokens", type=int, default=16, metavar="N", help="per block (default: 16)")
    add("--kv-dtype", dest="plan_kv_dtype", default="bf16", metavar="NAME", help="of K and V (default: bf16)")
    add("--utilisation", type=float, default=UTILISATION, metavar="SHARE", help="of the peak (default: %(default)s)")
    add("--hbm-share", type=float, default=HBM_SHARE, metavar="SHARE", help="for weights and KV (default: %(default)s)")
    add("--price", action="append", default=[], metavar="GPU=USD", help="what one costs an hour; repeatable")
    speeds = f"bytes per second of pcie, nvlink, {', '.join(LINKS)}, as nvme=3GB; repeatable"
    add("--link", action="append", default=[], metavar="NAME=SPEED", help=speeds)
    add("--dram", metavar="SIZE", help="of the DRAM tier, instead of a proposal")
    add("--trace", type=Path, metavar="FILE", help="a recorded workload: its working set, its reuse, the tier it fills")
    add_sample_arguments(parser)
    add("--json", type=Path, metavar="FILE", help="also write everything here")


def run(args: argparse.Namespace) -> int:
    check_json(args.json)
    _check_numbers(args)
    single, shape = gpu(args.gpu), model_shape(args.plan_model, args.plan_kv_dtype)
    prices = _prices(args.price)
    speeds = _speeds(args.link)
    dram = None if args.dram is None else _dram(args.dram)
    trace = None if args.trace is None else open_trace(args.trace, sample_of(args))
    work = None if trace is None else read_workload(trace, Counting())
    demand = _demand(args, trace)
    priced = {each.name: replace(each, hourly=prices.get(each.name, each.hourly)) for each in GPUS.values()}
    kind = priced[single.name]
    machine = kind.times(args.gpus or gpus_for(shape, kind, demand))
    links = {name: replace(link, bandwidth=speeds.get(name, link.bandwidth)) for name, link in LINKS.items()}
    plan = planned(
        shape,
        machine,
        demand,
        ways=[*_own_links(machine, speeds), *links.values()],
        network=links[NETWORK],
        lower=[links[name] for name in LOWER],
        gpus=list(priced.values()),
        dram=dram,
        work=work,
    )
    print("\n".join(_told(plan, trace, work)))
    write_json(args.json, _plain(plan))
    return 0


def _plain(plan: Plan) -> dict[str, object]:
    """The whole plan as JSON has it."""
    report = asdict(plan)
    report["model"]["groups"] = [{**group, "kind": group["kind"].value} for group in report["model"]["groups"]]
    report["split"]["pays"] = plan.split.pays
    return report


def _positive(flag: str, value: float, most: float = math.inf) -> None:
    if not 0 < value <= most:
        raise ConfigError(f"{flag} {value:g}: must be above 0" + ("" if math.isinf(most) else f" and at most {most:,}"))


def _check_numbers(args: argparse.Namespace) -> None:
    """Before anything takes time: a trace may be long."""
    for flag, given in (("--context", args.context), ("--output", args.output)):
        if given is not None:
            _positive(flag, given, 1 << 30)
    _positive("--concurrency", args.concurrency, 1 << 20)
    _positive("--block-tokens", args.plan_block_tokens, 1 << 20)
    _positive("--utilisation", args.utilisation, 1)
    _positive("--hbm-share", args.hbm_share, 1)
    if args.gpus is not None and args.gpus < 1:
        raise ConfigError(f"--gpus {args.gpus}: at least one has to do it")


def _demand(args: argparse.Namespace, trace: Trace | None) -> Demand:
    context, output = CONTEXT, OUTPUT
    if trace is not None and (args.context is None or args.output is None):
        lengths = [(each.input_tokens, each.output_tokens) for each in trace]
        context, output = (max(1, round(sum(column) / len(lengths))) for column in zip(*lengths, strict=True))
    context = context if args.context is None else args.context
    output = output if args.output is None else args.output
    return Demand(context, output, args.concurrency, args.plan_block_tokens, args.utilisation, args.hbm_share)


def _pairs(flag: str, given: Sequence[str], valid: Sequence[str]) -> Iterator[tuple[str, str]]:
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{flag} {text!r}: write NAME=VALUE")
        if name not in valid:
            raise ConfigError(f"{flag} {text!r}: {name!r} is not known{nearest(name, valid)}")
        yield name, value


def _prices(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for name, value in _pairs("--price", given, list(GPUS)):
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f"--price {name}={value}: {value!r} is not a number") from None
        if not 0 <= found[name] < math.inf:
            raise ConfigError(f"--price {name}={value}: a price is 0 or more")
    return found


def _speeds(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for name, value in _pairs("--link", given, ["pcie", "nvlink", *LINKS]):
        try:
            found[name] = float(parse_bytes(value.removesuffix("/s")))
        except ValueError as wrong:
            raise ConfigError(f"--link {name}={value}: {wrong}") from None
        _positive(f"--link {name}", found[name])
    return found


def _dram(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as wrong:
        raise ConfigError(f"--dram: {wrong}") from None


def _own_links(machine: Gpu, speeds: Mapping[str, float]) -> list[Link]:
    """Those that come with the GPUs; given speeds are of one of them."""
    pcie = Link("pcie", speeds.get("pcie", machine.pcie / machine.count) * machine.count, source=machine.source)
    one = speeds.get("nvlink") or (machine.nvlink or 0) / machine.count
    return [pcie, *([Link("nvlink", one * machine.count, source=machine.source)] if one else [])]


def _told(plan: Plan, trace: Trace | None, work: Workload | None) -> Iterator[str]:
    yield from _told_machine(plan)
    yield from _told_prompt(plan)
    yield from _told_split(plan)
    if plan.trace is not None and trace is not None and work is not None:
        yield from _told_trace(plan.trace, trace)
    yield "\nTiers below HBM"
    rows = [
        {"tier": each.tier, "size": _bytes(each.nbytes) if each.nbytes else "none", "why": each.why}
        for each in plan.tiers
    ]
    widest = max(len(row["size"]) for row in rows)
    yield from (f"  {row['tier']:6}  {row['size']:>{widest}}  {row['why']}" for row in rows)


def _told_machine(plan: Plan) -> Iterator[str]:
    shape, machine, demand, pool = plan.model, plan.machine, plan.demand, plan.pool
    yield f"{shape.name}: {shape.parameters / 1e9:.1f} billion weights, {shape.active / 1e9:.1f} of them per token"
    yield (
        f"{machine.count} x {machine.name}: {machine.flops / 1e12:,.0f} TFLOP/s dense bf16, {_bytes(machine.memory)} at "
        f"{machine.memory_bandwidth / 1e12:.1f} TB/s, {machine.hourly:.2f} USD an hour (assumed)"
    )
    yield f"sources: {shape.source}; {machine.source}"
    yield "\nKV cache"
    yield f"  {plan.bytes_per_token:,} bytes per token, {plan.bytes_per_block:,} per block of {demand.block_tokens}"
    fits = "" if pool.sequences >= demand.concurrency else f", not the {demand.concurrency} asked for"
    yield (
        f"  HBM beside the weights: {_bytes(pool.nbytes)}, {pool.blocks:,} blocks, {pool.sequences:,} sequences of "
        f"{demand.context:,} + {demand.output:,} tokens{fits}"
    )
    low, high = min(PUBLISHED_SLAB_SHARES.values()), max(PUBLISHED_SLAB_SHARES.values())
    yield (
        f"  of it in use: {pool.paged_share:.1%} in blocks (published: {PUBLISHED_PAGED_SHARE:.1%}); {pool.slab_share:.1%} in "
        f"slabs for the longest sequence, which hold {pool.slab_sequences:,} (published: {low:.1%} to {high:.1%})"
    )


def _told_prompt(plan: Plan) -> Iterator[str]:
    demand, to_host = plan.demand, plan.ways[0]
    yield f"\nA prompt of {demand.context:,} tokens: {_bytes(plan.context_bytes)}"
    yield (
        f"  computed in {_time(plan.prefill_seconds)} at {demand.utilisation:.0%} of the peak "
        f"({_time(plan.prefill_seconds_without_attention)} but for attention), so break-even is "
        f"{plan.break_even_bandwidth / 1e9:.2f} GB/s"
    )
    rows = [
        {
            "way": f"{way.link.name} (dram)" if way is to_host else way.link.name,
            "GB/s": f"{way.link.bandwidth / 1e9:.3g}",
            "load": _time(way.seconds),
            "x break-even": f"{way.times_break_even:.3g}",
            "worth loading": _worth(way),
        }
        for way in plan.ways
    ]
    yield from _columns(rows)
    cheaper = "swapping" if to_host.swap_seconds < plan.prefill_seconds else "recomputing"
    yield (
        f"  a preempted sequence: {cheaper} is cheaper ({_time(to_host.swap_seconds)} out and back over PCIe, "
        f"{_time(plan.prefill_seconds)} to compute again)"
    )


def _worth(way: Way) -> str:
    if way.least_tokens is None:
        return "never"
    return "always" if way.least_tokens == 1 else f"from {way.least_tokens:,} tokens"


def _told_split(plan: Plan) -> Iterator[str]:
    split = plan.split
    yield "\nPrefill and decode on machines of their own"
    yield (
        f"  {'pays' if split.pays else 'does not pay'} over {NETWORK}: a prompt ships in {_time(split.ship_seconds)}; on one "
        f"machine a request is held up by others' prefills for {_time(split.stall_seconds)} in all"
    )
    yield (
        f"  {split.prefill_share:.2f} machines prefill for each that decodes, {split.bandwidth / 1e9:.2f} GB/s between them; "
        f"USD per 1,000 requests on this kind: {1000 * plan.shared_cost:.3f}, and on pairs:"
    )
    rows = [
        {
            "prefill": pair.prefill,
            "decode": pair.decode,
            "at once": str(pair.batch),
            "prefill takes": _time(pair.split.prefill_seconds),
            "a step": _time(pair.split.step_seconds),
            "USD per 1,000": f"{1000 * pair.split.cost:.3f}",
        }
        for pair in plan.pairs[:SHOWN_PAIRS]
    ]
    if rows:
        yield from _columns(rows)


def _told_trace(needs: TraceNeeds, trace: Trace) -> Iterator[str]:
    yield f"\n{trace.path.name} ({about(trace)}): {needs.requests:,} requests"
    yield f"  working set {_bytes(needs.working_set)}; {needs.reuse:.1%} of its blocks were there before, second half"
    for size in needs.sizes:
        yield f"  LRU of {_bytes(size.nbytes):>9}: {size.hit_rate:.1%}"
    if needs.saturating is None:
        yield "  nothing to keep: no block is used twice"


def _columns(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    def column(name: str) -> Callable[[Row], str]:
        return lambda row: str(row[name])

    return (f"  {line}" for line in table(rows, {name: column(name) for name in rows[0]}).splitlines())


def _bytes(nbytes: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}" if nbytes < 1000 * unit else f"{nbytes / unit:,.0f} {name}"
    return f"{nbytes / 1e3:.3g} kB"


def _time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-6:.3g} us"
