"""Parts of the Qwen models that alternate gated delta nets with gated attention."""

from __future__ import annotations

from runtime.models.builder import SpecBuilder
from runtime.models.delta_net import DeltaNetSpec, GateFunction
from runtime.models.rope import RopePairing
from runtime.models.spec import AttentionSpec, MoeSpec, QKNorm, RouterScore, SharedExpertSpec


def is_recurrent(builder: SpecBuilder, layer: int) -> bool:
    """Whether `layer` is a delta net: the file lists them, or every nth layer is attention."""
    keys = builder.keys
    if keys.has("attention.recurrent_layers"):
        return keys.flag_of_layer("attention.recurrent_layers", layer)
    return (layer + 1) % keys.count("full_attention_interval", 4) != 0


def gated_attention(builder: SpecBuilder, layer: int) -> AttentionSpec:
    """Full attention with normed heads and a gate of its output."""
    return builder.attention(layer, RopePairing.NEOX, QKNorm.HEAD, gated=True)


def gated_delta_net(builder: SpecBuilder, layer: int, gate_function: GateFunction) -> DeltaNetSpec:
    """The delta net of `layer`.

    Raises: CorruptModel where its sizes contradict each other.
    """
    keys, n_embd, prefix = builder.keys, builder.n_embd, f"blk.{layer}."
    dim = keys.count("ssm.state_size")
    n_key_head, n_value_head = keys.count("ssm.group_count"), keys.count("ssm.time_step_rank")
    n_taps = keys.count("ssm.conv_kernel", at_least=2)
    n_value = n_value_head * dim
    if dim % 16:
        raise keys.wrong("ssm.state_size", "use a multiple of 16")
    if n_value_head % n_key_head:
        raise keys.wrong("ssm.group_count", f"does not divide {n_value_head} heads")
    if keys.count("ssm.inner_size", n_value) != n_value:
        raise keys.wrong("ssm.inner_size", f"{n_value_head} heads of {dim} are {n_value}")
    n_channels = 2 * n_key_head * dim + n_value
    return DeltaNetSpec(
        n_key_head=n_key_head,
        n_value_head=n_value_head,
        head_dim=dim,
        n_taps=n_taps,
        qkv=(builder.linear(f"{prefix}attn_qkv", n_embd, n_channels),),
        conv=(builder.tensor(f"{prefix}ssm_conv1d.weight", n_taps, n_channels),),
        decay=(builder.linear(f"{prefix}ssm_alpha", n_embd, n_value_head),),
        decay_bias=builder.tensor(f"{prefix}ssm_dt.bias", n_value_head),
        decay_rate=builder.tensor(f"{prefix}ssm_a", n_value_head),
        beta=builder.linear(f"{prefix}ssm_beta", n_embd, n_value_head),
        gate=(builder.linear(f"{prefix}attn_gate", n_embd, n_value),),
        gate_function=gate_function,
        norm=builder.tensor(f"{prefix}ssm_norm.weight", dim),
        output=builder.linear(f"{prefix}ssm_out", n_value, n_embd),
        l2_eps=keys.positive("attention.layer_norm_rms_epsilon"),
    )


def experts(builder: SpecBuilder, layer: int) -> MoeSpec:
    """Routed experts beside a shared one with a gate of its own."""
    keys = builder.keys
    shared = SharedExpertSpec(
        dense=builder.dense(layer, keys.count("expert_shared_feed_forward_length"), "_shexp"),
        gate=builder.linear(f"blk.{layer}.ffn_gate_inp_shexp", builder.n_embd, 1),
    )
    n_ff = keys.count("expert_feed_forward_length")
    return builder.moe(layer, n_ff, RouterScore.SOFTMAX, renormalise=True, shared=shared)
