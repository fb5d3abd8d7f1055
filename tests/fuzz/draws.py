"""What a fuzz test draws: heads, tokens, documents, masks, memory orders, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hypothesis import strategies as st

Chunks = tuple[tuple[tuple[int, int], ...], ...]  # of a SequenceLayout
MAX_ULYSSES = 8

# Every subset of [b, h, s, s_kv] that broadcasts: a dim is whole (its letter), 1, or left out.
BROADCASTS = [
    "".join(letter if keep >> i & 1 else "1" for i, letter in enumerate("bhsu"[skip:]))
    for skip in range(5)
    for keep in range(2 ** (4 - skip))
]


@dataclass(frozen=True)
class Draw:
    """One attention layer over `tensor` x `ulysses` ranks; its repr is enough to repeat it."""

    heads: int
    kv_heads: int
    tensor: int
    ulysses: int
    batch: int | None  # None: packed, [t, h, d]
    head_dim: int
    value_dim: int
    layout: Chunks
    kv_layout: Chunks | None = None  # of keys and values, if they are other tokens
    documents: tuple[int, ...] | None = None  # lengths; what is missing is padding
    kv_documents: tuple[int, ...] | None = None
    causal: bool = False
    window: tuple[int, int] | None = None
    mask: str | None = None  # one of BROADCASTS
    bias: str | None = None
    slopes: str | None = None  # "h" or "bh"
    sinks: bool = False
    scale: float | None = None
    softcap: float | None = None
    joint: int = 0  # tokens that every rank holds
    joint_front: bool = True
    dtype: str = "float64"
    inputs: str = "plain"  # memory order, see `in_order`
    gradient: str = "plain"
    local: str = "sdpa"  # local attention: sdpa, flex (forward only on a CPU), own
    transport: str = "auto"
    counted: bool = False  # whether bytes and collectives are counted
    no_layout: bool = False  # whether the module is built without a layout (equal lengths)
    seed: int = 0

    @property
    def kind(self) -> str:
        """By the definition, not by the library: even, replicated or uneven."""
        h, k = self.heads // self.tensor, max(self.kv_heads // self.tensor, 1)
        if h % self.ulysses:
            return "uneven"
        if k % self.ulysses == 0:
            return "even"
        return "replicated" if self.ulysses % k == 0 else "uneven"

    def __repr__(self) -> str:
        shown = [(field, getattr(self, field.name)) for field in fields(self)]
        return f"Draw({', '.join(f'{f.name}={v!r}' for f, v in shown if v != f.default)})"


def tokens(layout: Chunks) -> int:
    return sum(stop - start for chunks in layout for start, stop in chunks)


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    """Every combination that the library calls exact."""
    heads, kv_heads, tensor, ulysses = draw(head_counts())
    packed = draw(st.booleans())
    batch = None if packed else draw(st.integers(1, 3))
    layout = draw(layouts(ulysses))
    kv_layout = draw(layouts(ulysses)) if draw(st.integers(0, 5)) == 0 else None
    joint = draw(st.integers(1, 3)) if draw(st.integers(0, 7)) == 0 else 0
    local = draw(st.sampled_from(["sdpa"] * 8 + ["own", "flex"]))
    s = joint + tokens(layout)
    padding = local != "own"  # the oracle, which `own` is, takes padding for a document
    documents = kv_documents = None
    if packed or draw(st.integers(0, 4)) == 0:
        documents = draw(document_lengths(s, padding))
        if kv_layout is not None:
            s_kv = joint + tokens(kv_layout)
            kv_documents = draw(document_lengths(s_kv, padding, len(documents)))
    even = len({sum(b - a for a, b in chunks) for chunks in layout}) == 1
    contiguous = layout == tuple(sorted(layout)) and all(len(chunks) == 1 for chunks in layout)
    return Draw(
        heads,
        kv_heads,
        tensor,
        ulysses,
        batch,
        head_dim=draw(st.sampled_from([1, 2, 3, 4, 6, 8])),
        value_dim=draw(st.sampled_from([1, 2, 3, 4, 5, 8])),
        layout=layout,
        kv_layout=kv_layout,
        documents=documents,
        kv_documents=kv_documents,
        **draw(masks(local, batch)),
        joint=joint,
        joint_front=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float64", "float32"])),
        inputs=draw(st.sampled_from(["plain", "plain", *ORDERS])),
        gradient=draw(st.sampled_from(["plain", "plain", "expanded", *ORDERS])),
        local=local,
        transport=draw(st.sampled_from(["auto", "p2p", "all_to_all"])),
        counted=local != "flex" and draw(st.integers(0, 3)) == 0,
        no_layout=even and contiguous and kv_layout is None and draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


ORDERS = ("tokens first", "heads first", "reversed", "fused")


@st.composite
def head_counts(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(H, K, T, P): T divides H, and T and K divide one another (Megatron's rule)."""
    ulysses = draw(st.sampled_from([2, 4, 3, 8, 6, 5, 7, 1, 2, 4]))
    tensor = draw(st.sampled_from([1] * 5 + [2, 2, 2, 3, 4, 8]))
    kind = draw(st.sampled_from(["any", "replicated", "even", "any"]))
    if kind == "even":
        kv = ulysses * draw(st.integers(1, 2))
        h = kv * draw(st.integers(1, 3))
    elif kind == "replicated":
        kv = draw(st.sampled_from([n for n in range(1, max(ulysses, 2)) if ulysses % n == 0]))
        h = ulysses * draw(st.integers(1, 3))
    else:
        kv = draw(st.integers(1, 6))
        h = kv * draw(st.integers(1, 4))
    if kv > 1:
        return h * tensor, kv * tensor, tensor, ulysses
    divisors = [n for n in range(1, tensor + 1) if tensor % n == 0]  # Megatron repeats K < T
    return h * tensor, draw(st.sampled_from(divisors)), tensor, ulysses


