"""Door 3: a model in one line, then questions, a stream, and a look inside.

python examples/load_model.py [MODEL [QUESTION]]      a folder, a GGUF file or a Hub id

Without a way to the Hub, pass the folder that ``./run demo`` leaves in ~/.cache/flash_rt.
"""

import sys

import flash_rt
from flash_rt import structures

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"


def main(name: str = MODEL, question: str = QUESTION) -> None:
    with flash_rt.load_model(name) as model:
        print(">", question)
        print(model.predict(question, max_new_tokens=32))

        # A conversation is a list of messages; the answer comes in pieces as it is generated.
        chat = [{"role": "user", "content": question}]
        for piece in model.stream(chat, max_new_tokens=32, temperature=0.8, top_p=0.95, seed=1):
            print(piece, end="", flush=True)
        print()

        # The handle is a model for structures: the same plan, and token ids in and out.
        plan = structures.attach(model, model.forward)
        print(f"{len(plan.bound())} of {len(plan.decisions)} regions run on FlashRT")
        ids = model.tokenizer(question, return_tensors="pt").input_ids
        print(model.tokenizer.decode(model.generate(ids, max_new_tokens=16)[0]))


if __name__ == "__main__":
    main(*sys.argv[1:3])
