"""From data sets to batches: what each process reads, in which pieces."""

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from hf_infcl.data import ImageTextDataset, ImageTextStream
from hf_infcl.trainer.checks import check_eval_dataset
from hf_infcl.trainer.config import InfCLConfig
from hf_infcl.trainer.samplers import ContrastiveBatchSampler, EpochSampler, NoDuplicatesBatchSampler

logger = logging.getLogger(__name__)


def as_pairs(dataset: Any, args: InfCLConfig, *, evaluated: bool) -> Any:
    """A table with image and caption columns becomes a data set of pairs; anything else stays what it is.

    Args:
        dataset: a `datasets` table or stream, a list of rows, any other data set, a dictionary of such, or None.
        args: the configuration.
        evaluated: whether it is for evaluation. A set that is evaluated has to be the same every time, and the usual
            recalls count every caption: where training draws captions, evaluation expands them.
    """
    import datasets

    if isinstance(dataset, dict):
        return {name: as_pairs(one, args, evaluated=evaluated) for name, one in dataset.items()}
    if not is_table(dataset):
        return dataset
    kind = ImageTextStream if isinstance(dataset, datasets.IterableDataset) else ImageTextDataset
    return kind(
        dataset,
        args.image_column,
        args.caption_column,
        captions="expand" if evaluated and args.captions == "draw" else args.captions,
        empty_captions=args.empty_captions,
        on_bad_image=args.on_bad_image,
        seed=data_seed(args),
    )


def is_table(dataset: Any) -> bool:
    """Whether a data set, or some of a dictionary of such, has columns to be found and read, and no ids of its own."""
    import datasets

    if isinstance(dataset, dict):
        return any(map(is_table, dataset.values()))
    if isinstance(dataset, list) and dataset:
        return not (isinstance(dataset[0], dict) and "ids" in dataset[0])
    return isinstance(dataset, datasets.Dataset | datasets.IterableDataset)


def data_seed(args: InfCLConfig) -> int:
    """The seed of the data's order and of drawn captions."""
    return args.seed if args.data_seed is None else args.data_seed


def pins_memory(args: InfCLConfig) -> bool:
    """Whether batches lie in page-locked memory, from which copies to the GPU do not wait."""
    return args.dataloader_pin_memory and args.device.type == "cuda"


def _options(args: InfCLConfig, collate: Callable[[list[Any]], Any]) -> dict[str, Any]:
    return {
        "collate_fn": collate,
        "num_workers": args.dataloader_num_workers,
        "pin_memory": pins_memory(args),
        "persistent_workers": args.dataloader_persistent_workers,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
        "prefetch_factor": args.dataloader_prefetch_factor,
    }


def train_loader(
    dataset: Any, args: InfCLConfig, collate: Callable[[list[Any]], Any], *, batch_size: int, least_rows: int
) -> DataLoader:
    """The micro-batches of whole contrastive batches, left on the host: a step's pixels need not fit the GPU.

    Of a table each process reads its own micro-batches. A stream is read by every process, which keeps its part.

    Args:
        dataset: the training set.
        args: the configuration.
        collate: makes a batch of rows.
        batch_size: rows of a micro-batch.
        least_rows: rows that a contrastive batch needs.
    """
    if isinstance(dataset, IterableDataset):
        # Filling the last batch up, as accelerate would, means repeating the first rows.
        drop_last = args.dataloader_drop_last or args.world_size > 1
        loader = DataLoader(dataset, batch_size=batch_size, drop_last=drop_last, **_options(args, collate))
        return prepare_data_loader(loader, put_on_device=False)
    sampler = _batch_sampler(dataset, args, batch_size, least_rows)
    loader = DataLoader(dataset, batch_sampler=sampler, **_options(args, collate))
    # The sampler knows this process's share, hence one process here; what is wanted is the skipping and the epochs.
    return prepare_data_loader(
        loader, num_processes=1, process_index=0, put_on_device=False, use_seedable_sampler=False
    )


def _batch_sampler(dataset: Any, args: InfCLConfig, batch_size: int, least_rows: int) -> ContrastiveBatchSampler:
    sampler = EpochSampler(len(dataset), data_seed(args), shuffle=args.train_sampling_strategy != "sequential")
    steps, ranks = args.gradient_accumulation_steps, (args.process_index, args.world_size)
    if args.batch_sampler == "no_duplicates":
        return NoDuplicatesBatchSampler(lambda: all_ids(dataset), sampler, batch_size, steps, ranks=ranks)
    batch_sampler = ContrastiveBatchSampler(
        sampler, batch_size, steps, ranks=ranks, least_rows=least_rows, drop_last=args.dataloader_drop_last
    )
    if batch_sampler.left_out and args.process_index == 0:
        logger.warning(
            "%d of %d rows are left over in each epoch: they make no contrastive batch of %d",
            batch_sampler.left_out,
            len(dataset),
            batch_sampler.contrastive_batch_size,
        )
    return batch_sampler


def all_ids(dataset: Any) -> Tensor:
    """The ids of all rows of a data set with a method `ids(index)`, (n, m), without reading their pictures."""
    ids = torch.tensor([dataset.ids(index) for index in range(len(dataset))])
    return ids.reshape(len(ids), -1)


def eval_loader(dataset: Any, args: InfCLConfig, collate: Callable[[list[Any]], Any]) -> DataLoader:
    """Every row of the set once, in order, divided among the processes; `dataloader_drop_last` is for training.

    Raises:
        ValueError: no rows, or fewer than processes.
    """
    rank, world = args.process_index, args.world_size
    check_eval_dataset(dataset, world)
    if world > 1 and isinstance(dataset, IterableDataset):
        dataset = _EveryNth(dataset, rank, world)
    elif world > 1:
        n = len(dataset)
        dataset = Subset(dataset, range(n * rank // world, n * (rank + 1) // world))
    return DataLoader(dataset, batch_size=args.eval_batch_size, **_options(args, collate))


class _EveryNth(IterableDataset):
    """Rows rank, rank + world, rank + 2 world, ... of a stream."""

    def __init__(self, stream: IterableDataset, rank: int, world: int):
        self._stream, self._rank, self._world = stream, rank, world

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._stream), self._rank, None, self._world)


class WholeGroups:
    """A loader's length, rounded down to whole groups of micro-batches: an epoch's short last group is no step."""

    def __init__(self, loader: Any, group: int):
        self.dataset = loader.dataset
        self._length = len(loader) // group * group

    def __len__(self) -> int:
        return self._length