@st.composite
def layouts(draw: st.DrawFn, ranks: int) -> Chunks:
    kind = draw(st.sampled_from(["contiguous", "zigzag", "lengths", "lengths", "chunks"]))
    if kind == "zigzag":
        n = draw(st.integers(1, 2))
        return tuple(
            ((r * n, (r + 1) * n), ((2 * ranks - 1 - r) * n, (2 * ranks - r) * n))
            for r in range(ranks)
        )
    s = draw(st.integers(1, 24))
    if kind == "contiguous":
        small, longer = divmod(s, ranks)
        stops = [(r + 1) * small + min(r + 1, longer) for r in range(ranks)]
        return tuple(((a, b),) for a, b in zip([0, *stops], stops, strict=False))
    pieces = ranks if kind == "lengths" else draw(st.integers(ranks, 2 * ranks + 2))
    cuts = draw(st.lists(st.integers(0, s), min_size=pieces - 1, max_size=pieces - 1).map(sorted))
    chunks = list(zip([0, *cuts], [*cuts, s], strict=True))
    if kind == "lengths":
        return tuple((chunk,) for chunk in chunks)
    held: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for chunk in draw(st.permutations(chunks)):
        held[draw(st.integers(0, ranks - 1))].append(chunk)
    return tuple(map(tuple, held))


@st.composite
def document_lengths(
    draw: st.DrawFn, s: int, padding: bool, number: int | None = None
) -> tuple[int, ...]:
    """Lengths, many of them 1 and some 0, that leave padding at the end if that is allowed."""
    end = draw(st.integers(0, s)) if padding and draw(st.integers(0, 2)) == 0 else s
    if number is None and draw(st.booleans()):  # many of one token
        lengths: list[int] = []
        while sum(lengths) < end:
            length = draw(st.sampled_from([1, 1, 1, 2, 3, 5, 9]))
            lengths.append(min(length, end - sum(lengths)))
        return tuple(lengths)
    number = draw(st.integers(1, 5)) if number is None else number
    if number == 0:
        return ()
    cuts = draw(st.lists(st.integers(0, end), min_size=number - 1, max_size=number - 1).map(sorted))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, end], strict=True))


@st.composite
def masks(draw: st.DrawFn, local: str, batch: int | None) -> dict[str, Any]:
    """What restricts and changes the logits: each alone, or all kinds together."""
    names = ("window", "mask", "bias", "slopes", "sinks", "scale", "softcap")
    which = draw(st.sampled_from([(), *((name,) for name in names), None, None]))
    some = [name for name in names if draw(st.booleans())] if which is None else which
    reach = st.integers(-1, 6)
    return {
        "causal": draw(st.booleans()),
        "window": (draw(reach), draw(reach)) if "window" in some else None,
        "mask": draw(st.sampled_from(BROADCASTS)) if "mask" in some else None,
        "bias": draw(st.sampled_from(BROADCASTS)) if "bias" in some else None,
        "slopes": draw(st.sampled_from(["h", "bh"])) if "slopes" in some else None,
        "sinks": "sinks" in some,
        "scale": draw(st.sampled_from([0.1, 0.5, 1.0, 2.0])) if "scale" in some else None,
        "softcap": 0.8 if "softcap" in some and local != "sdpa" else None,
    }
