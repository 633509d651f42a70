"""FlashAttention-2's backward in Triton: three kernels without atomics, whose gradients have the same bits every time.

    P = exp(S - L),  dV = P^T dO,  dP = dO V^T,  D = rowsum(dO O),  dS = P (dP - D),
    dQ = dS K / sqrt(dim),  dK = dS^T Q / sqrt(dim)        with S = Q K^T / sqrt(dim)

As in `tiled_attention.py`, one pass owns a tile of keys and sums dK and dV over the queries, the other owns a tile of
queries and sums dQ over the keys. Both compute P and dS: seven matrix products. A single pass would take five, but its
programs would have to add to each other's dQ.
"""

from kernels.launch import jit, tl


@jit
def rows_kernel(
    grad_ptr, o_ptr, log_sum_exp_ptr, log2_sum_exp_ptr, row_dot_ptr, queries,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PADDING: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """L log2(e), as exp2 is the cheaper instruction, and D of each row. Sequences are padded with zeros to a multiple
    of PADDING, so that the passes read both without a mask; dO and D of 0 add nothing to their sums.
    L and S are rounded separately, so L is lowered by more than they may differ, and exponents are cut at P = 1."""
    log2_e: tl.constexpr = 1.4426950408889634
    padded = tl.cdiv(queries, PADDING) * PADDING
    tiles = padded // BLOCK_ROWS
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    row = tl.program_id(0) % tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_DIM)
    inside = (row < queries)[:, None] & (column < DIM)[None, :]
    at = batch * queries * DIM + (row.to(tl.int64)[:, None] * DIM + column[None, :])
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(o_ptr + at, mask=inside, other=0.0).to(tl.float32)
    log_sum_exp = tl.load(log_sum_exp_ptr + batch * queries + row, mask=row < queries, other=0.0)
    lowered = log_sum_exp - tl.abs(log_sum_exp) * 2**-22
    tl.store(log2_sum_exp_ptr + batch * padded + row, lowered * log2_e)
    tl.store(row_dot_ptr + batch * padded + row, tl.sum(grad * o, axis=1))


