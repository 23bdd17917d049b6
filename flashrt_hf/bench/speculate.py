"""Part ``speculate``: an answer that repeats its prompt, with and without drafts.

The prompt asks for a change to code, so most of the answer stands in it already. Where there is no
tokenizer a random prompt that repeats itself takes its place, which says what verification costs.
"""

from __future__ import annotations

from typing import Any

import torch

from ..host import REAL_MODEL
from . import timing
from .session import Session, say

LEAST_SPEEDUP = 1.8
CODE = '''def read_orders(path):
    """Read orders from a CSV file and return a list of dictionaries."""
    orders = []
    with open(path) as handle:
        header = handle.readline().strip().split(",")
        for line in handle:
            values = line.strip().split(",")
            orders.append(dict(zip(header, values)))
    return orders


def total_price(orders):
    """Sum the price of all orders, with the discount of each customer."""
    total = 0.0
    for order in orders:
        price = float(order["price"]) * int(order["quantity"])
        discount = float(order.get("discount", 0))
        total += price * (1 - discount)
    return total


def largest_order(orders):
    """Return the order with the highest price."""
    best = None
    for order in orders:
        price = float(order["price"]) * int(order["quantity"])
        if best is None or price > float(best["price"]) * int(best["quantity"]):
            best = order
    return best


def print_report(orders):
    """Print one line for every order and the total at the end."""
    for order in orders:
        print(order["name"], order["price"], order["quantity"])
    print("total:", total_price(orders))
'''
REQUEST = (
    "Rename the function total_price to order_total everywhere in this code. Change nothing else, "
    f"and answer with the whole code.\n\n```python\n{CODE}```"
)


def run(session: Session) -> dict[str, Any]:
    """Time both ways of one request, interleaved, and compare their tokens."""
    from flash_rt import structures

    options = session.options
    prompt, kind = _prompt(session)
    max_len = max(options.cache, prompt.shape[1] + options.new)
    plan = structures.attach(session.model, session.model.forward)
    try:
        loops = {
            "plain": structures.decode_loop(session.model, max_len=max_len),
            "lookup": structures.decode_loop(session.model, max_len=max_len, draft="lookup"),
        }

        def answer(name: str, tokens: int) -> torch.Tensor:
            return loops[name].generate(prompt, max_new_tokens=tokens, eos_token_id=())

        answers = {name: answer(name, options.new) for name in loops}
        for name in loops:  # once more: graphs are recorded as widths are first used
            answer(name, options.new)
        counts = loops["lookup"].speculation
        before = (counts.steps, counts.verified, counts.drafted, counts.accepted)
        answer("lookup", options.new)
        after = (counts.steps, counts.verified, counts.drafted, counts.accepted)
        samples = timing.interleave(
            {name: _decode_ms(answer, name, session) for name in loops}, rounds=options.repeats
        )
    finally:
        plan.detach()
    same = torch.equal(answers["plain"], answers["lookup"])
    speedup = samples["plain"].median_ms / samples["lookup"].median_ms
    say(f"speculate: {speedup:.2f}x, " + ("same tokens" if same else "TOKENS DIFFER"))
    names = ("plain_steps", "verifications", "drafted", "accepted")
    return dict(
        prompt=kind,
        prompt_tokens=prompt.shape[1],
        new_tokens=options.new,
        same_tokens=same,
        plain_ms=samples["plain"].median_ms,
        lookup_ms=samples["lookup"].median_ms,
        speedup=speedup,
        passed=same and speedup >= LEAST_SPEEDUP,
        **{name: b - a for name, a, b in zip(names, before, after, strict=True)},
    )


def _prompt(session: Session) -> tuple[torch.Tensor, str]:
    if session.name != REAL_MODEL:
        return session.prompt(session.options.prompt).repeat(1, 2), "random tokens, twice"
    from ..real_model import tokenizer

    chat = tokenizer().apply_chat_template(
        [{"role": "user", "content": REQUEST}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids: torch.Tensor = chat["input_ids"]
    return ids.to(session.device), "a change to code"


def _decode_ms(answer: Any, name: str, session: Session) -> Any:
    """Milliseconds of all tokens but the first, which the prompt costs."""
    new = session.options.new

    def measure() -> float:
        whole = timing.wall_ms(lambda: answer(name, new), session.device)
        return whole - timing.wall_ms(lambda: answer(name, 1), session.device)

    return measure
