"""What an expert layer keeps for backward, to the byte where its router is balanced: what autograd saves.

Sorted, the layer keeps its rows four times (what experts read, their output, the same weighted, and their hidden width
as often as a feed-forward does) and a few numbers a choice. One-hot, it keeps tensors of tokens x experts x slots twice
and those of tokens x experts several times (GShard, arXiv:2006.16668, section 3.2). With a capacity a router that is
not balanced keeps less than is counted here; over ep a rank may receive more rows than it sends, and keep more.
"""

from dataclasses import dataclass

from cs336_systems.cost.experts import computed_rows, slots
from cs336_systems.presets import ModelConfig

INDEX = 8  # bytes of torch's indices


@dataclass(frozen=True)
class ExpertSizes:
    """Counts that the formulas of one expert layer share, on one rank."""

    tokens: int  # that the rank routes, all of a microbatch also under sequence parallelism
    rows: int  # that it sends, and as many that its experts get
    slots: int  # of one expert, for its tokens
    width: int  # bytes of a number in the precision of products
    gate: int  # bytes of the router's numbers
    mixed: bool  # autocast
    tp: int
    ep: int

    @classmethod
    def of(
        cls, config: ModelConfig, tokens: int, width: int, mixed: bool, tp: int = 1, ep: int = 1
    ) -> "ExpertSizes | None":
        """Those of the model's expert layers, if it has any."""
        if not config.num_experts:
            return None
        rows = computed_rows(config, tokens)
        gate = 4 if mixed or config.mixture.gating_fp32 else width
        return cls(tokens, rows, slots(config, tokens), width, gate, mixed, tp, ep)


def expert_activations(config: ModelConfig, e: ExpertSizes) -> int:
    """Bytes that autograd keeps for one expert layer without recompute, its input included but not the norm."""
    loss = e.gate if config.mixture.aux_weight else 0
    shared = _shared(config, e) if config.mixture.shared_expert else 0
    routed = _one_hot(config, e) if config.mixture.dispatch == "einsum" else _sorted(config, e)
    return _input(config, e) + routed + _experts(config, e) + shared + loss


def _input(config: ModelConfig, e: ExpertSizes) -> int:
    """What the router reads, its probabilities, and each expert's share of first choices; weights in half precision are
    copied for a router in float32."""
    read = 4 if config.mixture.gating_fp32 else e.width
    copied = read > e.width and not e.mixed
    kept = read * config.d_model * (e.tokens + (config.num_experts if copied else 0))
    return kept + e.gate * config.num_experts * (e.tokens + 1)


def _sorted(config: ModelConfig, e: ExpertSizes) -> int:
    """Of each choice the expert and the weight before and after normalisation; of each row where it comes from, its
    weight, and the experts' output before and after that, which a sum at indices keeps although it need not."""
    chosen = config.mixture.top_k * e.tokens
    kept = INDEX * chosen
    if config.mixture.top_k == 2:
        after = config.mixture.normalize == "after"  # and whether a choice found a slot
        kept += e.gate * (chosen + 2 * e.tokens) + (chosen if after else 0)
    kept += e.rows * (2 * INDEX + e.width + 2 * e.width * config.d_model)
    if e.ep > 1:
        kept += 2 * INDEX * e.rows  # from the order of ranks to that of experts, and back
    return kept


def _one_hot(config: ModelConfig, e: ExpertSizes) -> int:
    """Choices as one-hot vectors over experts, before and after tokens are dropped, and over slots; where a token goes
    and with what weight it comes back, over both; and the slots that come back."""
    vectors, k = e.tokens * config.num_experts, config.mixture.top_k
    outer = e.width if e.mixed else e.gate
    kept = k * (2 * INDEX * vectors + outer * e.tokens * max(e.slots, 1))
    if k == 2:
        after = config.mixture.normalize == "after"
        kept += vectors + (4 * e.gate + (2 * INDEX if after else 0)) * e.tokens
    return kept + e.width * (2 * e.tokens * e.rows + e.rows * config.d_model)


def _hidden(config: ModelConfig, rows: int, hidden: int) -> int:
    """Numbers that a feed-forward keeps between its products."""
    gated = config.feed_forward == "swiglu"
    return ((4 if config.kernels == "torch" else 3) if gated else 2) * rows * hidden


def _experts(config: ModelConfig, e: ExpertSizes) -> int:
    """What the experts read and have between their products; sorted, also where their rows end, and whose a row is."""
    hidden, sorts = config.expert_d_ff // e.tp, config.mixture.dispatch == "sort"
    matrices = 3 if config.feed_forward == "swiglu" else 2
    reads = matrices - 1 if e.mixed and sorts else 1  # autocast casts for each grouped product that reads
    kept = e.width * (reads * e.rows * config.d_model + _hidden(config, e.rows, hidden))
    if not sorts:
        return kept
    grouped = not any(e.width * size % 16 for size in (config.d_model, hidden))
    ends = 4 * config.num_experts // e.ep if grouped else 0
    return kept + matrices * (ends + (INDEX * e.rows if config.bias else 0))


def _shared(config: ModelConfig, e: ExpertSizes) -> int:
    """What the shared expert keeps besides what the router has read already, if that is the same."""
    inputs = e.width * e.tokens * config.d_model
    if e.mixed:
        reads = 2 if config.feed_forward == "swiglu" else 1
    else:
        reads = 0 if e.width == 4 or not config.mixture.gating_fp32 else 1
    return reads * inputs + e.width * _hidden(config, e.tokens, config.d_ff // e.tp)


def expert_gradients(config: ModelConfig, e: ExpertSizes) -> int:
    """An estimate of what backward adds inside an expert layer to what it kept: a gradient of the widest tensors."""
    width = max(config.expert_d_ff // e.tp, config.d_model)
    if config.mixture.dispatch == "einsum":
        return e.width * e.rows * (2 * width + e.tokens)
    return 2 * e.width * e.rows * width


def expert_workspace(config: ModelConfig, e: ExpertSizes) -> int:
    """The most that is alive inside an expert layer when nothing is kept for backward, an estimate: what the experts
    read and have between their products; or three one-hot tensors, two of them to be added up."""
    inside = (3 if config.feed_forward == "swiglu" else 2) * config.expert_d_ff // e.tp
    if config.mixture.dispatch == "einsum":
        return max(3 * e.gate * e.tokens * e.rows, e.gate * e.tokens * e.rows + 3 * e.width * e.rows * config.d_model)
    return e.width * e.rows * (config.d_model + inside)
