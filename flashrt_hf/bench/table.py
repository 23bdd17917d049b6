"""Records as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .precisions import PLAIN, entry_name

Row = tuple[str, ...]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
START_FACTS = {
    "total_s": "attach + first token, s",
    "peak_ratio": "peak memory from attach to first token, of weights + cache",
    "peak_beyond_mb": "peak memory beyond weights + cache, MB",
}


def _grid(head: Row, rows: Iterable[Row]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _decode_rows(place: str, record: Mapping[str, Any]) -> Iterable[Row]:
    part = record["parts"].get("decode", {})
    ceiling = record["environment"].get("read_bytes_per_s")
    for name, run in part.get("runs", {}).items():
        if "error" in run:
            error = run["error"].split(":")[0]
            yield record["model"]["name"], name, "FAILED", error, "", "", "", place
            continue
        ratio = run.get("ratio_to_best_peer")
        yield (
            record["model"]["name"],
            name,
            f"{run['ms_per_token']:.3f}",
            f"{run['tokens_per_s']:.0f}",
            f"{run['bytes_per_s'] / ceiling:.0%}" if ceiling else "-",
            f"{run['first_token_ms']:.1f}",
            f"{ratio:.2f}x" if ratio else "-",
            place,
        )


DECODE_HEAD = (
    "model",
    "way",
    "ms per token",
    "tok/s",
    "of read bandwidth",
    "first token, ms",
    "to best peer",
    "record",
)


def _facts(record: Mapping[str, Any]) -> Iterable[Row]:
    """Every other measured value, one a line."""
    name, parts = record["model"]["name"], record["parts"]
    decode = parts.get("decode", {})
    yield from _of_precisions(name, decode, _start_facts)
    for case, found in parts.get("context", {}).get("cases", {}).items():
        text = f"{found['ms_per_token']:.3f} ms, {found['tokens_per_s']:.0f} tok/s"
        yield name, f"cache:live {case}", f"{text}, {found['ratio_to_first']:.3f}x"
    yield from _of_precisions(name, parts.get("rows", {}), _rows_facts)
    yield from _loop_facts(name, parts)
    if "load" in parts:
        yield from _load_facts(name, parts["load"])
    if "serve" in parts:
        yield from _serve_facts(name, parts["serve"])
    if "abuse" in parts:
        wrong, count = len(parts["abuse"]["wrong"]), sum(parts["abuse"]["requests"].values())
        grown = parts["abuse"]["grown_bytes"] / 2**20
        yield name, f"{count} requests of load and abuse", f"{wrong} wrong, {grown:+.1f} MB"
    for case in ("one_token", "prefill"):
        if "forward" in parts:
            yield (
                name,
                f"attached forward to host, {case}",
                f"{parts['forward'][case]['ratio']:.3f}x",
            )
    yield from _of_precisions(name, parts.get("fidelity", {}), _fidelity_facts)


def _of_precisions(
    name: str,
    part: Mapping[str, Any],
    facts: Callable[[str, str, Mapping[str, Any]], Iterable[Row]],
) -> Iterable[Row]:
    """Facts of a part's first precision, then of the others that were measured with it."""
    for found in (part, *part.get("others", {}).values()):
        precision = found.get("precision", "auto")
        yield from facts(name, "" if precision == "auto" else f" ({precision})", found)


def _start_facts(name: str, how: str, found: Mapping[str, Any]) -> Iterable[Row]:
    for key, what in START_FACTS.items():
        if key in found.get("start", {}):
            yield name, f"{what}{how}", f"{found['start'][key]:.2f}"
    if "host_us_per_step" in found:
        yield name, f"host time of a step, us{how}", f"{found['host_us_per_step']:.1f}"
    if "gate" in found:
        yield from _errors(name, f"gate{how}", found["gate"])


def _rows_facts(name: str, how: str, found: Mapping[str, Any]) -> Iterable[Row]:
    if found:
        bits = "same bits" if found["same_tokens"] and found["same_logits"] else "BITS DIFFER"
        ratio = f"{found['ratio']:.3f}x" if found["ratio"] > 0 else "lost in noise"
        yield name, f"{found['rows']} rows to one{how}", f"{ratio}, {bits}"


