"""SpecBuilder: the parts that architectures share, each checked against the file's tensors.

An architecture file asks for what it needs; a tensor that is missing, has another shape, or was
never asked for is an error that names it, because the alternative is wrong text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from runtime.errors import CorruptModel, ModelError
from runtime.models.gguf_header import MetadataValue, TensorInfo
from runtime.models.hyperparameters import Hyperparameters
from runtime.models.model_type import label
from runtime.models.rope import RopePairing, RopeSpec, YarnSpec
from runtime.models.spec import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    Linear,
    ModelSpec,
    MoeSpec,
    QKNorm,
    RouterScore,
    RouterSpec,
    SharedExpertSpec,
)

TOKEN_EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"


class SpecBuilder:
    """Builds the spec of one model from `metadata` and `tensors`."""

    def __init__(
        self,
        path: Path,
        architecture: str,
        metadata: Mapping[str, MetadataValue],
        tensors: Mapping[str, TensorInfo],
    ) -> None:
        self.path = path
        self.keys = Hyperparameters(path, architecture, metadata)
        self.n_embd = self.keys.count("embedding_length")
        self.n_layers = self.keys.count("block_count")
        self._tensors = tensors
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str, *shape: int) -> str:
        """`name`, after checking that the file has it with `shape` (trailing ones may be left out).

        Raises: CorruptModel naming the tensor, the expected shape and the one found.
        """
        if name not in self._tensors:
            raise CorruptModel(self.path, f"tensor '{name}' is missing")
        found = self._tensors[name].shape
        if _without_trailing_ones(found) != _without_trailing_ones(shape):
            raise CorruptModel(
                self.path,
                f"tensor '{name}' has the shape {list(found)}; the metadata asks for {list(shape)}",
            )
        self._used.add(name)
        return name

    def optional(self, name: str, *shape: int) -> str | None:
        """`tensor`, or None when the file does not have it."""
        return self.tensor(name, *shape) if self.has(name) else None

    def linear(self, name: str, n_in: int, n_out: int, n_expert: int | None = None) -> Linear:
        """The matrix `name.weight`, with `name.bias` and `name.scale` where the file has them."""
        stack = () if n_expert is None else (n_expert,)
        return Linear(
            weight=self.tensor(f"{name}.weight", n_in, n_out, *stack),
            n_in=n_in,
            n_out=n_out,
            bias=self.optional(f"{name}.bias", n_out, *stack),
            scale=self.optional(f"{name}.scale", *(stack or (1,))),
            n_expert=n_expert,
        )

    def rope(self, pairing: RopePairing, head_dim: int) -> RopeSpec:
        """Rope from the keys `rope.*` and, where the file has it, the tensor rope_freqs."""
        keys = self.keys
        n_rot = keys.count("rope.dimension_count", head_dim, at_least=2)
        if n_rot > head_dim or n_rot % 2:
            raise keys.wrong("rope.dimension_count", f"use an even number up to {head_dim}")
        base = keys.positive("rope.freq_base", 10000.0)
        if base <= 1.0:
            raise keys.wrong("rope.freq_base", "use a number above 1")
        factors = self.optional("rope_freqs.weight", n_rot // 2)
        kind = keys.text("rope.scaling.type", "linear")
        factor = 1.0
        if kind != "none" and keys.has("rope.scaling.factor"):
            factor = keys.positive("rope.scaling.factor")
        if kind in ("none", "linear"):
            return RopeSpec(pairing, n_rot, base, factor=factor, factors=factors)
        if kind != "yarn":
            raise ModelError(
                f"{self.path}: rope scaling '{kind}' is not supported; none, linear and yarn are"
            )
        yarn = YarnSpec(
            n_ctx_original=keys.count(
                "rope.scaling.original_context_length", keys.count("context_length")
            ),
            beta_fast=keys.positive("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.positive("rope.scaling.yarn_beta_slow", 1.0),
        )
        magnitude = keys.positive("rope.scaling.attn_factor", 1.0)
        magnitude *= 1.0 + 0.1 * math.log(max(factor, 1.0))
        return RopeSpec(pairing, n_rot, base, factor, yarn, magnitude, factors)

    def attention(
        self, layer: int, pairing: RopePairing, qk_norm: QKNorm = QKNorm.NONE
    ) -> AttentionSpec:
        """Full attention of layer `layer`, its projections fused or split as in the file."""
        keys, prefix = self.keys, f"blk.{layer}."
        n_head = keys.count_of_layer("attention.head_count", layer)
        n_head_kv = keys.count_of_layer("attention.head_count_kv", layer, n_head)
        if n_head % n_head_kv:
            raise keys.wrong("attention.head_count_kv", f"does not divide {n_head} heads")
        if not keys.has("attention.key_length") and self.n_embd % n_head:
            raise keys.wrong("attention.head_count", f"does not divide {self.n_embd} dimensions")
        dim_k = keys.count("attention.key_length", self.n_embd // n_head)
        dim_v = keys.count("attention.value_length", self.n_embd // n_head)
        n_q, n_k, n_v = n_head * dim_k, n_head_kv * dim_k, n_head_kv * dim_v
        q_norm = k_norm = None
        if qk_norm is not QKNorm.NONE:
            by_head = qk_norm is QKNorm.HEAD
            q_norm = self.tensor(f"{prefix}attn_q_norm.weight", dim_k if by_head else n_q)
            k_norm = self.tensor(f"{prefix}attn_k_norm.weight", dim_k if by_head else n_k)
        return AttentionSpec(
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim_k=dim_k,
            head_dim_v=dim_v,
            qkv=self._qkv(prefix, n_q, n_k, n_v),
            output=self.linear(f"{prefix}attn_output", n_head * dim_v, self.n_embd),
            scale=dim_k**-0.5,
            rope=self.rope(pairing, dim_k),
            qk_norm=qk_norm,
            q_norm=q_norm,
            k_norm=k_norm,
        )

    def dense(self, layer: int, n_ff: int, suffix: str = "") -> DenseSpec:
        """The feed-forward tensors `ffn_gate`, `ffn_up`, `ffn_down` with `suffix`."""
        name = f"blk.{layer}.ffn_{{}}{suffix}".format
        return DenseSpec(
            n_ff=n_ff,
            gate_up=(
                self.linear(name("gate"), self.n_embd, n_ff),
                self.linear(name("up"), self.n_embd, n_ff),
            ),
            down=self.linear(name("down"), n_ff, self.n_embd),
        )

    def moe(
        self,
        layer: int,
        n_ff: int,
        score: RouterScore,
        renormalise: bool,
        shared: SharedExpertSpec | None = None,
    ) -> MoeSpec:
        """Routed experts of layer `layer`, gate and up merged or split as in the file."""
        keys, prefix = self.keys, f"blk.{layer}."
        n_expert = keys.count("expert_count")
        n_used = keys.count("expert_used_count")
        if n_used > n_expert:
            raise keys.wrong("expert_used_count", f"the model has {n_expert} experts")
        # Zero means "not set" in this key.
        scaled = keys.has("expert_weights_scale") and keys.metadata.get(
            f"{keys.architecture}.expert_weights_scale"
        )
        router = RouterSpec(
            linear=self.linear(f"{prefix}ffn_gate_inp", self.n_embd, n_expert),
            score=score,
            renormalise=renormalise,
            scale=keys.positive("expert_weights_scale") if scaled else 1.0,
            selection_bias=self.optional(f"{prefix}exp_probs_b.bias", n_expert),
        )
        merged = self.has(f"{prefix}ffn_gate_up_exps.weight")
        width = 2 * n_ff if merged else n_ff
        return MoeSpec(
            n_expert=n_expert,
            n_used=n_used,
            n_ff=n_ff,
            router=router,
            gate_up=tuple(
                self.linear(f"{prefix}ffn_{name}_exps", self.n_embd, width, n_expert)
                for name in (("gate_up",) if merged else ("gate", "up"))
            ),
            down=self.linear(f"{prefix}ffn_down_exps", n_ff, self.n_embd, n_expert),
            shared=shared,
        )

    def model(self, layers: list[LayerSpec], may_be_tied: bool) -> ModelSpec:
        """The whole model; without `output.weight` the embedding table is the output matrix.

        Raises: CorruptModel for contradictions and for tensors that no part has asked for.
        """
        n_vocab = self._n_vocab()
        embedding = self.tensor(TOKEN_EMBEDDING, self.n_embd, n_vocab)
        tied = may_be_tied and not self.has(OUTPUT)
        matrix = "token_embd" if tied else "output"
        spec = ModelSpec(
            architecture=self.keys.architecture,
            name=_name(self.keys.metadata, self.path),
            n_vocab=n_vocab,
            n_embd=self.n_embd,
            n_ctx_train=self.keys.count("context_length"),
            eps=self.keys.positive("attention.layer_norm_rms_epsilon"),
            token_embedding=embedding,
            layers=tuple(layers),
            output_norm=self.tensor("output_norm.weight", self.n_embd),
            output=self.linear(matrix, self.n_embd, n_vocab),
        )
        unknown = sorted(set(self._tensors) - self._used)
        if unknown:
            raise ModelError(
                f"{self.path}: {len(unknown)} tensors that architecture "
                f"'{spec.architecture}' does not know: {', '.join(unknown[:4])}"
            )
        return spec

    def _qkv(self, prefix: str, n_q: int, n_k: int, n_v: int) -> tuple[Linear, ...]:
        if self.has(f"{prefix}attn_qkv.weight"):
            return (self.linear(f"{prefix}attn_qkv", self.n_embd, n_q + n_k + n_v),)
        widths = {"q": n_q, "k": n_k, "v": n_v}
        return tuple(
            self.linear(f"{prefix}attn_{part}", self.n_embd, width)
            for part, width in widths.items()
        )

    def _n_vocab(self) -> int:
        """Rows of the embedding table, after checking it against the vocabulary."""
        if not self.has(TOKEN_EMBEDDING):
            raise CorruptModel(self.path, f"tensor '{TOKEN_EMBEDDING}' is missing")
        shape = self._tensors[TOKEN_EMBEDDING].shape
        n_vocab = shape[1] if len(shape) > 1 else 1
        tokens = self.keys.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) != n_vocab:
            raise CorruptModel(
                self.path,
                f"'tokenizer.ggml.tokens' has {len(tokens)} entries, the embedding {n_vocab} rows",
            )
        if self.keys.count("vocab_size", n_vocab) != n_vocab:
            raise self.keys.wrong("vocab_size", f"the embedding has {n_vocab} rows")
        return n_vocab


def _without_trailing_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _name(metadata: Mapping[str, MetadataValue], path: Path) -> str:
    return label(metadata.get("general.name")) or label(path.stem)
