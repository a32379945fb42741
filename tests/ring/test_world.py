"""What processes say to each other, where it fails: whose end it means."""

import pytest
import torch
import torch.distributed as dist

from hf_infcl.ring.world import World


def refusing(rank):
    """A send or receive that fails when posted, as gloo's does where the peer's connection is closed already."""

    def post(tensor, group=None, group_dst=None, group_src=None, tag=0):
        if rank in (group_dst, group_src):
            raise RuntimeError("Connection closed by peer")

    return post


@pytest.mark.parametrize("gone", [0, 2])
def test_a_header_that_cannot_be_posted_names_the_rank(monkeypatch, gone):
    world = World(object(), rank=1, size=3)
    monkeypatch.setattr(World, "_host_group", lambda self: self.group)
    monkeypatch.setattr(dist, "isend", refusing(gone))
    monkeypatch.setattr(dist, "irecv", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match=f"rank {gone} of 3 ended .* while rank 1 waited for it.*closed by peer"):
        world.headers(torch.tensor([1, 2]))


def test_a_header_that_cannot_be_received_names_the_rank(monkeypatch):
    world = World(object(), rank=0, size=3)
    monkeypatch.setattr(World, "_host_group", lambda self: self.group)
    monkeypatch.setattr(dist, "isend", lambda *_, **__: None)
    monkeypatch.setattr(dist, "irecv", refusing(2))
    with pytest.raises(RuntimeError, match="rank 2 of 3 ended"):
        world.headers(torch.tensor([1, 2]))


@pytest.mark.parametrize(("size", "named"), [(2, "rank 1 of 2"), (4, "rank 1 or 3 of 4")])
def test_rows_that_cannot_be_posted_name_both_neighbours(monkeypatch, size, named):
    def refuse(operations):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "batch_isend_irecv", refuse)
    monkeypatch.setattr(dist, "P2POp", lambda *_, **__: None)
    rows = torch.zeros(2)
    with pytest.raises(RuntimeError, match=f"{named} ended or stopped answering while rank 0"):
        World(object(), rank=0, size=size).post([rows], [rows], 0)
