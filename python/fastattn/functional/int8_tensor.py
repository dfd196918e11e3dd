"""Defines a tensor subclass that holds an int8 weight with its scales, so that it can be a parameter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.checks import FLOATING, check_choice, check_torch_dtype, expect
from fastattn.errors import InputError
from fastattn.functional.int8_weight import Int8Weight, laid_out_like, quantize_int8, scale_shape
from fastattn.layout import ALIGNMENT_BYTES, with_aligned_rows
from fastattn.namespace import PACKAGE

Operator = Callable[..., Any]

# Torch functions (F.linear) and ATen operators → the functions that replace them if an argument is an Int8Tensor.
_FUNCTIONS: dict[Any, Operator] = {}
_OPERATORS: dict[Any, Operator] = {}


def _replaces(table: dict[Any, Operator], *replaced: Any) -> Callable[[Operator], Operator]:
    def register(replacement: Operator) -> Operator:
        table.update(dict.fromkeys(replaced, replacement))
        return replacement

    return register


# Decorators with the torch functions, or the operators, that a function replaces if an argument is an Int8Tensor. A
# function that replaces operators takes the operator itself, then the operator's arguments.
replaces_function, replaces_operator = partial(_replaces, _FUNCTIONS), partial(_replaces, _OPERATORS)


class Int8Tensor(Tensor):
    """Holds an int8 weight with its scales in a tensor subclass, so that a module can have the weight as a parameter.

    Its ``shape`` and ``dtype`` are those of the floating weight ``[N, K]`` that it represents; ``.to(dtype)`` changes
    only its ``dtype``. It never requires a gradient: ``requires_grad_(True)`` of such a parameter raises. Operators
    that move, copy, shard or load parameters work. ``F.linear`` runs ``int8_linear``. ``copy_`` from a floating tensor
    quantises, and ``copy_`` into a floating tensor dequantises. Other operators raise ``InputError``: call
    ``dequantize()`` first.

    Attributes:
        int8_data: int8 ``[N, K]``, as ``Int8Weight.data``.
        int8_scale: float32, as ``Int8Weight.scale``.
        granularity: as ``Int8Weight.granularity``.
        form: ``"matrix"``; ``"transposed"``, of shape ``[K, N]``; or ``"flat"``, of shape ``[N * K]``. The form does
            not change the attributes above.
        is_being_placed: whether ``data_ptr`` returns an address instead of raising. True while transformers places a
            model on devices.
    """

    int8_data: Tensor
    int8_scale: Tensor
    granularity: str | int
    form: str
    is_being_placed: bool

    @staticmethod
    def __new__(
        cls,
        data: Tensor,
        scale: Tensor,
        granularity: str | int = "channel",
        dtype: torch.dtype = torch.float32,
        form: str = "matrix",
        row_stride: int | None = None,
    ) -> Int8Tensor:
        """Makes a tensor that holds ``data`` and ``scale`` without a copy or a check. ``from_weight`` takes a checked
        weight.

        ``row_stride`` is the number of columns of the whole matrix, if ``data`` is a slice of its columns.
        """
        rows, columns = data.shape
        stride = columns if row_stride is None else row_stride
        shapes = {"matrix": (rows, columns), "transposed": (columns, rows), "flat": (rows * columns,)}
        strides = {"matrix": (stride, 1), "transposed": (1, stride), "flat": (1,)}
        self: Int8Tensor = torch.Tensor._make_wrapper_subclass(
            cls, shapes[form], strides=strides[form], dtype=dtype, device=data.device, requires_grad=False
        )
        self.int8_data, self.int8_scale, self.granularity, self.form = data, scale, granularity, form
        return self

    @classmethod
    def from_weight(cls, weight: Int8Weight, dtype: torch.dtype = torch.float32) -> Int8Tensor:
        """Makes a tensor that shares the memory of ``weight`` and represents a floating weight of ``dtype``."""
        check_torch_dtype(dtype)
        return cls(weight.data, weight.scale, weight.granularity, dtype)

    @property
    def int8_weight(self) -> Int8Weight:
        """Returns the weight as ``int8_linear`` takes it."""
        expect_of_weight(self.form == "matrix", "int8_weight", "[N, K]", f"a {self.form} one")
        return Int8Weight(self.int8_data, self.int8_scale, self.granularity)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Returns the number of bytes of the int8 data and the scales, without the padding of rows."""
        return self.int8_data.nbytes + self.int8_scale.nbytes

    def element_size(self) -> int:
        """Returns 1, from which transformers computes a model's memory."""
        return self.int8_data.element_size()

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the weight as a plain floating tensor of the same shape, by default in this tensor's ``dtype``."""
        weight = Int8Weight(self.int8_data, self.int8_scale, self.granularity).dequantize(dtype or self.dtype)
        return {"matrix": weight, "transposed": weight.t(), "flat": weight.flatten()}[self.form]

    def requires_grad_(self, requires_grad: bool = True) -> Int8Tensor:
        """Raises ``InputError`` for True if this tensor is a parameter, because an int8 weight is not trained.

        Leaves a tensor unchanged that is not a parameter, because ``nn.Parameter(weight)`` calls this method with True.
        """
        is_parameter = getattr(self, "_is_param", False)
        expect(
            not (requires_grad and is_parameter),
            "requires_grad",
            "False for an int8 weight, which is not trained",
            f"{requires_grad}; train adapters over it (LoRA), or an nn.Linear with weight.dequantize(). In a whole "
            "model, set requires_grad only for parameters that are not a fastattn.nn.Int8Tensor",
        )
        return self

    def share_memory_(self) -> Int8Tensor:
        self.int8_data.share_memory_()
        self.int8_scale.share_memory_()
        return self

    def is_shared(self) -> bool:
        return self.int8_data.is_shared()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"Int8Tensor({list(self.shape)}, granularity={self.granularity!r}, dtype={self.dtype}, "
            f"device={str(self.device)!r})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["int8_data", "int8_scale"], (self.granularity, self.dtype, self.form)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> Int8Tensor:
        granularity, dtype, form = context
        row_stride = {"matrix": outer_stride[0], "transposed": outer_stride[-1]}.get(form)
        return Int8Tensor(inner["int8_data"], inner["int8_scale"], granularity, dtype, form, row_stride)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FUNCTIONS:
            return _FUNCTIONS[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        replacement = _OPERATORS.get(func)
        if replacement is None:
            raise InputError(
                f"{_name_of(func)}: does not take int8 weights; pass weight.dequantize(), a floating tensor. To merge "
                "adapters into a model of transformers, call its dequantize() first"
            )
        return replacement(func, *args, **(kwargs or {}))

    # FSDP2 calls the next two methods on each rank's shard, before and after the all-gather of the whole weight.

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[torch.Size, Int8Tensor]]:
        """Returns the tensors that a rank sends, and the metadata that the rank keeps: the shape of the whole weight,
        and its shard.

        Rows of the data are sent with their padding, so that the whole weight's rows are aligned too. If the number of
        rows is not divisible by the number of ranks, FSDP2 needs all tensors in the shape of the largest shard. In this
        case, the scales are sent as bytes that are padded to that shape.
        """
        data, scale = self.int8_data, self.int8_scale
        (rows, columns), ranks = outer_size, mesh.size()
        if rows % ranks == 0:
            data = F.pad(data, (0, -columns % ALIGNMENT_BYTES)) if columns % ALIGNMENT_BYTES else data.contiguous()
            return ((data, scale.contiguous()) if scales_have_rows(self) else (data,)), (outer_size, self)
        below = (rows + ranks - 1) // ranks - data.shape[0]
        inputs = [F.pad(data, (0, 0, 0, below)).contiguous()]
        if scales_have_rows(self):
            scale_bytes = scale.contiguous().view(torch.int8)
            behind = columns - scale_bytes.shape[1]
            expected = f"a number of rows that the {ranks} ranks divide, or at least 4 columns"
            expect(behind >= 0, "weight", expected, f"{list(outer_size)}; leave its layer out of fully_shard")
            inputs.append(F.pad(scale_bytes, (0, behind, 0, below)))
        return tuple(inputs), (outer_size, self)

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        metadata: tuple[torch.Size, Int8Tensor],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Int8Tensor, tuple[Tensor, ...]] | None:
        """Returns the whole weight, which shares the gathered memory, and the tensors that this method allocated.

        From the second call on, FSDP2 passes ``out``. This method then updates ``out`` and returns None.
        """
        (rows, columns), shard = metadata
        data, scale, own = gathered[0][:rows, :columns], shard.int8_scale, []
        if len(gathered) == 2 and gathered[1].dtype == torch.float32:
            scale = gathered[1]
        elif len(gathered) == 2:
            scale_bytes = 4 * shard.int8_scale.shape[1]
            scale = gathered[1][:rows, :scale_bytes].clone(memory_format=torch.contiguous_format).view(torch.float32)
            own = [scale]
        if out is None:
            return Int8Tensor(data, scale, shard.granularity, param_dtype), tuple(own)
        # FSDP2 keeps the parameter of the first call, and has gathered into its data. So only scales can need an
        # update.
        parameter = getattr(out, "_local_tensor", out)
        assert isinstance(parameter, Int8Tensor)
        if own or not scales_have_rows(shard):
            parameter.int8_scale.data.copy_(scale)  # .data: autograd saved it and checks its version
        return None


