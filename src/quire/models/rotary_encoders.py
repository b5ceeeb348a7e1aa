"""Encoders with RoPE: ModernBERT, Nomic, GTE ("new"), Jina v3."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from quire.layers.embedding import PositionEmbedding
from quire.layers.linear import FusedLinear, MatrixPart
from quire.layers.mlp import MLP, GatedMLP
from quire.layers.norm import LayerNorm, NoNorm, Norm
from quire.layers.packed_attention import PackedSelfAttention
from quire.layers.parameter import Role
from quire.models.bert import POOLER
from quire.models.encoder import NO_POOLER, Classifier, Encoder, PreNormBlock, Renames, count_labels
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

_NAMES = (
    (r"^embeddings\.(position_ids|token_type_ids)$", None),
    (r"(^|\.)rotary_emb\..*", None),
    (r"^embeddings\.word_embeddings\.", "embed_tokens."),
    (r"^embeddings\.token_type_embeddings\.", "embed_types."),
    (r"^(embeddings\.LayerNorm|emb_ln)\.", "embed_norm."),
    (r"^encoder\.layers?\.", "layers."),
    (r"\.(attn|mixer)\.Wqkv\.", ".self_attn.qkv."),
    (r"\.attention\.qkv_proj\.", ".self_attn.qkv."),
    (r"\.attention\.([qkv])_proj\.", r".self_attn.\1_proj."),  # GTE's with pack_qkv false
    (r"\.(attn|mixer)\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attention\.o_proj\.", ".self_attn.o_proj."),
    (r"\.(norm1|attn_ln|post_attention_layernorm)\.", ".attn_norm."),
    (r"\.(norm2|mlp_ln|post_mlp_layernorm)\.", ".mlp_norm."),
)
_OUT = (r"^classifier\.(?=weight|bias)", "classifier.out_proj.")


class RotaryEncoder(Encoder):
    """Positions turn queries and keys; none are learned."""

    biased = True  # q, k, v and the output projection

    def make_positions(self, facts: "ModelFacts") -> PositionEmbedding | None:  # noqa: ARG002
        return None

    def make_packed_attention(self, facts: "ModelFacts", index: int) -> PackedSelfAttention:  # noqa: ARG002
        heads, rope = facts.hf["num_attention_heads"], self.packed_rope(facts)
        return PackedSelfAttention(facts.hidden_size, heads, bias=self.biased, out_bias=self.biased, rope=rope)


class ModernBERT(RotaryEncoder):
    """Norms before each half of a block, gated feed-forward, and a window in most layers."""

    tokens_have_dense = True
    renames: Renames = (
        (r"^model\.", ""),
        (r"^decoder\.", None),
        (r"^embeddings\.tok_embeddings\.", "embed_tokens."),
        (r"^embeddings\.norm\.", "embed_norm."),
        (r"\.attn\.Wqkv\.", ".self_attn.qkv."),
        (r"\.attn\.Wo\.", ".self_attn.o_proj."),
        (r"\.mlp\.Wi\.", ".mlp.gate_up."),
        (r"\.mlp\.Wo\.", ".mlp.down_proj."),
        _OUT,
        (r"^head\.", "classifier."),
    )

    def __init__(self, facts: "ModelFacts") -> None:
        super().__init__(facts)
        if self.classifier is None:
            self.renames = ((r"^head\.", None), *self.renames)  # of the masked language model

    def make_block(self, facts: "ModelFacts", index: int) -> nn.Module:
        first = self.make_norm(facts) if index else NoNorm()  # the embedding's norm is the first layer's, too
        return PreNormBlock(self.make_packed_attention(facts, index), first, self.make_mlp(facts, index), self.make_norm(facts))

    def make_packed_attention(self, facts: "ModelFacts", index: int) -> PackedSelfAttention:
        hf, kind = facts.hf, facts.hf["layer_types"][index]
        window = hf["local_attention"] // 2 if kind == "sliding_attention" else None
        bias = bool(hf.get("attention_bias"))
        rope = self.packed_rope(facts, kind)
        return PackedSelfAttention(
            facts.hidden_size, hf["num_attention_heads"], bias=bias, out_bias=bias, rope=rope, window=window
        )

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        hf, bias = facts.hf, bool(facts.hf.get("mlp_bias"))
        return GatedMLP(facts.hidden_size, hf["intermediate_size"], hf["hidden_activation"], bias=bias, fused=True)

    def make_norm(self, facts: "ModelFacts", size: int | None = None) -> Norm:
        hf = facts.hf
        return LayerNorm(size or facts.hidden_size, hf.get("norm_eps", 1e-5), bias=bool(hf.get("norm_bias")))

    def make_final_norm(self, facts: "ModelFacts") -> Norm | None:
        return self.make_norm(facts)

    def make_head_of(self, facts: "ModelFacts", *, dense: bool) -> Classifier:  # noqa: ARG002
        hf, norm = facts.hf, self.make_norm(facts)
        activation, bias = hf.get("classifier_activation", "gelu"), bool(hf.get("classifier_bias"))
        return Classifier(facts.hidden_size, count_labels(facts), activation, dense_bias=bias, norm=norm)


class NomicBERT(RotaryEncoder):
    biased = False
    renames: Renames = (
        (r"^(nomic_bert|bert)\.", ""),
        (r"^(cls|lm_head)\.", None),
        *_NAMES,
        (r"\.mlp\.fc11\.", ".mlp.up_proj."),
        (r"\.mlp\.fc12\.", ".mlp.gate_proj."),
        (r"\.mlp\.fc2\.", ".mlp.down_proj."),
        *POOLER,
    )

    def __init__(self, facts: "ModelFacts") -> None:
        hf = facts.hf
        wrong = [name for name in ("prenorm", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "use_rms_norm",
                                   "rotary_emb_interleaved", "num_experts") if hf.get(name)]  # fmt: skip
        if wrong:
            raise ModelError(f"{', '.join(wrong)} is not supported for Nomic's encoders; got {[hf[name] for name in wrong]}")
        super().__init__(facts)
        self.skip_unused_pooler()

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        return GatedMLP(facts.hidden_size, facts.hf["intermediate_size"], facts.hf["hidden_act"])


class UpGateLinear(FusedLinear):
    """The checkpoint's matrix has `up` before the gate; here the gate comes first."""

    def parts(self, path: str) -> Mapping[str, MatrixPart]:
        if self.separate:
            return super().parts(path)
        (gate, up), (size, _) = self.local_outputs, self.sections
        rows = (0, range(size + gate.start, size + gate.stop)), (len(gate), up)
        return {path: MatrixPart(2 * size, rows)}


