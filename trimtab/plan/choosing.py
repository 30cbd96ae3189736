"""Passes that make a step fast, of those that fit: how many tokens they have, and how many layers recompute in them.

Larger passes are faster until matrix products fill the device and the host keeps ahead of it; beyond that they only
take memory. Where that size does not fit, there are smaller passes and, if the options leave it open, layers that
recompute: of these as few as fit, with the passes that then take the least time.
"""

from trimtab.plan.memory import MOST_TOKENS, Memory, MemoryModel, largest
from trimtab.plan.speed import Clock

ROUND = 1024  # tokens: a proposal need not be odd


def chosen_passes(model: MemoryModel, clock: Clock | None, tokens: int | None) -> Memory:
    """`tokens`: of a pass as the options have it; None: open."""
    open_layers = model.options.plans_recomputation and model.layers > 0
    if tokens is not None:
        return fewest_recomputed(model, tokens) if open_layers else model.at(tokens)
    least, most = model.work.least, enough_tokens(model, clock)
    if not open_layers:
        return largest(model.at, model.room, least, most)
    best = fewest_recomputed(model, most)
    if best.recomputed == 0:
        return best
    without = largest(lambda size: model.at(size, 0), model.room, least, most)
    while best.tokens > least:
        smaller = fewest_recomputed(model, max(least, best.tokens // 2))
        if best.fits(model.room) and seconds(model, clock, smaller) >= seconds(model, clock, best):
            break
        best = smaller
    fitting = [found for found in (without, best) if found.fits(model.room)]
    return min(fitting, key=lambda found: seconds(model, clock, found), default=best)


def enough_tokens(model: MemoryModel, clock: Clock | None) -> int:
    """Of a pass; at least one sample's, and no more than a step has."""
    enough = MOST_TOKENS
    if clock is not None and clock.accelerator:
        enough = max(-(-clock.enough(trained) // ROUND) * ROUND for trained in model.trained.values())
    rows, step = model.work.rows, model.work.tokens
    enough = max(enough, rows.prompt + rows.group * rows.answer)  # of a group: its prompt is then read once
    # As many passes as that takes, all of about the same size: the last one would be as slow as a small one is.
    passes = max(1, round(step / min(enough, MOST_TOKENS)))
    even = step if passes == 1 else -(-step // passes) + model.work.least
    return max(model.work.least, min(step, even, MOST_TOKENS))


def fewest_recomputed(model: MemoryModel, tokens: int) -> Memory:
    """The fewest layers with which passes of so many tokens fit; all, if no number does."""
    low = model.at(tokens, 0)
    if low.fits(model.room):
        return low  # to count a pass of a large model takes seconds
    high = model.at(tokens, model.layers)
    if not high.fits(model.room):
        return high
    fewest, most = 0, model.layers
    while most - fewest > 1:
        # Every layer saves about as much: where the line meets what there is room for, or beside it.
        saved = (low.peak - high.peak) / (most - fewest)
        guess = fewest + max(1, min(most - fewest - 1, -int(-(low.peak - model.room) // saved)))
        found = model.at(tokens, guess)
        if found.fits(model.room):
            most, high = guess, found
        else:
            fewest, low = guess, found
    return high


def seconds(model: MemoryModel, clock: Clock | None, memory: Memory) -> float:
    """Of an update; of a device of which nothing is known, in units of its own."""
    assert memory.recomputed is not None
    if clock is None:
        return 1 + memory.recomputed / model.layers / 3
    return sum(clock.update(trained, model.work.tokens, 1, memory) for trained in model.trained.values())
