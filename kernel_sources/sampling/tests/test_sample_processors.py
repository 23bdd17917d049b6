"""Scores and what thresholds leave of them, against the logits processors of transformers."""

import sys

import pytest
import torch

ROWS, SIZE = 16, 3000


@pytest.fixture(scope="module")
def choose(sampling):
    return sys.modules[f"{sampling.__name__}.choose"]


@pytest.fixture(scope="module")
def processors():
    return pytest.importorskip("transformers.generation.logits_process")


def logits_and_prompt(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, SIZE, generator=generator) * 3
    return logits, torch.randint(SIZE, (ROWS, 200), generator=generator)


def controls_of(choose, **values):
    tensors = {
        name: torch.full((ROWS,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
        for name, value in ({"temperature": 1.0} | values).items()
    }
    return choose.Controls(seed=torch.zeros(ROWS, dtype=torch.int64), **tensors)


@pytest.mark.parametrize(
    "settings",
    [
        dict(temperature=0.6),
        dict(top_k=20),
        dict(top_k=1),
        dict(top_p=0.9),
        dict(top_p=0.3),
        dict(min_p=0.05),
        dict(temperature=1.7, top_k=500, top_p=0.95, min_p=0.01),
        dict(temperature=0.7, top_k=20, top_p=0.8),
        dict(repetition_penalty=1.3, temperature=0.9, top_p=0.9),
    ],
    ids=str,
)
def test_scores_and_survivors(sampling, choose, processors, settings):
    logits, prompt = logits_and_prompt(len(str(settings)))
    chain = {
        "repetition_penalty": processors.RepetitionPenaltyLogitsProcessor,
        "temperature": processors.TemperatureLogitsWarper,
        "top_k": processors.TopKLogitsWarper,
        "top_p": processors.TopPLogitsWarper,
        "min_p": processors.MinPLogitsWarper,
    }
    expected = logits
    for name, processor in chain.items():
        if name in settings:
            expected = processor(settings[name])(prompt, expected)
    controls = controls_of(choose, **settings)
    controls.occurrences = torch.empty(ROWS, SIZE, dtype=torch.int32)
    sampling.record_prompt(controls.occurrences, prompt, torch.full((ROWS,), 200))
    none = torch.zeros(ROWS, dtype=torch.int32)
    scores = choose.adjusted(logits, controls, none, torch.empty(0, dtype=torch.int64))
    hot = choose.tempered(scores, controls)
    stays = choose.kept(hot, controls)
    assert torch.equal(stays, expected.isfinite())
    # The same operations in the same order, temperature rounded to fp32 here and there.
    torch.testing.assert_close(hot[stays], expected[stays], rtol=2**-22, atol=0)


def test_bias_and_early_end(choose, processors):
    logits, prompt = logits_and_prompt(1)
    bias = {(5,): 2.5, (9,): -7.0, (2999,): 0.125}
    expected = processors.SequenceBiasLogitsProcessor(bias)(prompt, logits)
    early = processors.MinNewTokensLengthLogitsProcessor(190, 20, [7, 2000], device="cpu")
    expected = early(prompt, expected)
    controls = controls_of(choose)
    controls.bias_ids = torch.tensor([5, -1, 9, 2999]).expand(ROWS, -1)
    controls.bias_values = torch.tensor([2.5, 3.0, -7.0, 0.125]).expand(ROWS, -1)
    controls.min_new = torch.full((ROWS,), 20, dtype=torch.int32)
    counts = torch.full((ROWS,), 10, dtype=torch.int32)
    eos = torch.tensor([7, 2000])
    assert torch.equal(choose.adjusted(logits, controls, counts, eos), expected)
    enough = choose.adjusted(logits, controls, counts + 10, eos)
    assert torch.equal(enough[:, 7], logits[:, 7])