class GTE(RotaryEncoder):
    renames: Renames = (
        (r"^(new|gte)\.", ""),
        (r"^lm_head\.", None),
        *_NAMES,
        (r"\.mlp\.up_gate_proj\.", ".mlp.gate_up."),
        *POOLER,
    )

    def __init__(self, facts: "ModelFacts") -> None:
        hf = facts.hf
        fixed = {"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "logn_attention_scale": False}
        for name, value in fixed.items():
            if hf.get(name) not in (None, value):
                raise ModelError(f"{name} {hf[name]!r} is not supported for GTE's encoders; {value!r} is")
        super().__init__(facts)
        self.skip_unused_pooler()

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        size, inner = facts.hidden_size, facts.hf["intermediate_size"]
        mlp = GatedMLP(size, inner, facts.hf["hidden_act"], down_bias=True, fused=True)
        mlp.gate_up = UpGateLinear(size, {"gate_proj": inner, "up_proj": inner}, role=Role.COLUMN)
        return mlp


class JinaV3(RotaryEncoder):
    renames: Renames = (
        (r"^roberta\.", ""),
        NO_POOLER,
        (r"^lm_head\.", None),
        *_NAMES,
        (r"\.mlp\.fc1\.", ".mlp.up_proj."),
        (r"\.mlp\.fc2\.", ".mlp.down_proj."),
        _OUT,
    )

    def make_mlp(self, facts: "ModelFacts", index: int) -> nn.Module:  # noqa: ARG002
        return MLP(facts.hidden_size, facts.hf["intermediate_size"], facts.hf["hidden_act"])