def _fidelity_facts(name: str, how: str, found: Mapping[str, Any]) -> Iterable[Row]:
    for path in ("decode", "forward"):
        if path not in found:
            continue
        yield from _errors(name, f"fidelity, {path}{how}", found[path])
        if "cosine" in found[path]:
            ours, host = (found[path]["perplexity"][n] for n in ("flashrt", "host"))
            worst = found[path]["worst_percent_cosine"]
            yield (
                name,
                f"fidelity, {path}{how}: cosine with the host, worst 1 %; perplexity (host's)",
                f"{found[path]['cosine']:.5f}, {worst:.5f}; {ours:.4g} ({host:.4g})",
            )
    weights = found.get("weights")
    if weights:
        shares = ", ".join(f"{n} {s:.1%}" for n, s in weights["share_of_weights"].items())
        text = f"{weights['bits_per_weight']:.2f} ({shares})"
        yield name, f"fidelity{how}: mean bits a weight", text


def _loop_facts(name: str, parts: Mapping[str, Any]) -> Iterable[Row]:
    engine, drafts = parts.get("engine"), parts.get("speculate")
    if engine:
        same = "same answers" if engine["same_tokens"] else "ANSWERS DIFFER"
        rate = f"{engine['many_tokens_per_s']:.0f} tok/s, {engine['ratio']:.2f}x one"
        yield name, f"engine, {engine['rows']} requests", f"{rate}, {same}"
    if drafts:
        same = "same tokens" if drafts["same_tokens"] else "TOKENS DIFFER"
        counts = f"{drafts['accepted']} of {drafts['drafted']} drafts accepted"
        yield name, f"lookup on {drafts['prompt']}", f"{drafts['speedup']:.2f}x, {same}, {counts}"


def _load_facts(name: str, found: Mapping[str, Any]) -> Iterable[Row]:
    how = "" if found["precision"] == "auto" else f" ({found['precision']})"
    yield name, f"new process to first token{how}, s", f"{found['total_s']:.2f}"
    for key, what in (("cold", "load_model to first token"), ("again", "the same again")):
        stages = found[key]
        parts = ", ".join(
            f"{stage.removesuffix('_s').replace('_', ' ')} {stages[stage]:.2f}"
            for stage in ("weights_s", "attach_s", "load_s", "first_token_s")
            if stage in stages
        )
        yield name, f"{what}{how}, s", f"{stages['total_s']:.2f} ({parts})"


def _serve_facts(name: str, found: Mapping[str, Any]) -> Iterable[Row]:
    bare, http, many = found["bare"], found["http"], found["many"]
    same = "same answers" if found["same_as_bare"] else "ANSWERS DIFFER"
    yield (
        name,
        "streaming through HTTP to the bare loop, tok/s",
        f"{http['rate']:.1f} to {bare['rate']:.1f}: {found['streaming_ratio']:.3f}x, {same}",
    )
    first = f"{http['first_ms']:.2f} to {bare['first_ms']:.2f}: {found['first_extra_ms']:+.2f}"
    yield name, "first token through HTTP to the bare loop, ms", first
    same = "same answers" if many["same_as_single"] else "ANSWERS DIFFER"
    yield (
        name,
        f"{many['clients']} clients to one, tok/s",
        f"{many['total_rate']:.1f} to {many['single_rate']:.1f}: {many['total_ratio']:.2f}x, "
        f"{same}",
    )
    yield (
        name,
        f"{many['clients']} clients: slowest to mean, longest gap",
        f"{many['slowest_share']:.2f}, {many['longest_gap_ms']:.1f} ms",
    )


def _errors(name: str, what: str, found: Mapping[str, Any]) -> Iterable[Row]:
    ours, host = found["flashrt"], found["host"]
    yield (
        name,
        f"{what}: logit error rms, max (host's)",
        f"{ours['rms']:.3e}, {ours['max']:.3e} ({host['rms']:.3e}, {host['max']:.3e})",
    )
    yield (
        name,
        f"{what}: top-1 with fp32 (host's), positions",
        f"{ours['top1']:.4f} ({host['top1']:.4f}), {ours['positions']}",
    )


