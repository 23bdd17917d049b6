"""Every part of the benchmark, run on the CPU with a tiny model: a rehearsal of the GPU run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from flash_rt.flashrt_hf.bench import command, context, decode, load, models, record, table

SMALL = ["--model", "tiny-llama", "--device", "cpu", "--prompt", "9", "--new", "6"]
FAST = ["--cache", "64", "--repeats", "1", "--forced", "3", "--compile-backend", "aot_eager"]


def run(tmp_path: Path, *arguments: str) -> dict:
    path = tmp_path / "record.json"
    command.main([*arguments, "--json", str(path), "--commit", "c0ffee"])
    return record.read(path)


def test_decode(tmp_path, capsys):
    peers = ["--peers", "eager", "compile", "max-autotune"]
    found = run(tmp_path, "decode", *SMALL, *FAST, *peers)
    part = found["parts"]["decode"]
    assert part["gate"]["passed"], part["gate"]
    assert part["gate"]["flashrt"]["positions"] == 4
    assert 0 < part["gate"]["flashrt"]["rms"] <= 1.25 * part["gate"]["host"]["rms"]
    assert list(part["runs"]) == ["flashrt", "eager", "compile", "max-autotune"]
    for run_ in part["runs"].values():
        assert run_["ms_per_token"] == pytest.approx(1e3 / run_["tokens_per_s"])
        assert len(run_["values_ms"]) == 1
    assert part["runs"]["eager"]["same_tokens_as_first"] >= 0
    best = min(part["runs"][name]["ms_per_token"] for name in ("eager", "compile", "max-autotune"))
    ours = part["runs"]["flashrt"]
    assert ours["ratio_to_best_peer"] == pytest.approx(best / ours["ms_per_token"])
    assert math.isfinite(part["host_us_per_step"])
    assert part["start"]["total_s"] > 0
    assert part["start"]["bound_regions"] > 0
    assert "tiny-llama | flashrt | " in capsys.readouterr().out


def test_quantised_entries_alone_are_compared_with_quantised_peers(tmp_path, monkeypatch):
    pytest.importorskip("torchao")
    monkeypatch.setattr(decode.timing, "wall_ms", lambda call, device: (call(), 0.0)[1])
    order = {"flashrt": 4.0, "flashrt fp8": 2.0, "eager": 10.0, "torchao-fp8": 3.0}
    monkeypatch.setattr(decode, "inter_token_ms", lambda runner, *_: lambda: order[runner.name])
    peers = ["--peers", "eager", "torchao-fp8", "--precision", "auto", "fp8"]
    runs = run(tmp_path, "decode", *SMALL, *FAST, *peers)["parts"]["decode"]["runs"]
    assert runs["flashrt"]["ratio_to_best_peer"] == 2.5
    assert runs["flashrt fp8"]["ratio_to_best_peer"] == 1.5
    read = {name: found["bytes_per_s"] * order[name] for name, found in runs.items()}
    assert read["torchao-fp8"] < 0.6 * read["eager"]


def test_a_quantised_peer_that_cannot_run_ends_the_run_before_it_starts(tmp_path):
    pytest.importorskip("torchao")
    with pytest.raises(ValueError, match="peer 'torchao-int4' must run in bfloat16 on CUDA"):
        run(tmp_path, "decode", *SMALL, *FAST, "--peers", "torchao-int4")
    assert not (tmp_path / "record.json").exists()


def test_a_failing_peer_is_recorded_and_leaves(tmp_path, monkeypatch, capsys):
    from flash_rt.flashrt_hf.bench.peers import HostRunner

    right = HostRunner.generate

    def generate(self, ids, new_tokens):
        if self.name == "compile":
            raise RuntimeError("no compiler")
        return right(self, ids, new_tokens)

    monkeypatch.setattr(HostRunner, "generate", generate)
    found = run(tmp_path, "decode", *SMALL, *FAST, "--peers", "eager", "compile")
    runs = found["parts"]["decode"]["runs"]
    assert runs["compile"] == dict(error="RuntimeError: no compiler")
    assert "ratio_to_best_peer" not in runs["flashrt"]
    assert runs["eager"]["ms_per_token"] == pytest.approx(runs["eager"]["values_ms"][0])
    assert "| tiny-llama | compile | FAILED | RuntimeError |" in capsys.readouterr().out


def test_decode_of_a_wrong_model_stops_at_the_gate(tmp_path, monkeypatch):
    from flash_rt.flashrt_hf.bench.flashrt import FlashRTRunner

    right = FlashRTRunner.forced_steps

    def wrong(self, ids, continuation):
        for logits in right(self, ids, continuation):
            yield logits + 0.1

    monkeypatch.setattr(FlashRTRunner, "forced_steps", wrong)
    with pytest.raises(SystemExit, match=r"the correctness gate failed: .*rms error"):
        run(tmp_path, "decode", *SMALL, *FAST)
    kept = json.loads((tmp_path / "record.json").read_text())["parts"]["decode"]
    assert kept["gate"]["passed"] is False
    assert "runs" not in kept


def test_a_host_in_fp32_has_errors_of_its_own(tmp_path):
    found = run(tmp_path, "decode", *SMALL, *FAST, "--dtype", "fp32")
    gate = found["parts"]["decode"]["gate"]
    assert gate["passed"] is True
    for name in ("flashrt", "host"):
        assert 1e-8 < gate[name]["rms"] < 1e-5


def test_context(tmp_path):
    found = run(tmp_path, "context", *SMALL, *FAST, "--cases", "64:32", "256:32", "64:32:fp8")
    cases = found["parts"]["context"]["cases"]
    assert list(cases) == ["64:32", "256:32", "64:32:fp8"]
    assert [case["kv_cache"] for case in cases.values()] == [None, None, "fp8"]
    assert cases["64:32"]["ratio_to_first"] == 1.0
    assert cases["256:32"]["cache_tokens"] == 256


@pytest.mark.parametrize(
    "text", ["64", "64:", "a:b", "64:65", "64:32:", "64:32:int8", "64:32:fp8:fp8"]
)
def test_a_wrong_case_is_refused(text):
    with pytest.raises(ValueError, match="case must be CACHE:LIVE"):
        context.Case.parse(text)


def test_rows(tmp_path):
    part = run(tmp_path, "rows", *SMALL, *FAST, "--rows", "3")["parts"]["rows"]
    assert part["rows"] == 3
    assert part["same_tokens"] is True
    assert part["same_logits"] is True
    assert part["ratio"] == pytest.approx(part["many_ms"] / part["one_ms"])


def test_engine(tmp_path):
    found = run(tmp_path, "engine", *SMALL, *FAST, "--rows", "3")
    part = found["parts"]["engine"]
    assert part["rows"] == 3
    assert part["same_tokens"] is True
    assert part["ratio"] == pytest.approx(part["many_tokens_per_s"] / part["one_tokens_per_s"])
    assert "same answers" in table.markdown({"record.json": found})


def test_speculate(tmp_path):
    found = run(tmp_path, "speculate", *SMALL, *FAST)
    part = found["parts"]["speculate"]
    assert part["same_tokens"] is True
    assert part["prompt_tokens"] == 18
    assert part["speedup"] == pytest.approx(part["plain_ms"] / part["lookup_ms"])
    assert 0 <= part["accepted"] <= part["drafted"]
    assert "same tokens" in table.markdown({"record.json": found})


def test_forward(tmp_path):
    part = run(tmp_path, "forward", *SMALL, *FAST, "--forward-steps", "4")["parts"]["forward"]
    for case in ("one_token", "prefill"):
        found = part[case]
        assert found["ratio"] == pytest.approx(found["attached_ms"] / found["host_ms"])
        assert found["passed"] is (found["ratio"] <= 1.02)


def test_fidelity(tmp_path):
    windows = ["--windows", "2", "--window-tokens", "24"]
    part = run(tmp_path, "fidelity", *SMALL, *FAST, *windows)["parts"]["fidelity"]
    assert part["text"] == dict(kind="random tokens")
    assert part["decode"]["flashrt"]["positions"] == 2 * 9
    assert part["forward"]["flashrt"]["positions"] == 2 * 24
    for path in ("decode", "forward"):
        assert part[path]["passed"], part[path]
        assert part[path]["host"]["rms"] > 0


def test_decode_of_several_precisions(tmp_path, capsys):
    names = ["auto", "fp8", "int8", "nvfp4"]
    found = run(tmp_path, "decode", *SMALL, *FAST, "--peers", "eager", "--precision", *names)
    part = found["parts"]["decode"]
    assert list(part["runs"]) == ["flashrt", *(f"flashrt {n}" for n in names[1:]), "eager"]
    assert list(part["others"]) == [f"flashrt {n}" for n in names[1:]]
    assert part["precision"] == "auto" and part["weights"] == {}
    bits = [entry["weights"]["bits_per_weight"] for entry in part["others"].values()]
    assert bits[0] == bits[1]
    for entry in (part, *part["others"].values()):
        assert entry["gate"]["passed"], entry["gate"]
        assert entry["start"]["bound_regions"] > 0
        assert entry["gate"]["flashrt"]["rms"] > 0
    for name in ("flashrt", "flashrt fp8"):
        assert part["runs"][name]["ratio_to_best_peer"] > 0
    per_byte = {
        name: run_["bytes_per_s"] * run_["ms_per_token"] for name, run_ in part["runs"].items()
    }
    assert per_byte["flashrt fp8"] < 0.6 * per_byte["flashrt"]
    assert per_byte["eager"] == pytest.approx(per_byte["flashrt"])
    out = capsys.readouterr().out
    assert "tiny-llama | flashrt nvfp4 | " in out and "| gate (fp8): logit error" in out


def test_rows_of_several_precisions(tmp_path):
    part = run(tmp_path, "rows", *SMALL, *FAST, "--precision", "fp8", "nvfp4")["parts"]["rows"]
    assert part["precision"] == "fp8"
    for found in (part, part["others"]["flashrt nvfp4"]):
        assert found["same_tokens"] is True and found["same_logits"] is True


def test_fidelity_of_several_precisions(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLASH_RT_CACHE", str(tmp_path / "cache"))
    windows = ["--windows", "2", "--window-tokens", "24", "--dtype", "fp32"]
    names = ["auto", "int8", "nvfp4"]
    more = ["--calibrate", "2", "--precision", *names]
    part = run(tmp_path, "fidelity", *SMALL, *FAST, *windows, *more)
    part = part["parts"]["fidelity"]
    assert part["calibration_windows"] == 2
    for path in ("decode", "forward"):
        entries = [part, *part["others"].values()]
        cosines = [entry[path]["cosine"] for entry in entries]
        assert cosines[0] > 0.999999 > cosines[1] > 0.99 > cosines[2] > 0.8
        losses = [entry[path]["perplexity"] for entry in entries]
        assert losses[0]["flashrt"] == pytest.approx(losses[0]["host"], rel=1e-5)
        assert losses[2]["flashrt"] != pytest.approx(losses[2]["host"], rel=1e-4)
        assert part[path]["predicted_positions"] == 2 * (8 if path == "decode" else 23)
        assert "passed" in part[path] and "passed" not in part["others"]["flashrt int8"][path]
    assert "fidelity (nvfp4): mean bits a weight | " in capsys.readouterr().out


def test_load(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(load, "build_folder", lambda: tmp_path / "build")
    small = ["--model", "tiny-llama", "--device", "cpu", "--prompt", "9", "--cache", "64"]
    found = run(tmp_path, "load", *small, "--dtype", "fp32", "--repeats", "1")
    part = found["parts"]["load"]
    (once,) = part["rounds"]
    assert once["cold"]["same_token"] and once["again"]["same_token"]
    for stages in (part["cold"], part["again"]):
        in_turn = stages["weights_s"] + stages["attach_s"] + stages["first_token_s"]
        assert stages["total_s"] == pytest.approx(in_turn)
    in_turn = part["interpreter_s"] + part["import_s"] + part["cold"]["total_s"]
    assert part["total_s"] == pytest.approx(in_turn, abs=0.5)
    folder = tmp_path / "build" / "models" / "tiny-llama-fp32"
    assert found["model"]["file_bytes"] == (folder / "model.safetensors").stat().st_size
    assert "| tiny-llama | new process to first token, s | " in capsys.readouterr().out
    packed = run(
        tmp_path, "load", *small, "--dtype", "fp32", "--repeats", "1", "--precision", "int8"
    )
    stages = packed["parts"]["load"]["cold"]
    assert stages["total_s"] == pytest.approx(stages["load_s"] + stages["first_token_s"])
    assert "new process to first token (int8), s | " in capsys.readouterr().out
    monkeypatch.setattr(models, "build", None)  # the folder is written once
    device = torch.device("cpu")
    assert load.model_folder("tiny-llama", device=device, dtype="fp32") == folder


def test_a_load_that_fails_says_why(tmp_path):
    options = command.parser().parse_args(["load", "--model", "tiny-llama", "--device", "cpu"])
    with pytest.raises(
        RuntimeError, match="bench: load failed in its own process: .*config.json must be in"
    ):
        load.run_once(tmp_path, options)


def test_bad_arguments_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, "decode", *SMALL, "--cache", "10")
    assert "--prompt + --new must be at most --cache, got 15" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(tmp_path, "load", "decode", *SMALL)
    assert "load must be the only part, got load decode" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(tmp_path, "load", *SMALL, "--peers", "eager", "--min-cosine", "0.9")
    error = capsys.readouterr().err
    assert "load must be without --min-cosine --peers --new, which it does not read" in error
    with pytest.raises(SystemExit):
        run(tmp_path, "decode", "--model", "qwen9")
    assert "invalid choice: 'qwen9'" in capsys.readouterr().err


def test_table_prints_what_records_hold(tmp_path, capsys):
    begun = record.start("decode", torch.device("cpu"), settings={}, commit_id="c0ffee1234567")
    begun["environment"]["read_bytes_per_s"] = 4e12
    begun["model"] = dict(name="m")
    timed = dict(ms_per_token=0.5, tokens_per_s=2000.0, bytes_per_s=3e12, first_token_ms=4.0)
    begun["parts"] = dict(
        decode=dict(
            runs=dict(flashrt=timed | dict(ratio_to_best_peer=2.5), eager=timed),
            start=dict(total_s=1.25),
            host_us_per_step=20.0,
        ),
        rows=dict(rows=4, ratio=1.05, same_tokens=True, same_logits=False),
    )
    path = tmp_path / "one.json"
    record.write(begun, path)
    command.main(["table", str(path)])
    out = capsys.readouterr().out
    assert "| m | flashrt | 0.500 | 2000 | 75% | 4.0 | 2.50x | `one` |" in out
    assert "| m | eager | 0.500 | 2000 | 75% | 4.0 | - | `one` |" in out
    assert "| m | attach + first token, s | 1.25 |" in out
    assert "| m | 4 rows to one | 1.050x, BITS DIFFER |" in out
    named = {"one.json": begun}
    assert out == f"{table.summary(named)}\n\n{table.details(named)}\n"
    assert table.decode_table(named) in table.summary(named)
    readme, results = tmp_path / "README.md", tmp_path / "results.md"
    for document in (readme, results):
        document.write_text(f"before {table.BEGIN} old {table.END} after")
    command.main(["table", str(path), "--into", str(readme), "--details", str(results)])
    for document, shown in ((readme, table.summary), (results, table.details)):
        inside = f"before {table.BEGIN}\n{shown(named)}\n{table.END} after"
        assert document.read_text() == inside
    with pytest.raises(ValueError, match="document must have the marks"):
        table.fill("no marks", "text")


def test_quality_stands_beside_the_speed_of_the_same_entry():
    def path(cosine, ours):
        return dict(cosine=cosine, perplexity=dict(flashrt=ours, host=15.0))

    def made(floor, **parts):
        return dict(
            model=dict(name="m", weight_bytes=4_000_000),
            settings=dict(min_cosine=floor, dtype="bf16"),
            parts=parts,
            environment=dict(device="gpu", packages={}, commit="0" * 40),
            date="today",
        )

    weights = dict(bits_per_weight=8.05, packed_bytes=2_000_000)
    fp8 = dict(precision="fp8", weights=weights, decode=path(0.998, 15.5), forward=path(0.997, 16))
    plain = dict(precision="auto", weights={}, decode=path(1, 15), forward=path(0.9999, 15.01))
    runs = {"flashrt": dict(tokens_per_s=100.0), "flashrt fp8": dict(tokens_per_s=180.4)}
    text = "\n".join(
        "| " + " | ".join(row) + " |"
        for row in table._quality_rows(
            [
                made(None, fidelity=plain | dict(others={"flashrt fp8": fp8})),
                made(None, decode=dict(runs=runs)),
                made(0.999, fidelity=fp8),
            ]
        )
    )
    assert text.splitlines() == [
        "| m | bf16 | 16 | 4 | 100 | 1.00000, 0.99990 | 15 (15), 15.01 (15) |",
        "| m | fp8 | 8.05 | 2 | 180 | 0.99800, 0.99700 | 15.5 (15), 16 (15) |",
        "| m | fp8, floor 0.999 | 8.05 | 2 | - | 0.99800, 0.99700 | 15.5 (15), 16 (15) |",
    ]


@pytest.mark.parametrize(("ratio", "printed"), [(0.5, "0.500x"), (-0.1, "lost in noise")])
def test_table_prints_no_ratio_of_negative_times(ratio, printed):
    found = dict(
        model=dict(name="tiny"),
        parts=dict(rows=dict(rows=4, same_tokens=True, same_logits=True, ratio=ratio)),
        environment=dict(device="cpu", packages={}, commit="0" * 40),
        date="today",
    )
    assert f"| tiny | 4 rows to one | {printed}, same bits |" in table.markdown({"one": found})
