"""Lists the features, dtypes and head dims that each backend's kernels take, for the dispatcher and the README."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BACKENDS = ("cuda", "triton", "torch")
# The dispatcher tries the backends in this order: CUDA C++ first, because no measurement shows a faster Triton kernel.
KERNEL_BACKENDS = ("cuda", "triton")

# Every option that a call can use and a kernel can lack. The descriptions appear in the README's table and in errors.
FEATURES: dict[str, dict[str, str]] = {
    "attention": {
        "gradients": "gradients (the backward pass)",
        "causal": "a causal mask",
        "gqa": "grouped-query attention (fewer KV heads than query heads)",
        "value dim": "a value head dim that differs from the query's",
        "varlen": "packed sequences (attention_varlen)",
        "paged": "paged keys and values (attention_varlen)",
        "paged gradients": "gradients over paged keys and values",
        "window": "a sliding window",
        "softcap": "softcap",
        "alibi": "ALiBi slopes",
        "mask": "a bool mask",
        "bias": "an additive bias",
        "bias gradients": "the gradient of a bias",
        "sinks": "attention sinks",
        "dropout": "dropout",
        "slope gradients": "the gradient of ALiBi slopes",
        "key ranges": "ranges of visible keys (key_ranges)",
        "paged key ranges": "key_ranges over paged keys and values",
        "max logit": "the largest score of each head (return_max_logit)",
    },
    "decode": {
        "gqa": "grouped-query attention (fewer KV heads than query heads)",
        "value dim": "a value head dim that differs from the query's",
        "causal": "a causal mask among the new queries",
        "tree mask": "a tree mask among the new queries",
        "append": "appending new keys and values",
        "rotary": "rotary embedding",
        "paged": "a paged cache",
        "int8 cache": "an int8 cache",
        "fp8 cache": "an fp8 cache",
        "window": "a sliding window",
        "softcap": "softcap",
        "alibi": "ALiBi slopes",
        "sinks": "attention sinks",
    },
    "append": {
        "value dim": "a value head dim that differs from the keys'",
        "int8 cache": "an int8 cache",
        "fp8 cache": "an fp8 cache",
    },
    "merge": {
        "gradients": "gradients (of outputs and lse)",
        "varlen": "packed sequences",
    },
    "int8_matmul": {
        "gradients": "gradients (of the input, bias and residual)",
        "group scales": "scales per group (granularity=32, 64 or 128)",
        "bias": "a bias",
        "activation": "an activation function",
        "swiglu": 'SwiGLU (activation="swiglu")',
        "residual": "a residual",
        "int8 activations": 'int8 activations (input_precision="int8")',
    },
}

# Options of attention that change scores in more ways than a scale, a causal mask or a window.
CHANGES_SCORES = frozenset({"softcap", "alibi", "mask", "bias", "dropout", "key ranges"})

# Dtype of an 8-bit cache → the feature of a call that uses it.
FEATURE_OF_CACHE = {torch.int8: "int8 cache", torch.float8_e4m3fn: "fp8 cache"}

# The names of the operations in the table's rows.
FUNCTIONS = {
    "attention": "`scaled_dot_product_attention`, `attention`, `attention_varlen`",
    "decode": "`attention_with_kv_cache`",
    "append": "`append_to_cache`",
    "merge": "`distributed.merge_attention`",
    "int8_matmul": "`int8_linear`",
}


@dataclass(frozen=True)
class Support:
    """Lists the features, head dims and dtypes that the kernels of one backend take for one operation.

    ``head_dims`` is None for an operation without head dims. If ``pads``, any head dim from 1 up is padded with zeros
    to the next one in ``head_dims``. ``most_dims_with_gradients`` is the largest head dim that has gradients, or None
    if all have them.
    """

    features: frozenset[str]
    head_dims: range | None
    pads: bool = False
    most_dims_with_gradients: int | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    min_arch: int = 80

    def kernel_head_dim(self, dim: int) -> int | None:
        """Returns the head dim that a kernel gets for ``dim``, or None if no kernel takes it.

        It only uses comparisons on which torch.compile can guard.
        """
        if self.head_dims is None:
            return dim
        first, step = self.head_dims.start, self.head_dims.step
        if not 0 < dim < self.head_dims.stop:
            return None
        if dim < first:
            return first if self.pads else None
        if dim % step == 0:
            return dim
        return dim + step - dim % step if self.pads else None

    def largest_head_dim_with_gradients(self) -> int:
        assert self.head_dims is not None
        return self.most_dims_with_gradients or self.head_dims[-1]

    def head_dims_text(self) -> str:
        """Returns ``multiples of 8 from 16 to 256``, for example, or ``up to 256, padded to a multiple of 8``."""
        if self.head_dims is None:
            return "any"
        first, step, last = self.head_dims[0], self.head_dims.step, str(self.head_dims[-1])
        if self.most_dims_with_gradients is not None:
            last += f" ({self.most_dims_with_gradients} with gradients)"
        if not self.pads:
            return f"multiples of {step} from {first} to {last}"
        return f"up to {last}, padded to a multiple of {step}" + (f", at least {first}" if first > step else "")

    def dtypes_text(self) -> str:
        return ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)


_ALL = {op: frozenset(features) for op, features in FEATURES.items()}
_ATTENTION = _ALL["attention"] - {"paged gradients"}
_WITH_FLOAT32 = (torch.float16, torch.bfloat16, torch.float32)

SUPPORT: dict[str, dict[str, Support]] = {
    "attention": {
        "cuda": Support(_ATTENTION - {"paged key ranges"}, head_dims=range(8, 257, 8), pads=True),
        "triton": Support(_ATTENTION, head_dims=range(16, 513, 8), pads=True, most_dims_with_gradients=256),
    },
    "decode": {
        "cuda": Support(_ALL["decode"], head_dims=range(8, 257, 8)),
        "triton": Support(_ALL["decode"], head_dims=range(16, 513, 8)),
    },
    "append": {
        "cuda": Support(_ALL["append"], head_dims=range(8, 257, 8)),
        "triton": Support(_ALL["append"], head_dims=range(8, 513, 8)),
    },
    "merge": {"triton": Support(_ALL["merge"], head_dims=None, dtypes=_WITH_FLOAT32)},
    "int8_matmul": {
        "cuda": Support(_ALL["int8_matmul"], head_dims=None),
        "triton": Support(_ALL["int8_matmul"] - {"int8 activations"}, head_dims=None),
    },
}

# The oldest compute capability (times ten) on which a kernel runs.
OLDEST_ARCH = min(support.min_arch for backends in SUPPORT.values() for support in backends.values())


def support_table() -> str:
    """Returns the README's support table in Markdown, and below the table the features of each operation."""
    lines = [
        'Cells list options, dtypes and head dims. "Everything" means all options that are listed for the function '
        'below the table; "–" means no kernel.',
        "",
        "| | CUDA C++ | Triton | PyTorch |",
        "|---|---|---|---|",
    ]
    for op in FEATURES:
        cells = [_support_cell(op, SUPPORT[op].get(backend)) for backend in KERNEL_BACKENDS]
        has_head_dims = any(support.head_dims is not None for support in SUPPORT[op].values())
        in_torch = "everything; float16, bfloat16, float32, float64" + ("; head dims: any" if has_head_dims else "")
        lines.append(f"| {FUNCTIONS[op]} | {' | '.join(cells)} | {in_torch} |")
    lines.append("")
    for op, features in FEATURES.items():
        lines.append(f"Everything of {FUNCTIONS[op]}: {', '.join(features.values())}.")
        lines.append("")
    lines.append(f"The kernels need compute capability {OLDEST_ARCH // 10}.{OLDEST_ARCH % 10} or later.")
    return "\n".join(lines)


def _support_cell(op: str, support: Support | None) -> str:
    if support is None:
        return "–"
    missing = [words for feature, words in FEATURES[op].items() if feature not in support.features]
    *first, last = missing or [""]
    what = f"everything, except {', '.join(first)}{', and ' if first else ''}{last}" if missing else "everything"
    dims = "" if support.head_dims is None else f"; head dims: {support.head_dims_text()}"
    return f"{what}; {support.dtypes_text()}{dims}"
