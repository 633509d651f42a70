"""The published profile of fairseq's eval_lm on a 15B mixture of experts, and what its numbers of calls follow from.

Four V100 evaluated five batches of one block of 2048 tokens each: 12 layers, every second with 512 experts, of which a
rank has 128. Every matrix product of that is determined (`expected`), so a formulation that computes the same things
has the same numbers, whatever its width and its hardware. The figures are those of the published table of rank 1.
"""

from dataclasses import dataclass

from benchmarks.moe_eval_model import ATTENTION, DECODER, MOE, WITH, WITHOUT
from cs336_systems.presets import ModelConfig

RANKS, BATCHES = 4, 5
ALL_TO_ALL = "launch all-to-all"  # which the published table has as NCCL's kernel
# Equal by construction; then what it depends on how one reads words and which torch it is.
PUBLISHED = {
    "aten::addmm": 7740,
    "aten::linear": 8015,
    "aten::matmul": 275,
    "aten::mm": 335,
    "aten::gelu": 3870,
    "aten::bmm": 180,
    ALL_TO_ALL: 60,
    DECODER: 5,
    WITH: 30,
    WITHOUT: 30,
    ATTENTION: 60,
    MOE: 30,
}
OF_WORDS = {"aten::item": 40_995, "aten::select": 51_220}


@dataclass(frozen=True)
class Derivation:
    """Why an operator is called so often."""

    count: int
    why: str


def expected(config: ModelConfig, ranks: int, batches: int) -> dict[str, Derivation]:
    """How often the one-hot formulation calls what, on each of `ranks` expert-parallel ranks; nothing for a model with
    other matrices than fairseq's."""
    if (config.bias, config.feed_forward, config.attention) != (True, "gelu", "naive") or config.mixture.shared_expert:
        return {}
    layers, mixed = config.num_layers, config.expert_layers
    dense, local = layers - mixed, config.num_experts // ranks
    addmm, apart = batches * 2 * (mixed * local + dense), batches * (4 * layers + mixed + 1)
    all_to_all = 2 * mixed * batches if ranks > 1 else 0
    return {
        "aten::addmm": Derivation(addmm, f"{batches} x 2 x ({mixed} layers x {local} experts + {dense} dense)"),
        "aten::linear": Derivation(
            addmm + apart, f"addmm + {batches} x (4 x {layers} attention + {mixed} routers + 1)"
        ),
        "aten::matmul": Derivation(apart, "linear layers whose bias is not part of the product"),
        "aten::mm": Derivation(apart + 2 * mixed * batches, f"matmul + 2 one-hot products x {mixed} x {batches}"),
        "aten::gelu": Derivation(addmm // 2, "one between two addmm"),
        "aten::bmm": Derivation(
            batches * (2 * layers + config.mixture.top_k * mixed),
            f"{batches} x (2 x {layers} attention + {config.mixture.top_k} outer products x {mixed})",
        ),
        ALL_TO_ALL: Derivation(all_to_all, f"there and back, {mixed} x {batches}"),
        DECODER: Derivation(batches, "batches"),
        WITH: Derivation(mixed * batches, f"{mixed} x {batches}"),
        WITHOUT: Derivation(dense * batches, f"{dense} x {batches}"),
        ATTENTION: Derivation(layers * batches, f"{layers} x {batches}"),
        MOE: Derivation(mixed * batches, f"{mixed} x {batches}"),
    }


def is_published_shape(config: ModelConfig, ranks: int, tp: int, batches: int) -> bool:
    """True if these counts should equal the published ones."""
    shape = config.num_layers, config.expert_every, config.num_experts, config.mixture.top_k
    return shape == (12, 2, 512, 2) and (ranks, tp, batches) == (RANKS, 1, BATCHES)


def words_reads(batches: int, context: int) -> dict[str, Derivation]:
    """Reads of single numbers when words are read the slow way, of whole blocks of one row."""
    return {
        "aten::item": Derivation(batches * (4 * context - 1), f"{batches} x (4 a word - 1)"),
        "aten::select": Derivation(batches * (5 * context - 2), f"{batches} x (5 a word - 2)"),
    }
