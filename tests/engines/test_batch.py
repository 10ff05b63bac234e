"""Micro-batches: masks from lengths, order kept, the padding never counted as a token."""

import torch

from thinwire.engines.batch import Rows, collate, partition

CPU = torch.device("cpu")


def rows(num=5):
    return Rows(
        [[1, 2, 3][: 1 + i % 3] for i in range(num)],
        [[0] * (1 + i % 2) for i in range(num)],
        [[-0.5] * (1 + i % 2) for i in range(num)],
        list(range(num)),
        [float(i) for i in range(num)],
    )


def test_lengths_and_not_pad_ids_make_the_masks():
    """Response tokens have id 0 here, the same as the filler, and are still counted."""
    batch = collate(rows(), range(5), length_bucket=8, device=CPU)
    assert batch.input_ids_BT.shape == (5, 8)
    assert batch.response_mask_BR.sum().item() == batch.num_response_tokens == 7
    assert batch.token_mask_BT.sum(1).tolist() == [2, 4, 4, 3, 3]


def test_the_partition_keeps_rows_in_order_and_loses_none():
    ticks = partition(rows(7), mini_batch_rows=4, micro_batch_rows=3, length_bucket=1, device=CPU)
    assert [[batch.sample_B.tolist() for batch in tick] for tick in ticks] == [[[0, 1, 2], [3]], [[4, 5, 6]]]


def test_response_positions_point_at_the_sampled_tokens():
    batch = collate(rows(), range(5), length_bucket=1, device=CPU)
    row_N, slot_N = batch.response_positions()
    assert list(zip(row_N.tolist(), slot_N.tolist(), strict=True)) == [
        (0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1), (4, 0)
    ]  # fmt: skip


def test_a_row_without_response_tokens_is_carried_with_an_empty_mask():
    empty = Rows([[1, 2], [1]], [[], [3]], [[], [-1.0]], [0, 1], [0.0, 1.0])
    batch = collate(empty, range(2), length_bucket=1, device=CPU)
    assert batch.response_mask_BR.tolist() == [[False], [True]]
