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

import torch.distributed as dist
from torch import Tensor

from hf_infcl.ops import Side
from hf_infcl.ring.layout import Layout, wait_for
from hf_infcl.ring.shards import Shard
from hf_infcl.ring.world import World

# What a block's arithmetic makes for the visiting rows: tensors whose first dimension is rows of `Shard.batch`.
Yield = tuple[Tensor, ...]
# Arithmetic on this rank's rows and visiting texts with their extra tensors. It must not write to what it is given.
Visit = Callable[[Shard, tuple[Tensor, ...]], Yield]
# Takes a yield in, in place: merge(into, other). Associative, and the same bits whichever of two is taken in.
Merge = Callable[[Yield, Yield], None]

_PAYLOAD_TAG, _YIELD_TAG = 7_311, 7_312


def around(layout: Layout, texts: Shard, extra: Sequence[Tensor], visit: Visit, merge: Merge) -> Yield:
    """Brings every rank's texts past this rank's rows, and this rank's texts past everybody's.

    Args:
        layout: where all rows stand.
        texts: this rank's texts, with ids and bank.
        extra: further tensors that travel with them, one row for each row of ``texts.batch``.
        visit: called with each shard of texts that passes (offsets set) and its extra tensors: with this rank's own
            first, then with one after the other; where the texts are gathered, once with all of them.
        merge: merges two yields for the same texts.

    Returns:
        What all ranks' visits together yield for this rank's texts. A process alone: its own visit's yield, as is.

    Raises:
        RuntimeError: a neighbour is gone; names its rank.
    """
    if layout.world.is_alone:
        return visit(texts, tuple(extra))
    go = _gather if layout.gathers else _hop
    return go(layout, _Baggage.of(texts, extra), visit, merge)


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


class _Exchange:
    """Messages under way: to the following rank and from the preceding one."""

    def __init__(self, world: World, send: Sequence[Tensor], receive: Sequence[Tensor], tag: int):
        operations, self._peers = [], []
        for function, tensors, peer in (
            (dist.isend, send, world.following),
            (dist.irecv, receive, world.preceding),
        ):
            for tensor in tensors:
                if tensor.numel():
                    operations.append(dist.P2POp(function, tensor, group=world.group, group_peer=peer, tag=tag))
                    self._peers.append(peer)
        self._world = world
        self._sent = send  # not to be freed while under way
        self._received = tuple(receive)
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> tuple[Tensor, ...]:
        """What has arrived; what was sent may be written to again."""
        # NCCL makes one piece of work of all messages.
        peers = self._peers if len(self._works) == len(self._peers) else [self._world.preceding]
        for peer, work in zip(peers, self._works, strict=True):
            wait_for(work, peer, self._world)
        received, self._sent, self._received, self._works = self._received, (), (), []
        return received


def _hop(layout: Layout, mine: _Baggage, visit: Visit, merge: Merge) -> Yield:
    world = layout.world
    here = mine
    home: Yield = ()
    arriving: tuple[_Baggage, _Exchange] | None = None
    on_its_way: _Exchange | None = None
    for step in range(world.size):
        owner, follower = world.owner(step), world.owner(step + 1)
        if step + 1 < world.size:
            room = mine.empty(layout.batch_sizes[follower], layout.bank_sizes[follower])
            arriving = room, _Exchange(world, here.tensors, room.tensors, _PAYLOAD_TAG)
        made = visit(*here.unpack(layout.offset(owner), layout.bank_offset(owner)))
        if step == 0:
            home = made
        elif made:
            if on_its_way is not None:
                merge(made, on_its_way.wait())
                on_its_way = None  # frees what has been merged before room for the next is made
            # The last step's follower is this rank: what arrives then has been to everyone.
            rows = layout.batch_sizes[follower]
            on_its_way = _Exchange(
                world,
                [tensor.contiguous() for tensor in made],
                [tensor.new_empty(rows, *tensor.shape[1:]) for tensor in made],
                _YIELD_TAG,
            )
        del made
        if arriving is not None:
            here, exchange = arriving
            exchange.wait()
            arriving = None
    if on_its_way is not None:
        merge(home, on_its_way.wait())
    return home


def _gather(layout: Layout, mine: _Baggage, visit: Visit, merge: Merge) -> Yield:
    world, sizes = layout.world, layout.batch_sizes
    everyone = _Baggage(
        [world.gather(tensor, sizes) for tensor in mine.batch],
        [world.gather(tensor, layout.bank_sizes) if sum(layout.bank_sizes) else tensor for tensor in mine.bank],
        mine.has_ids,
    )
    made = visit(*everyone.unpack(0, layout.rows))
    own = sizes[world.rank]
    parts = []
    for tensor in made:
        received = tensor.new_empty(world.size * own, *tensor.shape[1:])
        dist.all_to_all_single(received, tensor.contiguous(), [own] * world.size, list(sizes), group=world.group)
        parts.append(received.split(own))
    if not parts:
        return ()
    home, *others = zip(*parts, strict=True)
    for other in others:
        merge(home, other)
    return home
