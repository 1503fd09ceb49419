"""A third set of Hugging Face families for :mod:`tests.conformance.model_runner`: sound, experts, state spaces, time series."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.conformance.more_models import (
    BATCH,
    DECODER,
    ENCODER,
    SEQUENCE,
    SPECIAL,
    T5_LIKE,
    TRANSFORMER,
    VOCABULARY,
    WIDTH,
    Batch,
    Factory,
    causal_batch,
    text_batch,
    tokens_of,
)


def _classes() -> torch.Tensor:
    return torch.randint(0, 3, (BATCH,))


def _sentence() -> Batch:
    return {"input_ids": tokens_of(), "labels": _classes()}


def _sound() -> Batch:
    return {"input_values": torch.randn(BATCH, 400), "labels": _classes()}


def _image() -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": _classes()}


def _series() -> Batch:
    return {"past_values": torch.randn(BATCH, 16, 2), "future_values": torch.randn(BATCH, 4, 2)}


def _model(prefix: str, head: str, batch: Callable[[], Batch], settings: Mapping[str, Any]) -> Factory:
    def make(library: Any) -> tuple[torch.nn.Module, Callable[[], Batch]]:
        return getattr(library, prefix + head)(getattr(library, prefix + "Config")(**settings)), batch

    return make


def _decoder(prefix: str, base: Mapping[str, Any] = DECODER, **extra: Any) -> Factory:
    return _model(prefix, "ForCausalLM", causal_batch, {"vocab_size": VOCABULARY, **SPECIAL, **base, **extra})


def _encoder(prefix: str, base: Mapping[str, Any] = ENCODER, **extra: Any) -> Factory:
    return _model(prefix, "ForMaskedLM", text_batch, {"vocab_size": VOCABULARY, "pad_token_id": 0, **base, **extra})


def _sequence(prefix: str, base: Mapping[str, Any] = SEQUENCE, **extra: Any) -> Factory:
    settings = {"vocab_size": VOCABULARY, **SPECIAL, **base, **extra}
    return _model(prefix, "ForConditionalGeneration", text_batch, settings)


def _images(prefix: str, **settings: Any) -> Factory:
    return _model(prefix, "ForImageClassification", _image, {"num_labels": 3, **settings})


_WAVES = {
    **TRANSFORMER,
    "num_labels": 3,
    "vocab_size": VOCABULARY,
    "conv_dim": (16, 16),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    # The masks of SpecAugment and the skipped layers are drawn from NumPy's generator, in Python.
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}
_STATE = {"hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4}
_HYBRID = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}


def _speech_to_text(library: Any) -> tuple[torch.nn.Module, Callable[[], Batch]]:
    settings = {**SEQUENCE, **SPECIAL, "vocab_size": VOCABULARY, "input_feat_per_channel": 8, "conv_channels": 16}
    settings |= {"max_source_positions": 64, "max_target_positions": 32, "encoder_layerdrop": 0.0}
    model = library.Speech2TextForConditionalGeneration(library.Speech2TextConfig(**settings))
    return model, lambda: {"input_features": torch.randn(BATCH, 32, 8), "labels": tokens_of()}


def _spectrogram(library: Any) -> tuple[torch.nn.Module, Callable[[], Batch]]:
    config = library.ASTConfig(
        **TRANSFORMER, num_labels=3, patch_size=4, frequency_stride=4, time_stride=4, max_length=16, num_mel_bins=8
    )
    model = library.ASTForAudioClassification(config)
    return model, lambda: {"input_values": torch.randn(BATCH, 16, 8), "labels": _classes()}


_PATCH_SERIES = {"num_input_channels": 2, "context_length": 16, "prediction_length": 4, "patch_length": 4}

FACTORIES: dict[str, Factory] = {
    # Mixtures of experts.
    "qwen3_moe": _decoder("Qwen3Moe", head_dim=16, **_EXPERTS),
    "deepseek_v2": _decoder("DeepseekV2", **_LATENT),
    "deepseek_v3": _decoder("DeepseekV3", **_LATENT),
    "granitemoe": _decoder("GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    "phimoe": _decoder("Phimoe", num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": _decoder("GptOss", head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "dbrx": _decoder(
        "Dbrx",
        {
            "d_model": WIDTH,
            "n_heads": 2,
            "n_layers": 2,
            "max_seq_len": 32,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    # State spaces and recurrences.
    "mamba2": _decoder("Mamba2", {**_STATE, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 4}),
    "falcon_mamba": _decoder("FalconMamba", _STATE),
    "rwkv": _decoder("Rwkv", {"hidden_size": WIDTH, "num_hidden_layers": 2, "context_length": 32}),
    "jamba": _decoder(
        "Jamba",
        num_experts=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts_per_tok=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "recurrent_gemma": _decoder("RecurrentGemma", num_hidden_layers=3, head_dim=16, attention_window_size=8),
    "lfm2": _decoder("Lfm2", layer_types=["conv", "full_attention"]),
    "bamba": _decoder("Bamba", **_HYBRID, attn_layer_indices=[1]),
    "falcon_h1": _decoder("FalconH1", **_HYBRID, mamba_d_ssm=64),
    "granitemoehybrid": _decoder(
        "GraniteMoeHybrid",
        **_HYBRID,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
        layer_types=["mamba", "attention"],
    ),
    "zamba2": _decoder(
        "Zamba2",
        mamba_d_state=8,
        mamba_ngroups=1,
        mamba_headdim=16,
        n_mamba_heads=4,
        chunk_size=4,
        layer_types=["mamba", "hybrid"],
        hybrid_layer_ids=[1],
        num_mem_blocks=1,
    ),
    "nemotron_h": _decoder(
        "NemotronH",
        layers_block_type=["mamba", "attention"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=8,
        chunk_size=4,
        head_dim=16,
    ),
    "qwen3_next": _decoder(
        "Qwen3Next",
        **_EXPERTS,
        head_dim=16,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    ),
    "minimax": _decoder(
        "MiniMax",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        block_size=4,
        layer_types=["linear_attention", "full_attention"],
    ),
    # Further decoders.
    "helium": _decoder("Helium", head_dim=16),
    "diffllama": _decoder("DiffLlama"),
    "exaone4": _decoder("Exaone4", head_dim=16, sliding_window=8, sliding_window_pattern=2),
    "arcee": _decoder("Arcee"),
    "apertus": _decoder("Apertus"),
    "ernie4_5": _decoder("Ernie4_5", head_dim=16),
    "olmo3": _decoder("Olmo3", sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    # Further encoders.
    "rembert": _encoder("RemBert", input_embedding_size=16, output_embedding_size=16),
    "mobilebert": _encoder("MobileBert", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    "longformer": _encoder("Longformer", attention_window=4),
    "big_bird": _encoder("BigBird", block_size=4, num_random_blocks=1),
    "esm": _encoder("Esm", mask_token_id=4, position_embedding_type="rotary"),
    "funnel": _encoder("Funnel", {"d_model": WIDTH, "n_head": 2, "d_head": 16, "d_inner": 64, "block_sizes": [1, 1]}),
    "ibert": _encoder("IBert"),
    "canine": _model(
        "Canine",
        "ForSequenceClassification",
        _sentence,
        {**ENCODER, "num_labels": 3, "downsampling_rate": 4, "local_transformer_stride": 4, "num_hash_buckets": 64},
    ),
    "xlnet": _model(
        "XLNet",
        "LMHeadModel",
        causal_batch,
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layer": 2, "n_head": 2, "d_inner": 64},
    ),
    # Encoders and decoders.
    "led": _sequence("LED", max_encoder_position_embeddings=32, max_decoder_position_embeddings=32, attention_window=4),
    "blenderbot_small": _sequence("BlenderbotSmall"),
    "plbart": _sequence("PLBart"),
    "umt5": _sequence("UMT5", T5_LIKE),
    "prophetnet": _sequence(
        "ProphetNet",
        {
            "hidden_size": WIDTH,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 2,
            "num_decoder_attention_heads": 2,
            "max_position_embeddings": 32,
        },
    ),
    # Sound.
    "wav2vec2_classes": _model("Wav2Vec2", "ForSequenceClassification", _sound, _WAVES),
    "hubert": _model("Hubert", "ForSequenceClassification", _sound, _WAVES),
    "wavlm": _model("WavLM", "ForSequenceClassification", _sound, _WAVES),
    "sew": _model("SEW", "ForSequenceClassification", _sound, {**_WAVES, "squeeze_factor": 2}),
    "speech_to_text": _speech_to_text,
    "spectrogram": _spectrogram,
    # Images.
    "siglip": _images("Siglip", vision_config={**TRANSFORMER, "image_size": 32, "patch_size": 8}),
    "levit": _images(
        "Levit",
        image_size=32,
        hidden_sizes=[16, 32, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        down_ops=[["Subsample", 8, 2, 2, 2, 2], ["Subsample", 8, 4, 2, 2, 2]],
    ),
    "efficientnet": _images(
        "EfficientNet", image_size=32, width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320
    ),
    "mobilevit": _images("MobileViT", image_size=32, hidden_sizes=[16, 16, 16], neck_hidden_sizes=[8] * 7),
    "hiera": _images(
        "Hiera",
        image_size=[32, 32],
        embed_dim=16,
        num_heads=[1, 2],
        depths=[1, 1],
        query_stride=[2, 2],
        masked_unit_size=[4, 4],
        num_query_pool=1,
        embed_dim_multiplier=2.0,
        patch_stride=[4, 4],
    ),
    # Time series.
    "patchtst": _model(
        "PatchTST", "ForPrediction", _series, {**_PATCH_SERIES, "d_model": WIDTH, "ffn_dim": 64, "num_hidden_layers": 2}
    ),
    "patchtsmixer": _model(
        "PatchTSMixer", "ForPrediction", _series, {**_PATCH_SERIES, "d_model": 16, "num_layers": 2, "patch_stride": 4}
    ),
}
