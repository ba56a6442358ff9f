"""An NVFP4 cache whose rows hold codes and block scales, and that is read as plain K and V.

No engine is known here: ``sglang_nvfp4.py`` makes a KV-cache method of SGLang's out of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_plugin.api import dequantize_kv, quantize_kv_pair
from kvcache_plugin.formats import NVFP4
from kvcache_plugin.quantized import OutBuffers, QuantizedKV

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The empty buffer that goes with V has one dimension more than K's.
_V_DIMENSIONS: Final = 3


class LayerScales:
    """The scale of one side of each attention layer, by the layer's number.

    It is read off the layer whenever it is asked for. So what a reload leaves there, in place or
    as another tensor, is what K and V are written and read with from then on.

    :param name: ``"k_scale"`` or ``"v_scale"``.
    :param device: where the cache is.
    """

    def __init__(self, name: str, device: torch.device | str) -> None:
        self._name = name
        self._layers: dict[int, torch.nn.Module] = {}
        self.one = torch.ones(1, dtype=torch.float32, device=device)

    def read_from(self, layers: Iterable[Any]) -> None:
        """Take the attention layers, each with a ``layer_id``.

        Of several with the same number the first counts: the others read its cache.
        """
        self._layers = {}
        for layer in layers:
            self._layers.setdefault(layer.layer_id, layer)

    def has(self, layer_id: int) -> bool:
        """Whether the layer has a scale."""
        return self._raw(layer_id) is not None

    def __getitem__(self, numbers: slice) -> torch.Tensor:
        """The scale of the first layer of the slice: float32 of shape ``[1]``, on the device."""
        scale = self._raw(numbers.start)
        if isinstance(scale, torch.Tensor):
            return scale.detach().reshape(1)
        return self.one if scale is None else torch.full_like(self.one, scale)

    def _raw(self, layer_id: int) -> torch.Tensor | float | None:
        return getattr(self._layers.get(layer_id), self._name, None)


class PackedNVFP4:
    """Storage, writes and reads of an NVFP4 cache for attention that wants plain K and V.

    A row is a token and head: ``head_dim / 2`` bytes of codes, then ``head_dim / 16`` of block
    scales. Whatever copies rows copies both.

    :param device: where the cache is.
    :param dtype: of the K and V that are read: float32, bfloat16 or float16.
    :param scales_later: whether attention multiplies what it reads by the scales of the layer,
        where that has both. Then a read leaves them out, and is exact: a code times its block
        scale has 6 significant bits.
    """

    def __init__(
        self, *, device: torch.device | str, dtype: torch.dtype, scales_later: bool
    ) -> None:
        self.dtype = dtype
        self._scales_later = scales_later
        # SGLang hands slices of these back where a backend gives no scale with K and V.
        self.k_scales_gpu = LayerScales("k_scale", device)
        self.v_scales_gpu = LayerScales("v_scale", device)

    def read_scales_from(self, layers: Iterable[Any]) -> None:
        """Take the attention layers of a model, whose scales are those of the cache."""
        attention = tuple(layers)
        for side in (self.k_scales_gpu, self.v_scales_gpu):
            side.read_from(attention)

    def create_buffers(
        self, size: int, head_num: int, head_dim: int, layer_num: int, device: torch.device | str
    ) -> dict[str, Any]:
        """Zeroed buffers of K and V for each layer.

        :returns: ``k_buffer`` and ``v_buffer``, lists of uint8 ``[size, head_num, row]``; and
            ``k_scale_buffer`` and ``v_scale_buffer``, which are empty, since the block scales are
            in the rows: uint8 ``[size, 0]`` and ``[size, 0, 0]``. So a read can tell V from K.
        """
        shape = (size, head_num, _row(head_dim))
        k_buffer, v_buffer = (
            [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(layer_num)]
            for _ in ("k", "v")
        )
        # SGLang moves as many bytes of a buffer as its step from row to row: none of these.
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        return {
            "k_buffer": k_buffer,
            "v_buffer": v_buffer,
            "k_scale_buffer": [empty.as_strided((size, 0), (0, 1))] * layer_num,
            "v_scale_buffer": [empty.as_strided((size, 0, 0), (0, 1, 1))] * layer_num,
            "store_dtype": torch.uint8,
        }

    def quantize_and_store(
        self,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        k_scale_buffer: torch.Tensor | None,
        v_scale_buffer: torch.Tensor | None,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: torch.Tensor | float | None = None,
        v_scale: torch.Tensor | float | None = None,
        native_k_scale_buffer: torch.Tensor | None = None,
        native_v_scale_buffer: torch.Tensor | None = None,
    ) -> None:
        """Quantize K and V, and write them to rows of one layer's buffers.

        :param k_buffer: as ``create_buffers`` made it, likewise ``v_buffer``.
        :param loc: the rows, integers ``[tokens]``.
        :param cache_k: K, ``[tokens, head_num, head_dim]``, or with its heads in one dimension. It
            is not changed; likewise V, ``cache_v``.
        :param k_scale: dequantization multiplier of the layer's K; ``None`` is 1.0.
        :raises KVQuantizeError: for K, V or a scale that does not fit.
        """
        heads = k_buffer.shape[1]
        key, value = (x.view(x.shape[0], heads, -1) for x in (cache_k, cache_v))
        k_rows, v_rows = (
            torch.empty((*x.shape[:2], _row(x.shape[2])), dtype=torch.uint8, device=x.device)
            for x in (key, value)
        )
        quantize_kv_pair(
            key,
            value,
            self.k_scales_gpu.one if k_scale is None else k_scale,
            self.v_scales_gpu.one if v_scale is None else v_scale,
            NVFP4.name,
            out=(_parts(k_rows), _parts(v_rows)),
        )
        k_buffer[loc] = k_rows
        v_buffer[loc] = v_rows

    def dequantize_kv_tensor(
        self,
        fp4_tensor: torch.Tensor,
        scales: torch.Tensor,
        layer_id: int,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """K or V of one layer as attention wants it: ``[size, head_num, head_dim]``, a new tensor.

        :param fp4_tensor: the layer's buffer.
        :param scales: the empty one that goes with it.
        :param dtype: ``None`` for that of the cache.
        """
        side = self.v_scales_gpu if scales.ndim == _V_DIMENSIONS else self.k_scales_gpu
        comes_later = (
            self._scales_later
            and self.k_scales_gpu.has(layer_id)
            and self.v_scales_gpu.has(layer_id)
        )
        scale = side.one if comes_later else side[layer_id : layer_id + 1]
        quantized = QuantizedKV(*_parts(fp4_tensor), scale, NVFP4.name)
        return dequantize_kv(quantized, dtype=dtype or self.dtype)

    def dequantize_prev_kv(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """What backends with a workspace of their own ask for; this cache has no such backend.

        :raises NotImplementedError: always.
        """
        raise NotImplementedError("this NVFP4 cache is read as plain K and V")

    def compute_cell_size(self, head_num: int, head_dim: int, num_layers: int, kv_size: int) -> int:
        """Bytes of one token: its rows in all layers, and its share of a read.

        A read makes plain K and V of one layer for the whole cache. What an implementation takes
        for itself while it dequantizes comes on top.
        """
        rows = head_num * _row(head_dim) * num_layers * kv_size
        read = head_num * head_dim * self.dtype.itemsize
        return 2 * (rows + read)


def _row(head_dim: int) -> int:
    """Bytes of one token and head."""
    return head_dim // NVFP4.values_per_element + head_dim // NVFP4.head_dim_multiple


def _parts(rows: torch.Tensor) -> OutBuffers:
    """Views of rows: codes ``[..., head_dim / 2]`` and block scales ``[..., head_dim / 16]``."""
    per_block = NVFP4.head_dim_multiple // NVFP4.values_per_element + 1
    blocks = rows.shape[-1] // per_block
    codes = rows.shape[-1] - blocks
    return OutBuffers(rows[..., :codes], rows[..., codes:].view(torch.float8_e4m3fn))
