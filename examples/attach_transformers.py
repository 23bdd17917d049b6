"""Door 2: FlashRT inside an unmodified transformers model, and out again.

python examples/attach_transformers.py [MODEL]      a Hub id or a folder with safetensors

Without a way to the Hub, pass the folder that ``./run demo`` leaves in ~/.cache/flash_rt.
"""

import sys

import torch
from transformers import AutoModelForCausalLM

from flash_rt import structures

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def main(name: str = MODEL) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    ids = torch.randint(0, model.config.vocab_size, (1, 16), device=device)
    with torch.no_grad():
        before = model(ids).logits

        plan = structures.attach(model, model.forward)
        print(structures.explain(plan))
        attached = model(ids).logits

        plan.detach()
        after = model(ids).logits
    error = ((attached - before).float().norm() / before.float().norm()).item()
    print(f"relative difference while attached: {error:.1e}")
    print(f"the host again, bit for bit: {torch.equal(before, after)}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
