"""Records as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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


def _decode_rows(record: Mapping[str, Any]) -> Iterable[Row]:
    part = record["parts"].get("decode", {})
    ceiling = record["environment"].get("read_bytes_per_s")
    for name, run in part.get("runs", {}).items():
        if "error" in run:
            yield record["model"]["name"], name, "FAILED", run["error"].split(":")[0], "", "", ""
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
        )


DECODE_HEAD = (
    "model",
    "way",
    "ms per token",
    "tok/s",
    "of read bandwidth",
    "first token, ms",
    "to best peer",
)


def _facts(record: Mapping[str, Any]) -> Iterable[Row]:
    """Every other measured value, one a line."""
    name, parts = record["model"]["name"], record["parts"]
    decode = parts.get("decode", {})
    for key, what in START_FACTS.items():
        if key in decode.get("start", {}):
            yield name, what, f"{decode['start'][key]:.2f}"
    if "host_us_per_step" in decode:
        yield name, "host time of a step, us", f"{decode['host_us_per_step']:.1f}"
    if "gate" in decode:
        yield from _errors(name, "gate", decode["gate"])
    for case, found in parts.get("context", {}).get("cases", {}).items():
        text = f"{found['ms_per_token']:.3f} ms, {found['tokens_per_s']:.0f} tok/s"
        yield name, f"cache:live {case}", f"{text}, {found['ratio_to_first']:.3f}x"
    rows = parts.get("rows")
    if rows:
        bits = "same bits" if rows["same_tokens"] and rows["same_logits"] else "BITS DIFFER"
        ratio = f"{rows['ratio']:.3f}x" if rows["ratio"] > 0 else "lost in noise"
        yield name, f"{rows['rows']} rows to one", f"{ratio}, {bits}"
    if "load" in parts:
        yield from _load_facts(name, parts["load"])
    for case in ("one_token", "prefill"):
        if "forward" in parts:
            yield (
                name,
                f"attached forward to host, {case}",
                f"{parts['forward'][case]['ratio']:.3f}x",
            )
    for path in ("decode", "forward"):
        if "fidelity" in parts:
            yield from _errors(name, f"fidelity, {path}", parts["fidelity"][path])


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


def decode_table(records: Iterable[Mapping[str, Any]]) -> str:
    """The decode runs of all records in one table."""
    return _grid(DECODE_HEAD, [row for record in records for row in _decode_rows(record)])


def markdown(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Everything the records hold, by file name: the decode runs, every other value, the places."""
    places = []
    for name, record in records.items():
        found = record["environment"]
        packages = ", ".join(f"{k} {v}" for k, v in found["packages"].items() if v)
        driver = f"driver {found['driver']}, " if found.get("driver") else ""
        places.append(
            f"- `{name}`: {record['model']['name']}, {found['device']}, {driver}{packages}, "
            f"commit {found['commit'][:12]}, {record['date']}"
        )
    blocks = []
    if any(record["parts"].get("decode", {}).get("runs") for record in records.values()):
        blocks.append(decode_table(records.values()))
    facts = [row for record in records.values() for row in _facts(record)]
    if facts:
        blocks.append(_grid(("model", "what", "value"), facts))
    return "\n\n".join([*blocks, "\n".join(places)])


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
