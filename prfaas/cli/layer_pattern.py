"""The shortest way to say which layers follow each other."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Runs of equal layers, (how many, of which kind), and how often they come in this order."""

    runs: tuple[tuple[int, str], ...]
    times: int

    def __str__(self) -> str:
        """Return such as "6 x (3 kda, 1 mla)"."""
        text = ", ".join(f"{count} {kind}" for count, kind in self.runs)
        return text if self.times == 1 else f"{self.times} x ({text})"


def shortest(kinds: Sequence[str]) -> tuple[Part, ...]:
    """Return parts that give `kinds` again: fewest runs in all, then fewest parts."""
    best: list[tuple[Part, ...]] = [()] * (len(kinds) + 1)
    for start in reversed(range(len(kinds))):
        options = [(part, *best[start + length]) for part, length in _parts(tuple(kinds[start:]))]
        best[start] = min(options, key=_cost)
    return best[0]


def _cost(parts: tuple[Part, ...]) -> tuple[int, int]:
    return sum(len(part.runs) for part in parts), len(parts)


def _parts(kinds: tuple[str, ...]) -> list[tuple[Part, int]]:
    """What may come first, with the number of layers it takes: one run, or a repeated pattern."""
    runs = _runs(kinds)
    parts = [(Part(runs=runs[:1], times=1), runs[0][0])]
    for period in range(2, len(kinds) // 2 + 1):
        pattern = kinds[:period]
        times = 2
        while kinds[(times - 1) * period : times * period] == pattern:
            if len(pattern_runs := _runs(pattern)) > 1:
                parts.append((Part(runs=pattern_runs, times=times), times * period))
            times += 1
    return parts


def _runs(kinds: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    starts = [i for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    ends = [*starts[1:], len(kinds)]
    return tuple((end - start, kinds[start]) for start, end in zip(starts, ends, strict=True))