Int8Tensor.__module__ = f"{PACKAGE}.nn"  # the public name, which saved files contain
torch.serialization.add_safe_globals([Int8Tensor])  # so that torch.load(weights_only=True) takes it


def like(weight: Int8Tensor, data: Tensor, scale: Tensor, row_stride: int | None = None) -> Int8Tensor:
    """Returns ``data`` and ``scale`` as a tensor with the granularity, dtype and form of ``weight``."""
    return Int8Tensor(data, scale, weight.granularity, weight.dtype, weight.form, row_stride)


def _in_form(weight: Int8Tensor, form: str, row_stride: int | None = None) -> Int8Tensor:
    """Returns a tensor of another form over the same data and scale tensors."""
    parts = weight.int8_data, weight.int8_scale, weight.granularity, weight.dtype
    return Int8Tensor(*parts, form, row_stride)


def scales_have_rows(weight: Int8Tensor) -> bool:
    """Returns whether each row of the weight has its own scales."""
    return weight.granularity != "tensor"


def row_stride_of(weight: Int8Tensor) -> int | None:
    return None if weight.form == "flat" else max(weight.stride())


def in_matrix_form(weight: Int8Tensor, what: Any) -> Int8Tensor:
    expect_of_weight(weight.form == "matrix", _name_of(what), "[N, K]", f"a {weight.form} one")
    return weight


