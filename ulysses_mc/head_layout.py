"""Which query and key/value heads each rank holds after the exchange."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .parallel_state.errors import HeadDivisibilityError


@dataclass(frozen=True)
class HeadLayout:
    """Contiguous runs of a tensor-parallel rank's heads, one run for each Ulysses rank.

    Tensor parallelism cuts first: its ranks hold h = H/T query heads and k = max(K/T, 1)
    key/value heads each. The h heads then go to the P Ulysses ranks in runs whose sizes
    differ by at most one, placed so that the fewest key/value heads are copied, larger runs
    first among equals. A rank receives exactly the key/value heads that its query heads read.

    Args:
        num_heads: query heads H of the model.
        num_kv_heads: key/value heads K of the model.
        ulysses_parallel_size: P.
        tensor_model_parallel_size: T.
        uneven_heads: whether runs of different sizes (or an irregular query-to-key/value
            ratio on some rank) are allowed. They are exact; the largest run sets the pace.

    Raises:
        HeadDivisibilityError: T does not divide H, T and K do not divide one another, K does
            not divide H, or the layout is uneven and `uneven_heads` is False.
    """

    num_heads: int
    num_kv_heads: int
    ulysses_parallel_size: int
    tensor_model_parallel_size: int = 1
    uneven_heads: bool = True

    def __post_init__(self) -> None:
        _check_tensor_split(self)
        if not self.uneven_heads and self.kind == "uneven":
            raise _uneven_error(self)

    # -- what a tensor-parallel rank holds before the exchange --------------------------------

    @property
    def local_heads(self) -> int:
        """h: query heads of one tensor-parallel rank."""
        return self.num_heads // self.tensor_model_parallel_size

    @property
    def local_kv_heads(self) -> int:
        """k: key/value heads of one tensor-parallel rank (Megatron repeats them if K < T)."""
        return max(self.num_kv_heads // self.tensor_model_parallel_size, 1)

    # -- what a Ulysses rank holds after it ---------------------------------------------------

    @cached_property
    def query_heads(self) -> tuple[range, ...]:
        """Per Ulysses rank, its query heads, counted within the tensor-parallel rank."""
        sizes = _run_sizes(self.local_heads, self.local_kv_heads, self.ulysses_parallel_size)
        runs, start = [], 0
        for size in sizes:
            runs.append(range(start, start + size))
            start += size
        return tuple(runs)

    @cached_property
    def kv_heads(self) -> tuple[range, ...]:
        """Per Ulysses rank, the key/value heads that its query heads read."""
        per_kv = self.local_heads // self.local_kv_heads
        return tuple(
            range(run.start // per_kv, (run.stop - 1) // per_kv + 1) if run else range(0)
            for run in self.query_heads
        )

    def kv_expansion(self, rank: int) -> list[int] | None:
        """For each query head of `rank`, the index of its key/value head among the rank's own.

        None where that is the regular grouped-query pattern, which every attention backend
        knows; otherwise keys and values are expanded by it, after the exchange.
        """
        per_kv = self.local_heads // self.local_kv_heads
        first = self.kv_heads[rank].start
        index = [head // per_kv - first for head in self.query_heads[rank]]
        held = len(self.kv_heads[rank])
        if not index or (len(index) % held == 0 and index == _regular(len(index), held)):
            return None
        return index

    @property
    def kind(self) -> str:
        """'even', 'replicated' (every key/value head on several ranks alike) or 'uneven'."""
        h, k, size = self.local_heads, self.local_kv_heads, self.ulysses_parallel_size
        if h % size == 0 and k % size == 0:
            return "even"
        return "replicated" if h % size == 0 and size % k == 0 else "uneven"

    @property
    def imbalance(self) -> float:
        """Query heads of the busiest rank over the mean, minus 1: 0.2 is 20% longer attention."""
        busiest = max(len(run) for run in self.query_heads)
        return busiest * self.ulysses_parallel_size / self.local_heads - 1

    @property
    def kv_copies(self) -> int:
        """Key/value heads received by all ranks together; equals `local_kv_heads` if even."""
        return sum(len(run) for run in self.kv_heads)

    def bytes_received(
        self,
        rank: int,
        lengths: tuple[int, ...],
        *,
        batch_size: int,
        head_dim: int,
        element_size: int,
        value_head_dim: int | None = None,
    ) -> int:
        """Bytes that `rank` receives in one forward pass: Q, K, V and then O. The lower bound.

        Backward is the mirror image: there the rank receives what it sent (`bytes_sent`).

        Args:
            rank: rank in the Ulysses group.
            lengths: tokens per rank before the exchange (`SequenceLayout.lengths`).
            batch_size, head_dim, value_head_dim, element_size: b, d, d of V if other, bytes.
        """
        value_dim = head_dim if value_head_dim is None else value_head_dim
        query, kv = len(self.query_heads[rank]), len(self.kv_heads[rank])
        missing_tokens = sum(lengths) - lengths[rank]
        there = missing_tokens * (query * head_dim + kv * (head_dim + value_dim))
        back = lengths[rank] * (self.local_heads - query) * value_dim
        return batch_size * element_size * (there + back)

    def bytes_sent(
        self,
        rank: int,
        lengths: tuple[int, ...],
        *,
        batch_size: int,
        head_dim: int,
        element_size: int,
        value_head_dim: int | None = None,
    ) -> int:
        """Bytes that `rank` sends in one forward pass; arguments as in `bytes_received`."""
        value_dim = head_dim if value_head_dim is None else value_head_dim
        query = self.local_heads - len(self.query_heads[rank])
        kv = self.kv_copies - len(self.kv_heads[rank])
        there = lengths[rank] * (query * head_dim + kv * (head_dim + value_dim))
        missing_tokens = sum(lengths) - lengths[rank]
        back = missing_tokens * len(self.query_heads[rank]) * value_dim
        return batch_size * element_size * (there + back)

    def describe(self) -> str:
        """One line for a person: kind, runs, copies of key/value heads, imbalance."""
        runs = ",".join(str(len(run)) for run in self.query_heads)
        copies = f", {self.kv_copies} key/value head copies for {self.local_kv_heads}"
        return (
            f"{self.kind}: {self.local_heads} query heads over {self.ulysses_parallel_size} "
            f"Ulysses ranks: {runs}"
            + (copies if self.kv_copies != self.local_kv_heads else "")
            + (f", {self.imbalance:.0%} imbalance" if self.imbalance else "")
        )

    def nearest_even(self) -> str:
        """The nearest settings whose layout is not uneven, for a message."""
        tensor, ulysses = self.tensor_model_parallel_size, self.ulysses_parallel_size
        sizes = [n for n in range(1, self.local_heads + 1) if self._is_even_at(tensor, n)]
        nearest = [n for n in sizes if n < ulysses][-1:] + [n for n in sizes if n > ulysses][:1]
        parts = [f"ulysses_parallel_size {_join(nearest)} with tensor_model_parallel_size {tensor}"]
        divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
        other = [n for n in divisors if n != tensor and self._is_even_at(n, ulysses)]
        if other:
            best = min(other, key=lambda n: (abs(n - tensor), n))
            parts.append(f"{ulysses} with tensor_model_parallel_size {best}")
        if not self.uneven_heads:
            runs = ",".join(str(len(run)) for run in self.query_heads)
            parts.append(f"or uneven_heads=True ({runs}: {self.imbalance:.0%} imbalance)")
        return "; ".join(parts) + "."

    def _is_even_at(self, tensor: int, ulysses: int) -> bool:
        try:
            return HeadLayout(self.num_heads, self.num_kv_heads, ulysses, tensor).kind != "uneven"
        except HeadDivisibilityError:
            return False


def _regular(heads: int, kv_heads: int) -> list[int]:
    return [head * kv_heads // heads for head in range(heads)]


@lru_cache(maxsize=1024)
def _run_sizes(heads: int, kv_heads: int, ranks: int) -> tuple[int, ...]:
    """Sizes of the ranks' runs: within one of each other, fewest key/value copies, larger first."""
    small, larger = divmod(heads, ranks)
    if larger == 0 or small == 0:  # no choice, or one head at most: every order copies the same
        return tuple(small + (rank < larger) for rank in range(ranks))
    per_kv = heads // kv_heads

    # best[n] = (copies, -sizes of the ranks so far ...) over placements with n larger runs.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for rank in range(ranks):
        following: dict[int, tuple[int, tuple[int, ...]]] = {}
        for used, (copies, negated) in best.items():
            start = rank * small + used
            for extra in (1, 0):
                if used + extra > larger or larger - used - extra > ranks - rank - 1:
                    continue
                stop = start + small + extra
                touched = (stop - 1) // per_kv - start // per_kv + 1
                candidate = (copies + touched, (*negated, -(small + extra)))
                if used + extra not in following or candidate < following[used + extra]:
                    following[used + extra] = candidate
        best = following
    return tuple(-size for size in best[larger][1])


