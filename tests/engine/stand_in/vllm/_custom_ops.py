"""The rotary embedding in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotates ``query`` and ``key`` in place by their positions.

    :param positions: ``[tokens]``, integers.
    :param query: ``[tokens, heads * head_size]``.
    :param key: ``[tokens, kv_heads * head_size]``, or ``None``.
    :param cos_sin_cache: ``[max_position, rotary_dim]``: cosines, then sines, of each position.
    :param is_neox: pairs are (i, i + rotary_dim / 2); otherwise (2i, 2i + 1).
    """
    cos, sin = cos_sin_cache[positions.flatten()].float().unsqueeze(1).chunk(2, dim=-1)
    for tensor in (query, key):
        if tensor is not None:
            _rotate(tensor, cos, sin, head_size, is_neox)


def _rotate(
    tensor: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_size: int, is_neox: bool
) -> None:
    rotary_dim = 2 * cos.shape[-1]
    heads = tensor.view(cos.shape[0], -1, head_size)[..., :rotary_dim]
    if is_neox:
        first, second = heads.chunk(2, dim=-1)
    else:
        first, second = heads[..., 0::2], heads[..., 1::2]
    a, b = first.float(), second.float()
    first.copy_(a * cos - b * sin)
    second.copy_(b * cos + a * sin)
