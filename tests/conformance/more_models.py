"""Further Hugging Face families for :mod:`tests.conformance.model_runner`, each from a small random configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Batch = dict[str, Any]
Factory = Callable[[Any], tuple[torch.nn.Module, Callable[[], Batch]]]

VOCABULARY, LENGTH, WIDTH, BATCH = 101, 12, 32, 2
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TRANSFORMER = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
DECODER = {**TRANSFORMER, "num_key_value_heads": 2, "max_position_embeddings": 32}
ENCODER = {**TRANSFORMER, "max_position_embeddings": 32}
SEQUENCE = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 1,
}
T5_LIKE = {
    "d_model": WIDTH,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}


def tokens_of(length: int = LENGTH) -> torch.Tensor:
    # 0 to 4 are left to the special tokens.
    return torch.randint(5, VOCABULARY, (BATCH, length))


def causal_batch() -> Batch:
    tokens = tokens_of()
    return {"input_ids": tokens, "labels": tokens.clone()}


def text_batch() -> Batch:
    tokens = tokens_of()
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens_of()}


def _model(prefix: str, head: str, settings: Mapping[str, Any], batch: Callable[[], Batch]) -> Factory:
    def make(library: Any) -> tuple[torch.nn.Module, Callable[[], Batch]]:
        return getattr(library, prefix + head)(getattr(library, prefix + "Config")(**settings)), batch

    return make


def _decoder(prefix: str, base: Mapping[str, Any] = DECODER, **extra: Any) -> Factory:
    return _model(prefix, "ForCausalLM", {"vocab_size": VOCABULARY, **SPECIAL, **base, **extra}, causal_batch)


def _encoder(prefix: str, base: Mapping[str, Any] = ENCODER, **extra: Any) -> Factory:
    return _model(prefix, "ForMaskedLM", {"vocab_size": VOCABULARY, "pad_token_id": 0, **base, **extra}, text_batch)


def _sequence(prefix: str, base: Mapping[str, Any] = SEQUENCE, head: str = "ForConditionalGeneration") -> Factory:
    return _model(prefix, head, {"vocab_size": VOCABULARY, **SPECIAL, **base}, text_batch)


def _images(prefix: str, size: int = 32, **settings: Any) -> Factory:
    def batch() -> Batch:
        return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, 3, (BATCH,))}

    return _model(prefix, "ForImageClassification", {"num_labels": 3, **settings}, batch)


def _patches(prefix: str, **settings: Any) -> Factory:
    return _images(prefix, image_size=32, patch_size=8, **TRANSFORMER, **settings)


_GPT = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32}

FACTORIES: dict[str, Factory] = {
    "qwen3": _decoder("Qwen3", head_dim=16),
    "gemma2": _decoder("Gemma2", head_dim=16, sliding_window=8),
    "phi3": _decoder("Phi3"),
    "olmo": _decoder("Olmo"),
    "olmo2": _decoder("Olmo2"),
    "stablelm": _decoder("StableLm"),
    "starcoder2": _decoder("Starcoder2"),
    "cohere": _decoder("Cohere"),
    "granite": _decoder("Granite"),
    "nemotron": _decoder("Nemotron"),
    "persimmon": _decoder("Persimmon"),
    "glm": _decoder("Glm", head_dim=16),
    "smollm3": _decoder("SmolLM3"),
    "qwen2_moe": _decoder(
        "Qwen2Moe", num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts_per_tok=2
    ),
    "olmoe": _decoder("Olmoe", num_experts=4, num_experts_per_tok=2),
    "gptj": _decoder("GPTJ", _GPT, rotary_dim=8),
    "codegen": _decoder("CodeGen", {**_GPT, "n_head": 4}, rotary_dim=4),
    "gpt_bigcode": _decoder("GPTBigCode", _GPT),
    "gpt_neo": _decoder(
        "GPTNeo",
        {
            "hidden_size": WIDTH,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 32,
        },
    ),
    "mpt": _decoder("Mpt", {"d_model": WIDTH, "n_heads": 2, "n_layers": 2, "max_seq_len": 32}),
    "xglm": _decoder(
        "XGLM", {"d_model": WIDTH, "ffn_dim": 64, "num_layers": 2, "attention_heads": 2, "max_position_embeddings": 32}
    ),
    "biogpt": _decoder("BioGpt", ENCODER),
    "mpnet": _encoder("MPNet"),
    "xlm_roberta": _encoder("XLMRoberta"),
    "camembert": _encoder("Camembert"),
    "deberta_v2": _encoder("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "convbert": _encoder("ConvBert", embedding_size=WIDTH),
    "megatron_bert": _encoder("MegatronBert"),
    "ernie": _encoder("Ernie"),
    "modernbert": _encoder("ModernBert", eos_token_id=2, bos_token_id=1, cls_token_id=1, sep_token_id=2),
    "roformer": _encoder("RoFormer", embedding_size=WIDTH),
    "fnet": _encoder("FNet"),
    "nystromformer": _encoder("Nystromformer", segment_means_seq_len=12, num_landmarks=4),
    "squeezebert": _encoder(
        "SqueezeBert", embedding_size=WIDTH, q_groups=1, k_groups=1, v_groups=1, post_attention_groups=1
    ),
    "layoutlm": _encoder("LayoutLM"),
    "pegasus": _sequence("Pegasus"),
    "mbart": _sequence("MBart"),
    "marian": _sequence("Marian", head="MTModel"),
    "blenderbot": _sequence("Blenderbot"),
    "m2m_100": _sequence("M2M100"),
    "mt5": _sequence("MT5", T5_LIKE),
    "longt5": _sequence("LongT5", {**T5_LIKE, "local_radius": 4}),
    "switch_transformers": _sequence("SwitchTransformers", {**T5_LIKE, "num_experts": 2, "expert_capacity": 8}),
    "dinov2": _patches("Dinov2"),
    "vit_msn": _patches("ViTMSN"),
    "convnextv2": _images("ConvNextV2", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    "regnet": _images("RegNet", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8),
    "mobilenet_v1": _images("MobileNetV1", image_size=32, depth_multiplier=0.25),
    "mobilenet_v2": _images("MobileNetV2", image_size=32, depth_multiplier=0.25),
    "poolformer": _images(
        "PoolFormer",
        hidden_sizes=[16, 32],
        depths=[1, 1],
        num_encoder_blocks=2,
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
    ),
    "swinv2": _images(
        "Swinv2", image_size=32, patch_size=4, embed_dim=16, depths=[2, 1], num_heads=[2, 2], window_size=4
    ),
    "focalnet": _images(
        "FocalNet", image_size=32, embed_dim=16, depths=[1, 1], focal_levels=[1, 1], focal_windows=[3, 3]
    ),
    "bit": _images("Bit", embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], num_groups=4),
    "pvt_v2": _images(
        "PvtV2",
        image_size=32,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        num_encoder_blocks=2,
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
    ),
}