def _check_tensor_split(layout: HeadLayout) -> None:
    heads, kv, tensor = layout.num_heads, layout.num_kv_heads, layout.tensor_model_parallel_size
    request = f"{heads} query heads and {kv} key/value heads over " + _sizes(layout)
    if min(heads, kv, tensor, layout.ulysses_parallel_size) < 1:
        raise HeadDivisibilityError(request + ".", rule="every number is at least 1")
    if heads % kv:
        raise HeadDivisibilityError(
            request + ".",
            f"{heads} % {kv} = {heads % kv}.",
            "the key/value heads divide the query heads",
            f"{_join(n for n in _near(kv, heads) if heads % n == 0)} key/value heads.",
        )
    if heads % tensor or (kv % tensor and tensor % kv):
        fits = [n for n in range(1, heads + 1) if heads % n == 0 and (kv % n == 0 or n % kv == 0)]
        raise HeadDivisibilityError(
            request + ".",
            f"{heads} % {tensor} = {heads % tensor}; {kv} % {tensor} = {kv % tensor}, "
            f"{tensor} % {kv} = {tensor % kv}.",
            "tensor_model_parallel_size divides the query heads, and divides or is a multiple "
            "of the key/value heads (Megatron's rule)",
            "tensor_model_parallel_size "
            + _join(sorted(sorted(fits, key=lambda n: abs(n - tensor))[:2]))
            + ".",
        )


