"""The CUDA source of draws, drafts and log-probabilities, run thread by thread on the CPU.

Its tokens must be those of the reference, whatever the settings.
"""

import ctypes
import platform
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lookup_cases import arguments_of, by_definition
from sampling_cases import state_of

HERE = Path(__file__).parent
CSRC = HERE.parent / "csrc"
# The only instruction that a CPU has no word for.
COUNT_IN = re.compile(r"  uint32_t before;\n  asm volatile\(.*?\);\n", re.DOTALL)
IN_PLACE = "  const uint32_t before = *counter;\n  *counter = before >= last ? 0 : before + 1;\n"


def cuda_headers():
    nvcc = shutil.which("nvcc")
    folders = [Path(nvcc).resolve().parent.parent / "include"] if nvcc else []
    folders.append(Path("/usr/local/cuda/include"))
    return next((folder for folder in folders if (folder / "cuda_bf16.h").is_file()), None)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    headers, compiler = cuda_headers(), shutil.which("g++")
    if headers is None or compiler is None or platform.machine() != "x86_64":
        pytest.skip("needs g++, the CUDA headers and an x86-64 processor")
    folder = tmp_path_factory.mktemp("emulated")
    source = folder / "csrc"
    shutil.copytree(CSRC, source)
    shutil.copy(HERE / "emulation" / "launch.h", source / "common" / "launch.h")
    keys, count = COUNT_IN.subn(IN_PLACE, (source / "keys.cuh").read_text())
    assert count == 1
    (source / "keys.cuh").write_text(keys)
    sources = [source / name for name in ("sample.cu", "logprobs.cu", "lookup_drafts.cu")]
    sources += [HERE / "emulation" / name for name in ("calls.cpp", "emulate.cpp")]
    flags = "-std=c++17 -O1 -w -fPIC -shared -ffp-contract=off -include emulate.h -x c++"
    places = [f"-I{HERE / 'emulation'}", f"-I{source}", "-isystem", str(headers)]
    library = folder / "emulated.so"
    command = [compiler, *places, *flags.split(), *map(str, sources), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def call(function, tensors, numbers, logits):
    rows = [logits.dim() - 1]
    for size, stride in zip(logits.shape[:-1], logits.stride()[:-1], strict=True):
        rows += [size, stride]
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    function(
        (ctypes.c_void_p * len(addresses))(*addresses),
        (ctypes.c_int64 * len(numbers))(*numbers),
        (ctypes.c_int64 * len(rows))(*rows),
    )


def stride_of(tensor):
    return 0 if tensor is None else tensor.stride(0)


class Case:
    """Random arguments of a step, or of an acceptance where ``places`` is above 0."""

    def __init__(self, seed):
        pick = random.Random(seed)
        torch.manual_seed(seed)
        self.size = pick.choice([1, 2, 33, 100, 1000, 2049, 4099, 10_000])
        self.rows, self.places = pick.choice([1, 3]), pick.choice([0, 0, 1, 4])
        if pick.random() < 0.5:  # many draws, so that a wrong threshold shows
            self.size, self.rows = pick.randint(2, 60), 24
        self.logits = self._logits(pick)
        shape = self.logits.shape[:-1]
        self.state = state_of(self.rows, "cpu")
        self.state[1].random_(5)
        self.state[2].random_(10**6)
        self.state[3].bernoulli_(0.1)
        self.eos = torch.randint(-1, self.size, pick.choice([(2,), (self.rows, 3), (0,)]))
        self.max_new = torch.randint(1, 10, (self.rows,), dtype=torch.int32)
        self.settings = self._settings(pick)
        self.drafts = self.probs = None
        if self.places > 0:
            self.drafts = torch.randint(-1, self.size, (self.rows, self.places - 1))
            if pick.random() < 0.6 and self.places > 1:
                self._draw_drafts()
        self.top_n = min(self.size, pick.choice([0, 1, 5, 20]))
        self.ids = torch.randint(-1, self.size, shape)

    def _logits(self, pick):
        shape = [self.rows, self.places, self.size] if self.places else [self.rows, self.size]
        gap = pick.choice([0, 0, 1, 4])
        wide = torch.randn(*shape[:-1], self.size + gap) * pick.choice([0, 1e-3, 0.1, 1, 3, 100])
        wide = wide.round() if pick.random() < 0.2 else wide
        for value, chance in ((-torch.inf, 0.15), (torch.nan, 0.03), (torch.inf, 0.03)):
            if pick.random() < chance:
                wide[torch.rand(wide.shape) < 0.3] = value
        return wide[..., : self.size]

    def _settings(self, pick):
        def each(*values, chance=0.7, dtype=torch.float32):
            chosen = [pick.choice(values) for _ in range(self.rows)]
            return torch.tensor(chosen, dtype=dtype) if pick.random() < chance else None

        top_k = (0, 1, 2, 5, 50, self.size - 1, self.size, -3)
        settings = [
            each(0.0, 1.0, 0.7, 0.1, 2.0, 1e-6, 100.0, 1e30, chance=1),
            torch.randint(-(2**63), 2**63 - 1, (self.rows,)),
            each(*top_k, dtype=torch.int32),
            each(1.0, 0.9, 0.5, 0.99, 0.1, 0.0, 0.999999),
            each(0.0, 0.1, 0.01, 0.5, 1.0, 2.0),
            each(0, 3, 100, dtype=torch.int32),
            each(1.0, 1.1, 0.8),
            each(0.0, 0.5, -1.0),
            each(0.0, 0.5, -1.0),
        ]
        table = torch.randint(0, 6, (self.rows, self.size + 1), dtype=torch.int32)
        bias = torch.randn(self.rows, pick.choice([0, 1, 40])) * 3
        bias[torch.rand(bias.shape) < 0.2] = -torch.inf
        words = (*self.logits.shape[:-1], (self.size + 31) // 32)
        mask = torch.randint(-(2**31), 2**31, words).int()
        return [
            *settings,
            table[:, : self.size],
            torch.randint(-1, self.size + 1, bias.shape),
            bias,
            mask if pick.random() < 0.5 else None,
        ]

    def _draw_drafts(self):
        near = self.logits[:, :-1].nan_to_num(0, 0, -50)
        self.probs = (near + torch.randn(near.shape) * 0.5).softmax(-1)
        drafts = torch.multinomial(self.probs.view(-1, self.size), 1)
        self.drafts = drafts.view(self.rows, self.places - 1)

    def copies(self):
        """What is written: state, accepted and settings with their own occurrences."""
        accepted = torch.full((self.rows,), -9, dtype=torch.int32) if self.places else None
        settings = list(self.settings)
        around = torch.zeros(self.rows, self.size + 1, dtype=torch.int32)
        around[:, : self.size] = settings[9]
        settings[9] = around[:, : self.size]
        return [tensor.clone() for tensor in self.state], accepted, settings


def by_reference(reference, case, scratch):
    state, accepted, settings = case.copies()
    ends = (case.eos, case.max_new)
    if accepted is None:
        reference.sample_step(case.logits, *state, *ends, *settings, -1, scratch)
    else:
        arguments = (*state, accepted, *ends, case.probs, *settings)
        reference.accept_drafts(case.logits, case.drafts, *arguments, -1, scratch)
    return [*state, accepted, settings[9]]


def by_emulation(library, case, scratch):
    state, accepted, settings = case.copies()
    tensors = [case.logits, *state, case.eos, case.max_new, *settings]
    tensors += [case.drafts, case.probs, accepted, scratch]
    eos_stride = case.eos.shape[-1] if case.eos.dim() == 2 else 0
    numbers = [case.logits[..., 0].numel(), max(case.places, 1), case.size]
    numbers += [state[0].stride(0), state[0].shape[1], case.eos.shape[-1], eos_stride, -1]
    numbers += [stride_of(settings[9]), settings[10].shape[1], scratch.numel()]
    call(library.sample, tensors, numbers, case.logits)
    return [*state, accepted, settings[9]]


@pytest.mark.parametrize("part", range(4))
def test_the_tokens_of_the_reference(sampling, emulated, part):
    reference = sys.modules[f"{sampling.__name__}.reference"]
    scratch = sampling.sample_workspace(96, 10_000, "cpu")  # one for all, as in a loop
    for seed in range(part * 15, part * 15 + 15):
        case = Case(seed)
        ours, expected = (
            by_emulation(emulated, case, scratch),
            by_reference(reference, case, scratch),
        )
        names = ("tokens", "counts", "lengths", "finished", "next_ids", "accepted", "occurrences")
        for name, one, other in zip(names, ours, expected, strict=True):
            if one is not None:
                assert torch.equal(one, other), (seed, name, case.logits.shape, case.places)
        check_logprobs(reference, emulated, case, scratch)


def check_logprobs(reference, library, case, scratch):
    shape = case.logits.shape[:-1]
    results = []
    for run in ("reference", "emulated"):
        out = [torch.empty(shape), torch.empty(*shape, case.top_n).long()]
        out.append(torch.empty(*shape, case.top_n))
        if run == "reference":
            reference.logprobs(case.logits, case.ids, scratch, *out)
        else:
            numbers = [case.ids.numel(), case.size, case.top_n, scratch.numel()]
            call(library.logprobs, [case.logits, case.ids, *out, scratch], numbers, case.logits)
        results.append(out)
    expected, ours = results
    assert torch.equal(ours[1], expected[1])
    for index in (0, 2):
        torch.testing.assert_close(
            ours[index], expected[index], rtol=2e-6, atol=1e-5, equal_nan=True
        )


def test_the_drafts_of_the_definition(emulated):
    pick = random.Random(4)
    for kinds in (2, 4, 30):
        sizes = [1, 2, 3, 7, 8, 9, 40, 512, 513, 514, 700]
        texts = [[pick.randrange(kinds) for _ in range(size)] for size in sizes]
        arguments = arguments_of(texts, [pick.randint(0, size) for size in sizes], "cpu", behind=1)
        for count in (1, 7):
            out = torch.full((len(sizes), count), -9)
            addresses = [tensor.data_ptr() for tensor in (*arguments, out)]
            numbers = [*(text.stride(0) for text in arguments[:2]), *out.shape]
            emulated.lookup_drafts(
                (ctypes.c_void_p * len(addresses))(*addresses),
                (ctypes.c_int64 * len(numbers))(*numbers),
            )
            assert out.tolist() == [by_definition(text, count) for text in texts]