def _name_of(func: Any) -> str:
    """Returns the name of an operator without its namespace and overload, as users call it."""
    return str(getattr(func, "overloadpacket", func).__name__)


def expect_of_weight(condition: bool, operator: str, expected: str, came: object) -> None:
    """Raises an ``InputError`` that advises ``dequantize()`` unless ``condition`` holds for an operator's arguments."""
    came = f"{came}; call it with weight.dequantize(), a floating tensor"
    expect(condition, f"{operator} of an int8 weight", expected, came)


# --- operators that keep the values -----------------------------------------------------------------------------------

_aten = torch.ops.aten


@replaces_operator(_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default)
def _same(op: Any, weight: Int8Tensor) -> Int8Tensor:
    """Returns a tensor that holds the same data and scale tensors. These are not views, because modules that share a
    weight are recognised by the identity of its tensors."""
    return _in_form(weight, weight.form, row_stride_of(weight))


@replaces_operator(_aten.clone.default)
def _clone(op: Any, weight: Int8Tensor, memory_format: Any = None) -> Int8Tensor:
    return like(weight, laid_out_like(weight.int8_data, weight.int8_data.clone()), weight.int8_scale.clone())


@replaces_operator(_aten._pin_memory.default)
def _pin_memory(op: Any, weight: Int8Tensor, device: Any = None) -> Int8Tensor:
    return like(weight, laid_out_like(weight.int8_data, weight.int8_data.pin_memory()), weight.int8_scale.pin_memory())


@replaces_operator(_aten.is_pinned.default)
def _is_pinned(op: Any, weight: Int8Tensor, device: Any = None) -> bool:
    return weight.int8_data.is_pinned()


@replaces_operator(_aten._to_copy.default)
def _to_copy(op: Any, weight: Int8Tensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Int8Tensor:
    if dtype is not None:
        expected = "one of " + ", ".join(map(str, FLOATING)) + ": the weight stays int8 and stands for this dtype"
        expect(dtype in FLOATING, "dtype", expected, f"{dtype}; weight.dequantize() gives a floating tensor")
    options = {"device": device or weight.device, "copy": True, "non_blocking": options.get("non_blocking", False)}
    data, scale = weight.int8_data.to(**options), weight.int8_scale.to(**options)
    data = laid_out_like(weight.int8_data, data)
    return Int8Tensor(data, scale, weight.granularity, dtype or weight.dtype, weight.form)


@replaces_operator(_aten.equal.default)
def _equal(op: Any, first: Tensor, second: Tensor) -> bool:
    if not (isinstance(first, Int8Tensor) and isinstance(second, Int8Tensor)):
        return torch.equal(_plain(first), _plain(second))
    is_alike = first.shape == second.shape and first.granularity == second.granularity
    same_scales = is_alike and torch.equal(first.int8_scale, second.int8_scale)
    return same_scales and torch.equal(first.int8_data, second.int8_data)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, Int8Tensor) else tensor


@replaces_operator(_aten.t.default)
def _t(op: Any, weight: Int8Tensor) -> Int8Tensor:
    forms = {"matrix": "transposed", "transposed": "matrix"}
    expect_of_weight(weight.form in forms, "t", "[N, K]", "a flat one")
    return _in_form(weight, forms[weight.form], row_stride_of(weight))


@replaces_operator(_aten.transpose.int)
def _transpose(op: Any, weight: Int8Tensor, first: int, second: int) -> Int8Tensor:
    return _same(_aten.alias.default, weight) if first % 2 == second % 2 else _t(op, weight)