def _uneven_error(layout: HeadLayout) -> HeadDivisibilityError:
    heads, kv = layout.local_heads, layout.local_kv_heads
    tensor, ulysses = layout.tensor_model_parallel_size, layout.ulysses_parallel_size
    left = f"{heads} heads over {ulysses} Ulysses ranks leaves {heads % ulysses} over"
    if heads % ulysses == 0:
        left = f"{kv} key/value heads over {ulysses} Ulysses ranks is neither whole nor 1 over n"
    return HeadDivisibilityError(
        f"{layout.num_heads} query heads and {layout.num_kv_heads} key/value heads over "
        f"{_sizes(layout)} with uneven_heads=False.",
        f"Each tensor-parallel rank holds {layout.num_heads} / {tensor} = {heads} query and "
        f"{layout.num_kv_heads} / {tensor} -> {kv} key/value heads; {left}.",
        f"ulysses_parallel_size divides the query heads of a tensor-parallel rank ({heads}), "
        f"and divides or is a multiple of its key/value heads ({kv}).",
        layout.nearest_even(),
    )


def _sizes(layout: HeadLayout) -> str:
    return (
        f"tensor_model_parallel_size={layout.tensor_model_parallel_size} x "
        f"ulysses_parallel_size={layout.ulysses_parallel_size}"
    )


def _near(value: int, limit: int) -> list[int]:
    return [n for n in range(max(1, value // 2), min(limit, 2 * value) + 1)]


def _join(values: Iterable[int]) -> str:
    return " or ".join(map(str, values))
