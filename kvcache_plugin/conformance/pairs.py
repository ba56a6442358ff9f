"""What ``quantize_kv_pair`` must do: the same as ``quantize_kv`` for each of K and V."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from kvcache_plugin.conformance import guards, inputs
from kvcache_plugin.conformance.check import check, per_head

if TYPE_CHECKING:
    from kvcache_plugin.conformance.trial import Trial
    from kvcache_plugin.plugins import HookName

_HOOKS: Final[tuple[HookName, ...]] = ("quantize_kv", "quantize_kv_pair")


@check(*_HOOKS, dtypes=(torch.bfloat16,), needs_reference=False)
def pair_plain(trial: Trial) -> None:
    """K and V of 16 tokens of 8 heads, given the same way: its quantize_kv_pair must take this."""
    tensors, scales = _both(trial, 16, 8, 128)
    what = "K and V of 16 tokens of 8 heads"
    trial.quantize_pair(tensors, scales, what)
    if not trial.candidate.takes_pair(tensors, scales, trial.kv_format):
        trial.wrong(f"{what}: its quantize_kv_pair passes, and this is what it must take")


@check(*_HOOKS, needs_reference=False)
def pair_alike(trial: Trial) -> None:
    """K and V of the same shape, dtype and strides, scales that differ, several shapes."""
    for shape in ((128,), (5, 128), (7, 3, 64), (2, 3, 2, 64), (0, 4, 64)):
        tensors, scales = _both(trial, *shape)
        trial.quantize_pair(tensors, scales, f"K and V of shape {tuple(tensors[0].shape)}")
    key, value = _both(trial, 8, 4, 128)[0]
    scales = trial.scale_for(key), trial.scale_for(value)
    for what in ("heads before tokens", "K of a cache of K and V", "every second element"):
        view = inputs.VIEWS[what]
        tensors = (view(key), view(value))
        if tensors[0].shape[-1] % trial.kv_format.head_dim_multiple == 0:
            trial.quantize_pair(tensors, scales, f"K and V, {what}")
    trial.quantize_pair((key, key), scales, "the same tensor as K and as V")


@check(*_HOOKS, needs_reference=False)
def pair_unlike(trial: Trial) -> None:
    """K and V that differ in shape, strides, dtype or kind of scale."""
    (key, value), scales = _both(trial, 6, 4, 128)
    wide = trial.values(6, 4, 256, seed=2)
    other = torch.float32 if trial.dtype != torch.float32 else torch.bfloat16
    for what, v in (
        ("a longer head_dim", wide),
        ("fewer tokens", value[:3]),
        ("fewer heads", value[:, :2]),
        ("another number of dimensions", value.flatten(0, 1)),
        ("no tokens", value[:0]),
        ("other strides", trial.values(4, 6, 128, seed=3).transpose(0, 1)),
        ("another dtype", value.to(other)),
    ):
        trial.quantize_pair((key, v), scales, f"K, and V with {what}")
    trial.quantize_pair((value[:3], key), scales, "V, and K with fewer tokens")


@check(*_HOOKS, needs_reference=False)
def pair_out(trial: Trial) -> None:
    """Buffers for both, also where they lie in different ways."""
    tensors, scales = _both(trial, 2, 3, 2, 2, 128)
    shape = tensors[0].shape
    gaps = inputs.Layout("rows with gaps", "rows with gaps")
    order = inputs.Layout(*["leading dimensions in another order"] * 2)
    for layouts in (
        *((layout, layout) for layout in trial.layouts()),
        (inputs.PACKED, gaps),
        (order, inputs.PACKED),
        (inputs.PACKED, inputs.Layout("packed", gaps.block_scales)),
    ):
        what = f"into buffers: {' and '.join(dict.fromkeys(map(str, layouts)))}"
        buffers = [trial.buffers(shape, layout) for layout in layouts]
        k_out, v_out = (each.out for each in buffers)
        if trial.quantize_pair(tensors, scales, what, out=(k_out, v_out)) is not None:
            count = sum(each.overwritten() for each in buffers)
            if count:
                trial.wrong(f"{what}: it writes {count} bytes beside the buffers")


@check(*_HOOKS, needs_reference=False)
def pair_new_results(trial: Trial) -> None:
    """Without buffers each call gives new memory: an earlier result stays as it is."""
    tensors, scales = _both(trial, 8, 4, 128)
    first = trial.quantize_pair(tensors, scales, "the earlier values")
    if first is not None:
        k, v = first
        with guards.unchanged(
            trial,
            "an earlier result",
            **{"data of K": k.data, "block scales of K": k.block_scales},
            **{"data of V": v.data, "block scales of V": v.block_scales},
        ):
            key, value = tensors
            trial.quantize_pair((value, key), scales, "the later values")


@check(*_HOOKS)
def pair_rare_values(trial: Trial) -> None:
    """Zeros, infinities, NaN, subnormals, huge values, on either side."""
    scales = trial.scale(0.03), trial.scale(0.07)
    plain = trial.put(inputs.normal(16, 64, seed=1))
    for kind, values in inputs.hard(16, 64).items():
        x = trial.put(values)
        trial.quantize_pair((x, plain), scales, f"K: {kind}")
        trial.quantize_pair((plain, x), scales, f"V: {kind}")


@check(*_HOOKS)
def pair_scale_tensor(trial: Trial) -> None:
    """The scales are read anew in each call, and where they lie in their memory."""
    tensors, _ = _both(trial, 6, 4, 128)
    scales = trial.scale_inside(0.03), trial.scale_inside(0.2)
    trial.quantize_pair(tensors, scales, "scales inside a tensor")
    for scale in scales:
        scale.mul_(3)
    trial.quantize_pair(tensors, scales, "the same scales, changed in place")


@check(*_HOOKS, takes=per_head)
def pair_scale_per_head(trial: Trial) -> None:
    """One scale for each head on both sides, or on one."""
    tensors, (k_scale, _) = _both(trial, 6, 4, 128)
    k_heads, v_heads = trial.scale(0.005, 3.0, 0.02, 0.4), trial.scale(0.2, 0.01, 1.0, 0.03)
    trial.quantize_pair(tensors, (k_heads, v_heads), "scales per head")
    trial.quantize_pair(tensors, (k_scale, v_heads), "a scale per head for V alone")
    trial.quantize_pair(tensors, (k_heads, 0.03), "a scale per head for K, a number for V")


@check(*_HOOKS, needs_reference=False)
def pair_given_unchanged(trial: Trial) -> None:
    """K, V and both scales stay as they are, and the host is not asked."""
    tensors, scales = _both(trial, 8, 4, 128)
    key, value = (x.transpose(0, 1) for x in tensors)
    what = "strided K and V"
    with guards.unchanged(trial, what, K=key, V=value, k_scale=scales[0], v_scale=scales[1]):
        answer = trial.quantize_pair((key, value), scales, what)
    if answer is not None:
        with guards.no_host_sync(trial, what):
            trial.candidate.quantize_pair((key, value), scales, trial.kv_format)


@check(*_HOOKS, needs_reference=False)
def pair_as_singles(trial: Trial) -> None:
    """The codes are those of its quantize_kv, also where both may be off by a tolerance."""
    tensors, scales = _both(trial, 8, 4, 128)
    both = trial.candidate.quantize_pair(tensors, scales, trial.kv_format)
    if both is None:
        trial.passed_by.append("K and V together")
        return
    for side, x, scale, got in zip("KV", tensors, scales, both, strict=True):
        single = trial.candidate.quantize(x, scale, trial.kv_format)
        if single is not None:
            trial.same_bytes(got, single, f"{side} of a pair, beside {side} alone")


def _both(
    trial: Trial, *shape: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """K and V that differ, and scales that do."""
    key, value = trial.values(*shape, seed=0), trial.values(*shape, seed=1) * 3
    return (key, value), (trial.scale_for(key), trial.scale_for(value) * 0.7)
