"""Cut the samples of one optimiser step into micro-batches. The step itself is never changed."""


def pack(lengths: list[int], budget: int) -> list[list[int]]:
    """First-fit-decreasing bin packing: indices in bins of at most `budget` tokens (a longer sample is alone)."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for b, free in enumerate(room):
            if lengths[i] <= free:
                bins[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(budget - lengths[i])
    return bins


def chunk(lengths: list[int], count: int) -> list[list[int]]:
    """Micro-batches of `count` samples. Neighbours in length go together, so that little is lost to padding."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[begin : begin + count] for begin in range(0, len(order), count)]