QUALITY_HEAD = (
    "model",
    "precision",
    "bits a weight",
    "weights, MB",
    "tok/s",
    "cosine with the host: decode, prefill",
    "perplexity (host's): decode, prefill",
)


def _quality_rows(records: Iterable[Mapping[str, Any]]) -> Iterable[Row]:
    """Entries of the part ``fidelity``, with the speed that a record has of the same entry."""
    read = list(records)
    for record in read:
        part = record["parts"].get("fidelity", {})
        for found in (part, *part.get("others", {}).values()):
            if "cosine" in found.get("decode", {}):
                yield _quality_row(record, found, read)


def _quality_row(
    record: Mapping[str, Any], found: Mapping[str, Any], records: Iterable[Mapping[str, Any]]
) -> Row:
    model, precision, weights = record["model"], found["precision"], found.get("weights")
    floor = record["settings"]["min_cosine"] if weights else None
    name = precision if weights else record["settings"]["dtype"]
    rate = max(_rates(records, model["name"], precision, floor), default=None)
    paths = [found[path] for path in ("decode", "forward")]
    return (
        model["name"],
        f"{name}, floor {floor}" if floor else name,
        f"{weights['bits_per_weight']:.2f}" if weights else "16",
        f"{(weights['packed_bytes'] if weights else model['weight_bytes']) / 1e6:.0f}",
        f"{rate:.0f}" if rate else "-",
        ", ".join(f"{path['cosine']:.5f}" for path in paths),
        ", ".join(
            f"{path['perplexity']['flashrt']:.4g} ({path['perplexity']['host']:.4g})"
            for path in paths
        ),
    )


def _rates(
    records: Iterable[Mapping[str, Any]], model: str, precision: str, floor: float | None
) -> Iterable[float]:
    """Tokens per second of an entry in every record that has timed it."""
    for record in records:
        timed = record["parts"].get("decode", {}).get("runs", {}).get(entry_name(precision), {})
        if record["model"]["name"] != model or "tokens_per_s" not in timed:
            continue
        if precision == PLAIN or record["settings"]["min_cosine"] == floor:
            yield timed["tokens_per_s"]


def decode_table(records: Mapping[str, Mapping[str, Any]]) -> str:
    """The decode runs of all records in one table."""
    rows = [
        row
        for name, record in records.items()
        for row in _decode_rows(f"`{name.removesuffix('.json')}`", record)
    ]
    return _grid(DECODE_HEAD, rows)


def _places(records: Mapping[str, Mapping[str, Any]]) -> str:
    places = []
    for name, record in records.items():
        found = record["environment"]
        packages = ", ".join(f"{k} {v}" for k, v in found["packages"].items() if v)
        driver = f"driver {found['driver']}, " if found.get("driver") else ""
        places.append(
            f"- `{name}`: {record['model']['name']}, {found['device']}, {driver}{packages}, "
            f"commit {found['commit'][:12]}, {record['date']}"
        )
    return "\n".join(places)


def summary(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Speed of all decode runs; where a record has fidelity, quality and speed; the places."""
    blocks = []
    if any(record["parts"].get("decode", {}).get("runs") for record in records.values()):
        blocks.append(decode_table(records))
    quality = list(_quality_rows(records.values()))
    if quality:
        blocks.append(_grid(QUALITY_HEAD, quality))
    return "\n\n".join([*blocks, _places(records)])


def details(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Every value that is in no table of :func:`summary`, one a line, a table for each record."""
    found = {name: list(_facts(record)) for name, record in records.items()}
    return "\n\n".join(
        f"### {name.removesuffix('.json')}\n\n" + _grid(("model", "what", "value"), rows)
        for name, rows in found.items()
        if rows
    )


def markdown(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Everything that the records hold, by file name."""
    return "\n\n".join(text for text in (summary(records), details(records)) if text)


def fill(document: str, text: str) -> str:
    """Put ``text`` between the marks of ``document``.

    Raises:
        ValueError: the marks are missing.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"bench: document must have the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"
