"""The definition of lookup_drafts in Python numbers, and its arguments for a text."""

import torch

WEIGHTS = [1000, 700, 490, 343, 240, 168, 118, 82]  # the newest first


def by_definition(text, count):
    """Drafts of one text, a list of ids."""

    def agreement(place):
        ages = range(min(len(WEIGHTS), place))
        return sum(WEIGHTS[a] for a in ages if text[place - 1 - a] == text[-1 - a])

    best = max(range(1, len(text)), key=lambda place: (agreement(place), place), default=0)
    if best == 0 or agreement(best) < WEIGHTS[0]:
        return [-1] * count
    return [text[best + j % (len(text) - best)] for j in range(count)]


def arguments_of(texts, prompts, device, behind=0):
    """Prompt, tokens, counts and lengths of texts whose first ``prompts[b]`` ids are the prompt.

    ``behind`` stands behind both parts; the rows are not next to one another.
    """
    wide = max(map(len, texts)) + 9
    prompt, tokens = (torch.full((len(texts), wide + 3), behind)[:, :wide] for _ in range(2))
    for row, (text, length) in enumerate(zip(texts, prompts, strict=True)):
        prompt[row, :length] = torch.tensor(text[:length])
        tokens[row, : len(text) - length] = torch.tensor(text[length:])
    counts = [len(text) - length for text, length in zip(texts, prompts, strict=True)]
    lengths = [len(text) - 1 for text in texts]
    numbers = (torch.tensor(n, dtype=torch.int32) for n in (counts, lengths))
    return [tensor.to(device) for tensor in (prompt, tokens, *numbers)]
