"""Writes tokens into given slots of a paged cache."""

from __future__ import annotations

from torch import Tensor

from fastattn import reference
from fastattn.call import AppendCall
from fastattn.checks import check_tensor, device_checks_are_on
from fastattn.dispatch.choose import choose
from fastattn.dispatch.recording import note
from fastattn.functional import cache_on_cpu
from fastattn.functional.attention_checks import check_uncopied
from fastattn.functional.autocast import autocast_dtype, autocast_to, without_autocast
from fastattn.functional.kv_cache_checks import check_append_once, check_separate_caches, check_slots
from fastattn.ops.decode import append_to_cache as append_by_kernel


def append_to_cache(
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes new keys and values into a paged cache in place, each token into its slot in ``slot_mapping``.

    Slot ``s`` is row ``s % page_size`` of page ``s // page_size``. A server that assigns slots itself calls this before
    ``attention_varlen`` or ``attention_with_kv_cache`` over the pages, for the tokens of all sequences at once. Keys
    are stored as they are: apply RoPE to them before the call. The host does not read the slots from the device, so the
    call works in CUDA graphs. The call is for inference only.

    Args:
        k_new, v_new: ``[tokens, Hkv, D]`` and ``[tokens, Hkv, Dv]``.
        k_cache, v_cache: pages, ``[num_pages, Hkv, page_size, D]`` and ``[num_pages, Hkv, page_size, Dv]``, in the
            dtype of ``k_new``, or int8 or fp8 (``torch.float8_e4m3fn``) with scales. The kernel writes into them and
            never copies them. So on a GPU, the last dim must be contiguous, and the base and the strides must be
            multiples of 16 bytes. The two can be views of one tensor.
        slot_mapping: int64 or int32 ``[tokens]``. A token is skipped if its slot is negative (padding) or does not
            exist. If two tokens have the same slot, the slot's contents are undefined.
        k_scale, v_scale: the scales of an 8-bit cache, float32, of the cache's shape without the last dim. The call
            computes a scale for each head of a token, writes it, and stores ``x / scale``, rounded to nearest even, as
            the append of ``attention_with_kv_cache`` does. The scale is ``max|x| / 127`` for int8, ``max|x| / 448`` for
            fp8, and 1 for a head of zeros. In an fp8 cache, a head with infinity or NaN has the scale NaN. An fp8 cache
            also takes fixed scales for all tokens: float32 ``[Hkv]``, ``[1]`` or ``[]``, or None, which means 1. The
            call reads fixed scales and does not write them. If ``x / scale`` is then beyond 448 or -448, the call
            stores 448 or -448. This includes infinity. NaN stays NaN.

    Raises:
        InputError, TypeError: the host can see that an argument is wrong. With ``FASTATTN_CHECK=1``, a slot that is too
            large or given twice also raises. The cache is then unchanged.
    """
    check_tensor("k_new", k_new)
    check_tensor("v_new", v_new)
    cast = autocast_dtype(k_new.device.type)
    if cast is not None:
        k_new, v_new = autocast_to(cast, k_new), autocast_to(cast, v_new)
    call, request = check_append_once(AppendCall(k_new, v_new, k_cache, v_cache, slot_mapping, k_scale, v_scale))
    check_separate_caches(k_cache, v_cache, k_new, v_new)
    if device_checks_are_on():
        check_slots(call)

    choice = choose(request)
    if choice.backend == "torch":
        with without_autocast(k_new.device.type):
            if not cache_on_cpu.append_to_cache(call):
                reference.append_to_cache(*call[:5], k_scale=k_scale, v_scale=v_scale)
    else:
        check_uncopied("it is written in place", k_cache=k_cache, v_cache=v_cache)
        append_by_kernel(choice.backend, call)
    note(request.op.name, choice.backend, choice.kernel)
