"""One start of a model in a process of its own: what ``bench load`` runs, and what it prints.

python -m flash_rt.flashrt_hf.bench.load_once FOLDER --begun SECONDS ...
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any


def main() -> None:
    """Load, answer one token, load again; print the seconds of every stage as JSON."""
    parser = argparse.ArgumentParser(prog="load_once", description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--begun", type=float, required=True, help="time.time() at its start")
    parser.add_argument("--device", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--cache", type=int, required=True)
    options = parser.parse_args()
    started = time.time()
    import flash_rt
    import flash_rt.flashrt_hf.load

    imported = time.time()
    result: dict[str, Any] = dict(
        interpreter_s=started - options.begun,
        import_s=imported - started,
        cold=start(flash_rt.load_model, options),
        total_s=time.time() - options.begun,
    )
    result["total_s"] -= result["cold"].pop("tail_s")
    result["again"] = start(flash_rt.load_model, options)
    result["again"].pop("tail_s")
    print(json.dumps(result))


def start(load_model: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of one ``load_model`` and of the first tokens; peak memory where there is a GPU."""
    import torch

    from . import models, timing

    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    marks = [time.perf_counter()]

    def mark() -> float:
        timing.synchronize(device)
        marks.append(time.perf_counter())
        return marks[-1] - marks[-2]

    load: dict[str, Any] = dict(
        device=device, dtype=options.dtype, max_len=options.cache, progress=False
    )
    quantised = options.precision not in ("auto", "bf16")
    found: dict[str, Any] = {}
    if quantised:  # layer by layer: weights and attaching are one stage
        load["min_cosine"] = None  # random weights have nothing to be faithful to
        handle = load_model(options.folder, precision=options.precision, **load)
    else:
        handle = load_model(options.folder, attach=False, **load)
        found["weights_s"] = mark()
        from flash_rt import structures

        structures.attach(handle, precision=options.precision)
        found["attach_s"] = mark()
    with handle:
        if quantised:
            found["load_s"] = mark()
        vocabulary = handle.model.config.get_text_config().vocab_size
        ids = models.prompt_ids(vocabulary, options.prompt, device=device)
        first = handle.generate(ids, max_new_tokens=1, eos_token_id=())
        found["first_token_s"] = mark()
        found["total_s"] = marks[-1] - marks[0]
        second = handle.generate(ids, max_new_tokens=1, eos_token_id=())
        found["second_first_token_s"] = mark()
        found["same_token"] = bool((first == second).all())
        if on_gpu:
            found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
            found["weight_bytes"] = models.parameter_bytes(handle.model)
        found["tail_s"] = time.perf_counter() - marks[-2]
    return found


if __name__ == "__main__":
    main()
