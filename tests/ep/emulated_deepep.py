"""A library object with DeepEP's Buffer, emulated by gathering everything everywhere: its documented
outputs, garbage included.

Signatures are the real ones, so that a wrong keyword fails here as it would there.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

GARBAGE = float("nan")
topk_idx_t = torch.int64


def gathered(value, group):
    """Every rank's value, in rank order."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


class Config:
    """Buffer-size hints."""

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 0


def with_tail(rows, size, value):
    """`rows` followed by `value` up to `size` rows."""
    assert len(rows) <= size
    tail = torch.full([size - len(rows), *rows.shape[1:]], value, dtype=rows.dtype)
    return torch.cat([rows, tail])


def fp8_rows(codes, scales):
    """Codes and scales of a token as one row of bytes."""
    assert codes.dtype == torch.float8_e4m3fn and codes.is_contiguous()
    assert scales.dtype == torch.float32 and scales.is_contiguous()
    assert codes.shape[1] % 128 == 0 and scales.shape == (len(codes), codes.shape[1] // 128)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], 1)


def fp8_pair(received, hidden, rows):
    """The pair that arrives; rows beyond the real ones are NaN."""
    codes = with_tail(received[:, :hidden], rows, 0x7F).contiguous().view(torch.float8_e4m3fn)
    scales = received[:, hidden:].contiguous().view(torch.float32)
    return codes, with_tail(scales.reshape(len(received), hidden // 128), rows, GARBAGE)


class Buffer:
    """Weights are 0 at foreign slots, worst-case rows have ids -1 and garbage
    elsewhere.
    """

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0):
        self.group, self.rank = group, dist.get_rank(group)
        self.group_size = dist.get_world_size(group)
        self.num_nvl_bytes = num_nvl_bytes

    @staticmethod
    def get_dispatch_config(num_ranks):
        return Config()

    @staticmethod
    def get_combine_config(num_ranks):
        return Config()

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False,
        allocate_on_comm_stream=False,
    ):  # fmt: skip
        local = num_experts // self.group_size
        owner = torch.where(topk_idx >= 0, topk_idx // local, -1)
        in_rank = torch.stack([(owner == r).any(1) for r in range(self.group_size)], 1)
        counts = [int((topk_idx == e).sum()) for e in range(num_experts)]
        per_expert = torch.tensor(counts, dtype=torch.int32)
        return in_rank.sum(0).to(torch.int32), None, per_expert, in_rank, None

    @staticmethod
    def _arrived(rows, hidden, size):
        plain = hidden is None
        return with_tail(rows, size, GARBAGE) if plain else fp8_pair(rows, hidden, size)

    def dispatch(
        self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None,
        is_token_in_rank=None, num_tokens_per_expert=None, topk_idx=None, topk_weights=None,
        expert_alignment=1, num_worst_tokens=0, config=None, previous_event=None,
        async_finish=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        hidden = None
        if isinstance(x, tuple):
            hidden, x = x[0].shape[1], fp8_rows(*x)
        bytes_of_a_row = x.shape[1] * x.element_size()
        assert bytes_of_a_row * self.group_size <= self.num_nvl_bytes, "the buffer is too small"
        if handle is not None:
            assert topk_idx is None and topk_weights is None and num_worst_tokens == 0
            sources, _, rows = handle
            recv_x = self._arrived(self._redeliver(x, sources), hidden, rows)
            return recv_x, None, None, None, None, None
        assert num_tokens_per_rank.tolist() == is_token_in_rank.sum(0).tolist()
        delivery = self._deliver(x, topk_idx, topk_weights, len(num_tokens_per_expert))
        sources, recv_x, recv_idx, weights, counts = delivery
        weights = torch.where(recv_idx >= 0, weights, 0.0)
        counts = [-(-count // expert_alignment) * expert_alignment for count in counts]
        rows = num_worst_tokens or len(recv_x)
        handle = (sources, len(x), rows)
        recv_x = self._arrived(recv_x, hidden, rows)
        if num_worst_tokens:
            weights = with_tail(weights, rows, GARBAGE)
            recv_idx, counts = with_tail(recv_idx, rows, -1), []
        return recv_x, recv_idx, weights, counts, handle, None

    def combine(
        self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None,
        async_finish=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        sources, num_tokens, rows = handle
        assert len(x) == rows
        combined, per_rank = self._collect(x, topk_weights, sources, num_tokens)
        return combined, None if topk_weights is None else sum(per_rank), None

    def _deliver(self, x, ids, weights, num_experts):
        """`(source (rank, token) pairs, x rows, local ids, raw weights, counts)` of this rank."""
        assert x.dtype in (torch.bfloat16, torch.uint8) and x.is_contiguous()
        assert ids.dtype == topk_idx_t
        assert weights.dtype == torch.float32
        assert ((ids >= -1) & (ids < num_experts)).all(), "the library knows no other ids"
        local = num_experts // self.group_size
        first, sources, parts = self.rank * local, [], []
        for rank, (x_r, ids_r, weights_r) in enumerate(gathered((x, ids, weights), self.group)):
            here = (ids_r >= first) & (ids_r < first + local)
            tokens = here.any(1).nonzero()[:, 0]
            sources += [(rank, token) for token in tokens.tolist()]
            own = torch.where(here, ids_r - first, -1)
            parts.append([values[tokens] for values in (x_r, own, weights_r)])
        recv_x, recv_idx, recv_weights = map(torch.cat, zip(*parts, strict=True))
        counts = [int((recv_idx == e).sum()) for e in range(local)]
        return sources, recv_x, recv_idx, recv_weights, counts

    def _redeliver(self, x, sources):
        tokens = gathered(x, self.group)
        return torch.cat([x[:0], *(tokens[rank][token, None] for rank, token in sources)])

    def _collect(self, x, weights, sources, num_tokens):
        """Per own token: `(fp32 row sums, per rank weights)` in rank order."""
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        total = torch.zeros([num_tokens, x.shape[1]])
        per_rank = []
        for x_r, weights_r, sources_r in gathered((x, weights, sources), self.group):
            sums = None if weights_r is None else torch.zeros([num_tokens, weights_r.shape[1]])
            for row, (rank, token) in enumerate(sources_r):
                if rank == self.rank:
                    total[token] += x_r[row].float()
                    if sums is not None:
                        sums[token] += weights_r[row]
            per_rank.append(sums)
        return total.to(x.dtype), per_rank


LIBRARY = SimpleNamespace(Buffer=Buffer, topk_idx_t=topk_idx_t)