@replaces_operator(_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
def _view(op: Any, weight: Int8Tensor, shape: Any) -> Int8Tensor:
    """Changes the shape to ``[N * K]`` and back, which collectives and FSDP2 do with parameters."""
    rows, columns = weight.int8_data.shape
    shape = tuple(shape)
    if shape == tuple(weight.shape):
        return _same(_aten.alias.default, weight)
    is_flat, is_matrix = shape in ((-1,), (rows * columns,)), shape == (rows, columns)
    known = weight.form != "transposed" and (is_flat or is_matrix)
    expect_of_weight(known, "view", f"[{rows}, {columns}] or [-1]", list(shape))
    return _in_form(weight, "flat" if is_flat else "matrix")


@replaces_operator(_aten.as_strided.default)
def _as_strided(op: Any, weight: Int8Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Int8Tensor:
    is_itself = (tuple(size), tuple(stride), storage_offset or 0) == (tuple(weight.shape), weight.stride(), 0)
    expect_of_weight(is_itself, "as_strided", "its own shape and strides", f"{list(size)} and {list(stride)}")
    return _same(_aten.alias.default, weight)


# --- operators that make new tensors ----------------------------------------------------------------------------------


def new_weight(
    rows: int, columns: int, granularity: str | int, dtype: torch.dtype, device: torch.device | str | None
) -> Int8Tensor:
    """Returns zeros ``[rows, columns]`` with scales of 1."""
    shape = torch.Size((rows, columns))
    data = with_aligned_rows(torch.zeros(shape, dtype=torch.int8, device=device))
    scale = torch.ones(scale_shape(shape, granularity), dtype=torch.float32, device=device)
    return Int8Tensor(data, scale, granularity, dtype)


@replaces_operator(_aten.empty_like.default, _aten.zeros_like.default)
def _new_like(op: Any, weight: Int8Tensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Int8Tensor:
    rows, columns = in_matrix_form(weight, op).shape
    return new_weight(rows, columns, weight.granularity, dtype or weight.dtype, device or weight.device)


@replaces_operator(_aten.new_zeros.default, _aten.new_empty.default)
def _new(op: Any, weight: Int8Tensor, size: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
    """Returns an int8 weight of zeros if one of this size is possible, else a plain tensor of zeros."""
    dtype, device, group = dtype or weight.dtype, device or weight.device, weight.granularity
    if len(size) != 2 or (isinstance(group, int) and size[1] % group):
        return torch.zeros(size, dtype=dtype, device=device)
    rows, columns = size
    return new_weight(rows, columns, group, dtype, device)


# --- operators that change the values ---------------------------------------------------------------------------------


@replaces_operator(_aten.copy_.default)
def _copy_(op: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, Int8Tensor):
        return op(target, _plain(source), non_blocking)
    in_matrix_form(target, op)
    expect(source.shape == target.shape, "copy_ to an int8 weight", f"shape {list(target.shape)}", list(source.shape))
    if not isinstance(source, Int8Tensor):
        check_choice("dtype of copy_ to an int8 weight", source.dtype, FLOATING)
        weight = quantize_int8(source, target.granularity)
        data, scale = weight.data, weight.scale
    else:
        expected, came = f"granularity {target.granularity!r}", f"{source.granularity!r}; copy its dequantize()"
        expect(source.granularity == target.granularity, "copy_ to an int8 weight", expected, came)
        data, scale = source.int8_data, source.int8_scale
    op(target.int8_data, data, non_blocking)
    op(target.int8_scale, scale, non_blocking)
    return target


@replaces_operator(_aten.zero_.default)
def _zero_(op: Any, weight: Int8Tensor) -> Int8Tensor:
    op(weight.int8_data)
    weight.int8_scale.fill_(1.0)
    return weight


@replaces_function(Tensor.data_ptr, Tensor.storage)
def _data_ptr(tensor: Int8Tensor) -> Any:
    """Raises instead of returning an address, because readers of raw memory (safetensors, and so ``save_pretrained``)
    would lose the scales, or would read past the end."""
    if vars(tensor).get("is_being_placed"):  # accelerate finds tied weights by their addresses
        return tensor.int8_data.data_ptr()
    raise InputError(
        "weight: expected a reader that knows int8 weights, got one of raw memory, such as safetensors or "
        "save_pretrained; call torch.save(model.state_dict(), file), or safetensors with "
        "fastattn.nn.plain_state_dict(model.state_dict()). Only models that were loaded with "
        "fastattn.integrations.transformers.Int8Config have a save_pretrained that knows them"
    )


@replaces_function(Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def _set_requires_grad(tensor: Tensor, requires_grad: bool) -> None:
    tensor.requires_grad_(requires_grad)