@jit
def keys_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, log2_sum_exp_ptr, row_dot_ptr, grad_k_ptr, grad_v_ptr, queries, keys,
    PADDING: tl.constexpr, SCALE: tl.constexpr, DIM: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys. Scores are transposed, (keys queries), to lie in registers as the next matrix
    product needs them. Beyond the end the last query is read again: 0 times infinity would be NaN."""
    scale: tl.constexpr = SCALE * 1.4426950408889634
    tiles = tl.cdiv(keys, BLOCK_KEYS)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    first_key = tl.program_id(0) % tiles * BLOCK_KEYS
    query, key, column = tl.arange(0, BLOCK_QUERIES), tl.arange(0, BLOCK_KEYS), tl.arange(0, BLOCK_DIM)
    inside = (first_key + key < keys)[:, None] & (column < DIM)[None, :]
    at_keys = key[:, None] * DIM + column[None, :]
    at_queries = query[:, None] * DIM + column[None, :]
    start = (batch * keys + first_key) * DIM
    k = tl.load(k_ptr + start + at_keys, mask=inside, other=0.0)
    v = tl.load(v_ptr + start + at_keys, mask=inside, other=0.0)
    grad_k = tl.zeros((BLOCK_KEYS, BLOCK_DIM), dtype=tl.float32)
    grad_v = tl.zeros((BLOCK_KEYS, BLOCK_DIM), dtype=tl.float32)
    padding = batch * (tl.cdiv(queries, PADDING) * PADDING)
    # Queries from `seeing` on see a key of this tile, from `whole` on every key.
    seeing = first_key // BLOCK_QUERIES * BLOCK_QUERIES if IS_CAUSAL else 0
    whole = tl.cdiv(first_key + BLOCK_KEYS - 1, BLOCK_QUERIES) * BLOCK_QUERIES if IS_CAUSAL else 0
    for masked in tl.static_range(2):
        first = seeing if masked else whole
        last = tl.minimum(whole, queries) if masked else queries
        for first_query in range(first, last, BLOCK_QUERIES):
            row, in_row = batch * queries + first_query, (column < DIM)[None, :]
            within = (first_query + query < queries)[:, None] & in_row
            to_last = tl.minimum(query, queries - 1 - first_query)[:, None] * DIM + column[None, :]
            q = tl.load(q_ptr + row * DIM + to_last, mask=in_row, other=0.0)
            grad = tl.load(grad_ptr + row * DIM + at_queries, mask=within, other=0.0)
            row_dot = tl.load(row_dot_ptr + padding + first_query + query)
            grad_weights = tl.dot(v, tl.trans(grad), input_precision=PRECISION) - row_dot[None, :]
            log2_sum_exp = tl.load(log2_sum_exp_ptr + padding + first_query + query)
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            weights = tl.exp2(tl.minimum(scores * scale - log2_sum_exp[None, :], 0.0, tl.PropagateNan.ALL))
            if masked:
                weights = tl.where(first_key + key[:, None] <= first_query + query[None, :], weights, 0.0)
            grad_v = tl.dot(weights.to(grad.dtype), grad, grad_v, input_precision=PRECISION)
            grad_scores = weights * grad_weights
            grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision=PRECISION)
    tl.store(grad_k_ptr + start + at_keys, (grad_k * SCALE).to(k.dtype), mask=inside)
    tl.store(grad_v_ptr + start + at_keys, grad_v.to(v.dtype), mask=inside)


@jit
def queries_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, log2_sum_exp_ptr, row_dot_ptr, grad_q_ptr, queries, keys,
    PADDING: tl.constexpr, SCALE: tl.constexpr, DIM: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries, summed over the tiles of keys in the order of `flash_attention.forward_kernel`."""
    scale: tl.constexpr = SCALE * 1.4426950408889634
    tiles = tl.cdiv(queries, BLOCK_QUERIES)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    first_query = (tiles - 1 - tile if IS_CAUSAL else tile) * BLOCK_QUERIES
    query, key, column = tl.arange(0, BLOCK_QUERIES), tl.arange(0, BLOCK_KEYS), tl.arange(0, BLOCK_DIM)
    inside = (first_query + query < queries)[:, None] & (column < DIM)[None, :]
    at_queries = query[:, None] * DIM + column[None, :]
    at_keys = key[:, None] * DIM + column[None, :]
    start = (batch * queries + first_query) * DIM
    q = tl.load(q_ptr + start + at_queries, mask=inside, other=0.0)
    grad = tl.load(grad_ptr + start + at_queries, mask=inside, other=0.0)
    padding = batch * (tl.cdiv(queries, PADDING) * PADDING)
    log2_sum_exp = tl.load(log2_sum_exp_ptr + padding + first_query + query)
    row_dot = tl.load(row_dot_ptr + padding + first_query + query)
    grad_q = tl.zeros((BLOCK_QUERIES, BLOCK_DIM), dtype=tl.float32)
    seen = tl.minimum(keys, first_query + BLOCK_QUERIES) if IS_CAUSAL else keys
    whole = (tl.minimum(keys, first_query + 1) if IS_CAUSAL else keys) // BLOCK_KEYS * BLOCK_KEYS
    for masked in tl.static_range(2):
        for first_key in range(whole if masked else 0, seen if masked else whole, BLOCK_KEYS):
            at = (batch * keys + first_key) * DIM
            within = (column < DIM)[None, :]
            if masked:
                within = within & (first_key + key < keys)[:, None]
            k = tl.load(k_ptr + at + at_keys, mask=within, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            weights = tl.exp2(tl.minimum(scores * scale - log2_sum_exp[:, None], 0.0, tl.PropagateNan.ALL))
            if masked:
                visible = (first_key + key < keys)[None, :]
                if IS_CAUSAL:
                    visible = visible & (first_key + key[None, :] <= first_query + query[:, None])
                weights = tl.where(visible, weights, 0.0)
            v = tl.load(v_ptr + at + at_keys, mask=within, other=0.0)
            grad_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
            grad_scores = weights * (grad_weights - row_dot[:, None])
            grad_q = tl.dot(grad_scores.to(k.dtype), k, grad_q, input_precision=PRECISION)
    tl.store(grad_q_ptr + start + at_queries, (grad_q * SCALE).to(q.dtype), mask=inside)
