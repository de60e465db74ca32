"""Which heads, groups and columns of a layer one rank has, where their number is no multiple of the ranks."""

from __future__ import annotations

from draftwing.errors import ConfigError
from draftwing.parallel.ranks import Ranks, Share


def own_heads(ranks: Ranks, heads: int, groups: int, what: str) -> tuple[range, range]:
    """Returns which heads one rank has, and which groups these are of: whole groups, or of one, which other ranks
    have, too, some heads. what: they are called. Raises ConfigError for fewer heads than ranks."""
    if ranks.size > heads:
        raise ConfigError(
            f"--tp-size {ranks.size}: expected at most {heads}, a rank for each of the model's {what}; found "
            f"{ranks.size}"
        )
    each = heads // groups
    if groups >= ranks.size:
        start, size, _ = ranks.even_share(groups)
        return range(start * each, (start + size) * each), range(start, start + size)
    group = ranks.rank * groups // ranks.size
    among = ranks_of_group(ranks, groups)
    start, end = (group * each - -(at - among.start) * each // len(among) for at in (ranks.rank, ranks.rank + 1))
    return range(start, end), range(group, group + 1)


def own_channels(ranks: Ranks, channels: int, what: str) -> int:
    """Returns how many channels one rank has of the model's `what`. Raises ConfigError where ranks would differ."""
    if channels % ranks.size:
        raise ConfigError(
            f"--tp-size {ranks.size}: expected a number that divides the {channels} channels of the model's {what}; "
            f"found {ranks.size}"
        )
    return channels // ranks.size


def ranks_of_group(ranks: Ranks, groups: int) -> range:
    """Returns those that have heads of this rank's group, where there are fewer groups than ranks."""
    group = ranks.rank * groups // ranks.size
    first, end = (-(-at * ranks.size // groups) for at in (group, group + 1))
    return range(first, end)


BLOCKS = 64, 32  # columns that kernels, or a format's blocks, want together
MANY = 8  # blocks that a rank has at least, of which others may have one more or less


def width_share(ranks: Ranks, whole: int, block: int = 1) -> Share:
    """Returns the share of so many columns between two matrices: the same on all ranks where that is whole blocks, else
    as many blocks as can be. Where there are few of these, the same, which may leave a rest: `LayerConfig.spread`
    refuses that. block: of so many columns each rank has whole ones, however few, if these are the columns of some."""
    size, rest = divmod(whole, ranks.size)
    if size % block and not whole % block and whole >= block * ranks.size:
        return ranks.even_share(whole, block)
    if rest or size % min(BLOCKS):
        for block in BLOCKS:
            if whole % block == 0 and whole // block >= MANY * ranks.size:
                return ranks.even_share(whole, block)
    return Share(ranks.rank * size, size, whole)
