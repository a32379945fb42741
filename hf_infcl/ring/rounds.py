"""The one hop loop: how the text side travels round the processes, and how what it gathers comes home.

At step t of a round, rank r holds the texts of rank r - t. Their block (read only) is posted to rank r + 1 before the
arithmetic on it begins; what the arithmetic makes of it (column statistics, gradients, best-k lists: the *yield*)
follows one hop late, is merged with the next rank's on the way, and is home after the last step:

    step            0           1              2              ...  W - 1
    payload     post 1st    post 2nd       post 3rd
    arithmetic  own block   block of r-1   block of r-2            block of r+1
    yield       stays home  post ------->  merge, post ----------> merge, post --> home, merge

The yield of the own block stays at home until the others' arrives, which saves a hop. A rank holds its own rows, one
visiting block, one arriving, and yields in as many places: O(local rows), whatever W.

Two-level rings (nodes inside a cluster) would replace `World.owner`, `World.following` and `World.preceding`, the only
things here that say who holds what when.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_infcl.ops import Side
from hf_infcl.ring.layout import Layout
from hf_infcl.ring.shards import Shard
from hf_infcl.ring.world import PAYLOAD_TAG, YIELD_TAG

# What a block's arithmetic makes for the visiting rows: tensors whose first dimension is rows of `Shard.batch`.
Yield = tuple[Tensor, ...]
# Arithmetic on this rank's rows and visiting texts with their extra tensors. It must not write to what it is given.
Visit = Callable[[Shard, tuple[Tensor, ...]], Yield]
# Takes a yield in, in place: merge(into, other). Associative, and the same bits whichever of two is taken in.
Merge = Callable[[Yield, Yield], None]


def around(
    layout: Layout,
    texts: Shard,
    extra: Sequence[Tensor],
    visit: Visit,
    merge: Merge,
    *,
    wire: torch.dtype | None = None,
) -> Yield:
    """Brings every rank's texts past this rank's rows, and this rank's texts past everybody's.

    Args:
        layout: where all rows stand.
        texts: this rank's texts, with ids and bank.
        extra: further tensors that travel with them, one row for each row of ``texts.batch``.
        visit: called with each shard of texts that passes (offsets set) and its extra tensors: with this rank's own
            first, then with one after the other; where the texts are gathered, once with all of them.
        merge: merges two yields for the same texts; the second one may have the dtype `wire`.
        wire: dtype in which yields travel; None for their own.

    Returns:
        What all ranks' visits together yield for this rank's texts. A process alone: its own visit's yield, as is.

    Raises:
        RuntimeError: a neighbour is gone; names its rank.
    """
    if layout.world.is_alone:
        return visit(texts, tuple(extra))
    go = _gather if layout.gathers else _hop
    return go(layout, _Baggage.of(texts, extra), visit, merge, wire)


class _Baggage:
    """A shard of texts as the tensors that travel: those of the batch's rows, and those of the bank's."""

    def __init__(self, batch: list[Tensor], bank: list[Tensor], has_ids: bool):
        self.batch, self.bank, self.has_ids = batch, bank, has_ids

    @classmethod
    def of(cls, texts: Shard, extra: Sequence[Tensor]) -> "_Baggage":
        ids = [] if texts.batch.ids is None else [texts.batch.ids]
        bank = [] if texts.bank is None else [texts.bank.embeds]
        if texts.bank is not None and ids:
            assert texts.bank.ids is not None, "a bank has ids where the batch has"
            bank.append(texts.bank.ids)
        if not bank:  # this rank's part may be empty where others' is not
            bank = [tensor[:0] for tensor in (texts.batch.embeds, *ids)]
        return cls([tensor.contiguous() for tensor in (texts.batch.embeds, *ids, *extra)], bank, bool(ids))

    def empty(self, rows: int, bank_rows: int) -> "_Baggage":
        """Room for the same of another rank."""
        return _Baggage(
            [tensor.new_empty(rows, *tensor.shape[1:]) for tensor in self.batch],
            [tensor.new_empty(bank_rows, *tensor.shape[1:]) for tensor in self.bank],
            self.has_ids,
        )

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.batch, *(tensor.contiguous() for tensor in self.bank)]

    def unpack(self, offset: int, bank_offset: int) -> tuple[Shard, tuple[Tensor, ...]]:
        first = 2 if self.has_ids else 1
        batch = Side(self.batch[0], offset, self.batch[1] if self.has_ids else None)
        bank = None
        if len(self.bank[0]):
            bank = Side(self.bank[0], bank_offset, self.bank[1] if self.has_ids else None)
        return Shard(batch, bank), tuple(self.batch[first:])


def _hop(layout: Layout, mine: _Baggage, visit: Visit, merge: Merge, wire: torch.dtype | None) -> Yield:
    world = layout.world
    here = mine
    home: Yield = ()
    incoming: Yield = ()  # what the preceding rank has made for the texts that come here next
    wait_for_yield: Callable[[], None] | None = None
    for step in range(world.size):
        owner, follower = world.owner(step), world.owner(step + 1)
        arriving = here
        wait_for_payload: Callable[[], None] | None = None
        if step + 1 < world.size:
            arriving = mine.empty(layout.batch_sizes[follower], layout.bank_sizes[follower])
            wait_for_payload = world.post(here.tensors, arriving.tensors, PAYLOAD_TAG)
        made = visit(*here.unpack(layout.offset(owner), layout.bank_offset(owner)))
        if step == 0:
            home = made
        elif made:
            if wait_for_yield is not None:
                wait_for_yield()
                merge(made, incoming)
            del incoming  # what has been merged makes room for the next
            # The last step's follower is this rank: what arrives then has been to everyone.
            rows = layout.batch_sizes[follower]
            outgoing = [tensor.to(wire or tensor.dtype).contiguous() for tensor in made]
            incoming = tuple(tensor.new_empty(rows, *tensor.shape[1:]) for tensor in outgoing)
            wait_for_yield = world.post(outgoing, incoming, YIELD_TAG)
            del outgoing
        del made
        if wait_for_payload is not None:
            wait_for_payload()
        here = arriving
    if wait_for_yield is not None:
        wait_for_yield()
        merge(home, incoming)
    return home


def _gather(layout: Layout, mine: _Baggage, visit: Visit, merge: Merge, wire: torch.dtype | None) -> Yield:
    world, sizes = layout.world, layout.batch_sizes
    everyone = _Baggage(
        [world.gather(tensor, sizes) for tensor in mine.batch],
        [world.gather(tensor, layout.bank_sizes) if sum(layout.bank_sizes) else tensor for tensor in mine.bank],
        mine.has_ids,
    )
    made = visit(*everyone.unpack(0, layout.rows))
    if not made:
        return ()
    parts = [world.scatter(tensor.to(wire or tensor.dtype), sizes) for tensor in made]
    # What the others are merged into keeps its own dtype.
    home, *others = zip(*parts, strict=True)
    home = tuple(part.to(tensor.dtype) for part, tensor in zip(home, made, strict=True))
    for other in others:
        merge(home, other)
    return home
