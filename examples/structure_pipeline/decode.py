"""A whole request as a loop of captured steps: several prompts, streamed, with an end.

python examples/structure_pipeline/decode.py [MODEL [PROMPT ...]]

MODEL is a Hub id or a folder with safetensors, such as the one that ``./run demo`` leaves in
~/.cache/flash_rt.
"""

import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from flash_rt import structures

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PROMPTS = ("The capital of France is", "Water boils at", "The three primary colours are")


def main(name: str = MODEL, *prompts: str, new_tokens: int = 32) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(list(prompts or PROMPTS), return_tensors="pt", padding=True).to(device)
    rows, width = batch["input_ids"].shape

    structures.attach(model, model.forward)
    loop = structures.decode_loop(model, max_len=width + new_tokens, batch_size=rows)

    # One row, token by token, as it is generated.
    first = tokenizer((prompts or PROMPTS)[0], return_tensors="pt").to(device)
    loop.generate(first["input_ids"], max_new_tokens=new_tokens, streamer=TextStreamer(tokenizer))

    # All rows in one call; the shorter ones are padded on the left.
    start = time.perf_counter()
    out = loop.generate(batch["input_ids"], batch["attention_mask"], max_new_tokens=new_tokens)
    seconds = time.perf_counter() - start
    for text in tokenizer.batch_decode(out, skip_special_tokens=True):
        print("-", text)
    print(f"{rows} rows, {(out.shape[1] - width) / seconds:.0f} steps/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
