"""The fused operators that the stand-in has: for each, the arguments of its aclnn function, in order.

The names and the order are those of CANN's published headers. An argument is a tensor unless its type follows its
name. The C functions of libopapi are made from this table; `kernels.py` holds it against the reference kernels, whose
parameters have the same names. What is not in the table does not exist, and torch_npu says so by its name.
"""

from __future__ import annotations

TYPES = {
    "tensor": "void *",
    "tensors": "void *",
    "ints": "void *",
    "scalar": "void *",
    "int": "int64_t",
    "double": "double",
    "float": "float",
    "bool": "bool",
    "text": "const char *",
}

_ATTENTION = "scale: double, keep: double, before: int, after: int, heads: int, layout: text, precise: int, sparse: int"
_LENGTHS = "prefix: ints, ends_q: ints, ends_kv: ints"
_OUT = "maximum, total, softmax_out, out"
_GRAD_IN = "q, k, v, grad, pse, drop, padding, mask, maximum, total, softmax_in, out"
_GRAD_OUT = "grad_q, grad_k, grad_v, grad_pse"

_SIGNATURES = {
    "aclnnFlashAttentionScore": f"q, k, v, pse, drop, padding, mask, prefix: ints, {_ATTENTION}, {_OUT}",
    "aclnnFlashAttentionVarLenScore": f"q, k, v, pse, drop, padding, mask, {_LENGTHS}, {_ATTENTION}, {_OUT}",
    "aclnnFlashAttentionVarLenScoreV4": (
        f"q, k, v, pse, drop, padding, mask, {_LENGTHS}, {_ATTENTION}, statistics_layout: text, {_OUT}"
    ),
    "aclnnFlashAttentionScoreGrad": f"{_GRAD_IN}, prefix: ints, {_ATTENTION}, {_GRAD_OUT}",
    "aclnnFlashAttentionUnpaddingScoreGrad": f"{_GRAD_IN}, {_LENGTHS}, {_ATTENTION}, {_GRAD_OUT}",
    "aclnnFlashAttentionUnpaddingScoreGradV4": (
        f"{_GRAD_IN}, {_LENGTHS}, {_ATTENTION}, {_GRAD_OUT}, statistics_layout: text"
    ),
    "aclnnRingAttentionUpdateV2": (
        "before_out, before_maximum, before_total, now_out, now_maximum, now_total, ends, layout: text, "
        "statistics_layout: text, out, maximum, total"
    ),
    "aclnnRmsNorm": "x, gamma, epsilon: double, y, rstd",
    "aclnnRmsNormGrad": "grad, x, rstd, gamma, grad_x, grad_gamma",
    "aclnnAddRmsNorm": "x1, x2, gamma, epsilon: double, y, rstd, x",
    "aclnnSwiGlu": "x, dim: int, y",
    "aclnnSwiGluGrad": "grad, x, dim: int, grad_x",
    "aclnnRotaryPositionEmbedding": "x, cos, sin, mode: int, y",
    "aclnnRotaryPositionEmbeddingGrad": "grad, cos, sin, x, mode: int, grad_x, grad_cos, grad_sin",
    "aclnnApplyAdamWV2": (
        "parameter, average, square, largest_square, grad, step, lr: float, beta1: float, beta2: float, "
        "weight_decay: float, epsilon: float, amsgrad: bool, maximize: bool"
    ),
    "aclnnInplaceFillScalar": "x, value: scalar",
    "aclnnConstantPadNd": "x, padding: ints, value: scalar, y",
    "aclnnApplyTopKTopP": "logits, p, k, out",
    "aclnnRopeWithSinCosCacheV2": (
        "positions, q, k, cache, section: ints, head_size: int, halves: bool, cache_mode: int, q_out, k_out"
    ),
    # of ATB: `atb.c` calls these; torch_npu calls ATB's C++ interface
    "AtbRope": "q, k, cos, sin, lengths, coefficient: int, q_out, k_out",
    "AtbReshapeAndCache": "key, value, key_cache, value_cache, slots, key_out, value_out",
    "AtbLinear": "x, weight, total, out",
}


def _split(signature: str) -> list[tuple[str, str]]:
    pairs = (part.partition(":") for part in signature.split(","))
    return [(name.strip(), kind.strip() or "tensor") for name, _, kind in pairs]


TABLE: dict[str, list[tuple[str, str]]] = {name: _split(signature) for name, signature in _SIGNATURES.items()}
"""aclnn name -> [(argument, type)]"""


def c_functions() -> str:
    """The C source of every operator's two functions, for opapi.c to include."""
    return "\n".join(_c_functions(index, name, arguments) for index, (name, arguments) in enumerate(TABLE.items()))


def _c_functions(index: int, name: str, arguments: list[tuple[str, str]]) -> str:
    field = {"void *": "pointer", "const char *": "text", "int64_t": "integer", "double": "real", "float": "real"}
    parameters = ", ".join(f"{TYPES[kind]} a{i}" for i, (_, kind) in enumerate(arguments))
    values = ", ".join(f"{{.{field.get(TYPES[kind], 'integer')} = a{i}}}" for i, (_, kind) in enumerate(arguments))
    return f"""
int {name}GetWorkspaceSize({parameters}, uint64_t *workspace_bytes, void **executor) {{
    union argument arguments[] = {{{values}}};
    return prepare({index}, arguments, workspace_bytes, executor);
}}
int {name}(void *workspace, uint64_t workspace_bytes, void *executor, void *stream) {{ return run(executor); }}"""
