"""Train small Hugging Face models from random configurations, compiled and in eager, and compare all they compute.

``python -m tests.conformance.model_runner --models bert,gpt2``; see the README beside this file. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

# Before transformers is imported: no look-up of anything on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import torch
from torch import Tensor

from tests.conformance.compilers import COMPILERS, Compiler, breaks, not_compiled, refusal_types
from tests.conformance.more_models import BATCH, VOCABULARY, WIDTH, Batch, Factory, causal_batch, text_batch, tokens_of
from tests.conformance.more_models import FACTORIES as MORE_FACTORIES
from tests.conformance.newer_models import FACTORIES as NEWER_FACTORIES
from tests.differential import Difference, differences, max_abs_diff


def _image_batch(size: int, labels: int = 3) -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, labels, (BATCH,))}


def _encoder(config: str, model: str, **extra: Any) -> Factory:
    """A BERT-like model for masked words."""

    def make(library: Any) -> tuple[torch.nn.Module, Callable[[], Batch]]:
        settings: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 32,
        }
        return getattr(library, model)(getattr(library, config)(**(settings | extra))), text_batch

    return make


def _decoder(config: str, model: str, replace: Mapping[str, Any] | None = None, **extra: Any) -> Factory:
    """A Llama-like model; ``replace`` is a whole set of settings for families with other names for them."""

    def make(library: Any) -> tuple[torch.nn.Module, Callable[[], Batch]]:
        settings: dict[str, Any] = {
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 32,
        }
        chosen = {"vocab_size": VOCABULARY, **(settings if replace is None else replace), **extra}
        chosen = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **chosen}
        return getattr(library, model)(getattr(library, config)(**chosen)), causal_batch

    return make


def _encoder_decoder(config: str, model: str, **settings: Any) -> Factory:
    def make(library: Any) -> tuple[torch.nn.Module, Callable[[], Batch]]:
        return getattr(library, model)(getattr(library, config)(vocab_size=VOCABULARY, **settings)), text_batch

    return make


def _vision(config: str, model: str, size: int = 32, **settings: Any) -> Factory:
    def make(library: Any) -> tuple[torch.nn.Module, Callable[[], Batch]]:
        chosen = {"num_labels": 3, **settings}
        return getattr(library, model)(getattr(library, config)(**chosen)), lambda: _image_batch(size)

    return make


_TRANSFORMER = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def _whisper(library: Any) -> tuple[torch.nn.Module, Callable[[], Batch]]:
    config = library.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = library.WhisperForConditionalGeneration(config)
    return model, lambda: {"input_features": torch.randn(BATCH, 8, 32), "labels": tokens_of()}


def _clip(library: Any) -> tuple[torch.nn.Module, Callable[[], Batch]]:
    text = {**_TRANSFORMER, "vocab_size": VOCABULARY, "max_position_embeddings": 16}
    text |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = library.CLIPConfig(
        text_config=text, vision_config={**_TRANSFORMER, "image_size": 32, "patch_size": 8}, projection_dim=WIDTH
    )

    def batch() -> Batch:
        tokens = tokens_of()
        tokens[:, -1] = 2
        return {"input_ids": tokens, "pixel_values": torch.randn(BATCH, 3, 32, 32), "return_loss": True}

    return library.CLIPModel(config), batch


def _wav2vec2(library: Any) -> tuple[torch.nn.Module, Callable[[], Batch]]:
    config = library.Wav2Vec2Config(
        vocab_size=VOCABULARY,
        **_TRANSFORMER,
        conv_dim=(16, 16),
        conv_stride=(4, 2),
        conv_kernel=(8, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        # The masks of SpecAugment and the skipped layers are drawn from NumPy's generator, in Python.
        apply_spec_augment=False,
        layerdrop=0.0,
    )
    return library.Wav2Vec2ForCTC(config), lambda: {"input_values": torch.randn(BATCH, 400), "labels": tokens_of(4)}


def _segformer(library: Any) -> tuple[torch.nn.Module, Callable[[], Batch]]:
    config = library.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=WIDTH,
        num_labels=3,
    )

    def batch() -> Batch:
        return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 3, (BATCH, 32, 32))}

    return library.SegformerForSemanticSegmentation(config), batch


CORE = ("bert", "gpt2", "llama", "t5", "vit", "resnet", "whisper", "clip", "mamba")

FACTORIES: dict[str, Factory] = {
    "bert": _encoder("BertConfig", "BertForMaskedLM"),
    "gpt2": _decoder("GPT2Config", "GPT2LMHeadModel", {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32}),
    "llama": _decoder("LlamaConfig", "LlamaForCausalLM"),
    "t5": _encoder_decoder(
        "T5Config",
        "T5ForConditionalGeneration",
        d_model=WIDTH,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    ),
    "vit": _vision("ViTConfig", "ViTForImageClassification", image_size=32, patch_size=8, **_TRANSFORMER),
    "resnet": _vision(
        "ResNetConfig", "ResNetForImageClassification", embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1]
    ),
    "whisper": _whisper,
    "clip": _clip,
    "mamba": _decoder(
        "MambaConfig",
        "MambaForCausalLM",
        {"hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4},
    ),
    # Further families.
    "mistral": _decoder("MistralConfig", "MistralForCausalLM", sliding_window=8),
    "gemma": _decoder("GemmaConfig", "GemmaForCausalLM", head_dim=16),
    "qwen2": _decoder("Qwen2Config", "Qwen2ForCausalLM"),
    "mixtral": _decoder("MixtralConfig", "MixtralForCausalLM", num_local_experts=4),
    "opt": _decoder(
        "OPTConfig",
        "OPTForCausalLM",
        {
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 64,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": WIDTH,
        },
    ),
    "bloom": _decoder("BloomConfig", "BloomForCausalLM", {"hidden_size": WIDTH, "n_layer": 2, "n_head": 2}),
    "gpt_neox": _decoder("GPTNeoXConfig", "GPTNeoXForCausalLM", dict(_TRANSFORMER), max_position_embeddings=32),
    "phi": _decoder("PhiConfig", "PhiForCausalLM"),
    "falcon": _decoder(
        "FalconConfig", "FalconForCausalLM", {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    ),
    "roberta": _encoder("RobertaConfig", "RobertaForMaskedLM"),
    "distilbert": _encoder(
        "DistilBertConfig", "DistilBertForMaskedLM", dim=WIDTH, n_layers=2, n_heads=2, hidden_dim=64
    ),
    "albert": _encoder("AlbertConfig", "AlbertForMaskedLM", embedding_size=16),
    "electra": _encoder("ElectraConfig", "ElectraForMaskedLM", embedding_size=16),
    "deberta": _encoder("DebertaConfig", "DebertaForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "bart": _encoder_decoder(
        "BartConfig",
        "BartForConditionalGeneration",
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=32,
    ),
    "deit": _vision("DeiTConfig", "DeiTForImageClassification", image_size=32, patch_size=8, **_TRANSFORMER),
    "beit": _vision("BeitConfig", "BeitForImageClassification", image_size=32, patch_size=8, **_TRANSFORMER),
    "swin": _vision(
        "SwinConfig",
        "SwinForImageClassification",
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=4,
    ),
    "convnext": _vision(
        "ConvNextConfig", "ConvNextForImageClassification", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2
    ),
    "wav2vec2": _wav2vec2,
    "segformer": _segformer,
    **MORE_FACTORIES,
    **NEWER_FACTORIES,
}

# How the two batches of each mode are run: in training, with the configuration's own dropout, and in evaluation mode.
MODES = ("train", "eval")


@dataclass
class ModelResult:
    """What became of one model in one mode."""

    model: str
    mode: str
    verdict: str
    reason: str = ""
    loss_difference: float = 0.0
    output_difference: float = 0.0
    gradient_difference: float = 0.0
    seconds: float = 0.0
    parameters: int = 0


def build(name: str) -> tuple[torch.nn.Module, list[Batch]]:
    """A model and two batches, always the same ones."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model, batch = FACTORIES[name](transformers)
    torch.manual_seed(1)
    return model, [batch(), batch()]


def _tensors(result: Any, path: str = "outputs") -> dict[str, Tensor]:
    """The tensors in a model's output by path; caches and other objects are entered through their attributes."""
    if isinstance(result, Tensor):
        return {path: result}
    if isinstance(result, Mapping):
        entries = {f"{path}.{key}": value for key, value in result.items()}
    elif isinstance(result, (list, tuple)):
        entries = {f"{path}[{index}]": value for index, value in enumerate(result)}
    elif hasattr(result, "__dict__") and not callable(result) and not isinstance(result, torch.nn.Module):
        entries = {f"{path}.{key}": value for key, value in vars(result).items()}
    else:
        return {}
    return {name: tensor for key, value in entries.items() for name, tensor in _tensors(value, key).items()}


@dataclass
class _Step:
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    keys: tuple[str, ...]
    kind: type
    random_state: Tensor


def _step(model: torch.nn.Module, call: Callable[..., Any], batch: Batch, seed: int) -> _Step:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    result = call(**copy.deepcopy(batch))
    state = torch.get_rng_state()
    result.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return _Step(_tensors(result), gradients, buffers, tuple(result.keys()), type(result), state)


def _largest(left: Mapping[str, Tensor | None], right: Mapping[str, Tensor | None]) -> float:
    pairs = [(left[name], right.get(name)) for name in left]
    return max((max_abs_diff(a, b) for a, b in pairs if a is not None and b is not None), default=0.0)


def _equals_compiling_branch(name: str, mode: str, actual: Sequence[_Step]) -> bool:
    """Whether eager gives exactly these steps when the model is told that it is being compiled; for the diagnosis."""
    model, batches = build(name)
    model.train(mode == "train")
    with (
        mock.patch("torch.compiler.is_compiling", lambda: True),
        mock.patch("torch.compiler.is_dynamo_compiling", lambda: True),
    ):
        expected = [_step(model, model, batch, seed) for seed, batch in enumerate(batches)]
    pairs = list(zip(expected, actual, strict=True))
    return not any(
        list(differences(left.outputs, right.outputs)) or list(differences(left.gradients, right.gradients))
        for left, right in pairs
    )


def check_model(name: str, mode: str, compiler: Compiler) -> ModelResult:
    """Two steps on two batches, in eager and compiled; everything must agree to the last bit."""
    started = time.perf_counter()
    model, batches = build(name)
    model.train(mode == "train")
    twin = copy.deepcopy(model)
    outcome = ModelResult(name, mode, "passed", parameters=sum(parameter.numel() for parameter in model.parameters()))
    try:
        expected = [_step(model, model, batch, seed) for seed, batch in enumerate(batches)]
    except RuntimeError as error:
        outcome.verdict, outcome.reason = "eager cannot", f"{type(error).__name__}: {error}"[:700]
        return outcome
    try:
        # The compiled callable may be a new module around the same parameters.
        compiled = compiler(twin)
        actual = [_step(twin, compiled, batch, seed) for seed, batch in enumerate(batches)]
    except Exception as error:
        outcome.verdict = "refused" if isinstance(error, refusal_types()) else "error"
        frames = traceback.extract_tb(error.__traceback__)
        outcome.reason = f"{type(error).__name__}: {error}"[:700]
        if outcome.verdict == "error" and frames:
            outcome.reason += f" [{Path(frames[-1].filename).name}:{frames[-1].lineno}]"
        outcome.seconds = round(time.perf_counter() - started, 2)
        return outcome
    found: list[Difference] = []
    for index, (left, right) in enumerate(zip(expected, actual, strict=True)):
        place = f"batch {index}: "
        if (left.kind, left.keys) != (right.kind, right.keys):
            text = f"eager {left.kind.__name__}{left.keys}, compiled {right.kind.__name__}{right.keys}"
            found.append(Difference("structure", place + "outputs", text))
        found += differences(left.outputs, right.outputs, place + "outputs")
        found += differences(left.gradients, right.gradients, place + "gradients")
        found += differences(left.buffers, right.buffers, place + "buffers")
        if not torch.equal(left.random_state, right.random_state):
            found.append(Difference("random state", place + "the call", "not as eager leaves it"))
        outcome.loss_difference = max(
            outcome.loss_difference,
            _largest({"loss": left.outputs["outputs.loss"]}, {"loss": right.outputs.get("outputs.loss")}),
        )
        outcome.output_difference = max(outcome.output_difference, _largest(left.outputs, right.outputs))
        outcome.gradient_difference = max(outcome.gradient_difference, _largest(left.gradients, right.gradients))
    named = breaks(compiled)
    idle = not_compiled(compiled)
    if named and compiler is COMPILERS["dovetail-with-breaks"]:
        outcome.reason = f"{len(named)} graph breaks: " + "; ".join(named)
        # A parameter that two graphs share gets its gradient as a sum of theirs: the same terms in another order.
        found = [difference for difference in found if difference.kind != "values, by rounding"]
    elif idle:
        outcome.verdict, outcome.reason = "error", idle
    if found:
        outcome.verdict = "wrong"
        more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
        outcome.reason = "; ".join(str(entry) for entry in found[:3]) + more
        if all(entry.kind.startswith("values") for entry in found) and _equals_compiling_branch(name, mode, actual):
            # The model asks whether it is compiled and takes another algorithm; on that branch the numbers are eager's.
            outcome.verdict = "passed"
            outcome.reason += (
                "; bitwise equal to eager where torch.compiler.is_compiling() is true: the model branches on it"
            )
    outcome.seconds = round(time.perf_counter() - started, 2)
    return outcome


def run_here(names: Sequence[str], modes: Sequence[str], compiler: Compiler) -> list[ModelResult]:
    """Check models in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [check_model(name, mode, compiler) for name in names for mode in modes]


def _run_apart(name: str, modes: Sequence[str], compiler: str, timeout: float) -> list[ModelResult]:
    """Check one model in a process of its own."""
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "results.json")
        command = [sys.executable, "-m", "tests.conformance.model_runner", "--here", "--json", str(out), "--quiet"]
        command += ["--models", name, "--modes", ",".join(modes), "--compiler", compiler]
        environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **os.environ}
        try:
            done = subprocess.run(command, env=environment, timeout=timeout, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return [ModelResult(name, mode, "error", f"took more than {timeout:.0f} s") for mode in modes]
        if out.exists():
            return [ModelResult(**entry) for entry in json.loads(out.read_text())["results"]]
        tail = " | ".join(done.stderr.strip().splitlines()[-3:])
        return [ModelResult(name, mode, "error", f"process ended with {done.returncode}: {tail}") for mode in modes]


def _line(result: ModelResult) -> str:
    return (
        f"{result.model:12} {result.mode:6} {result.verdict:12} loss {result.loss_difference:<9.3g} "
        f"outputs {result.output_difference:<9.3g} gradients {result.gradient_difference:<9.3g} "
        f"{result.parameters:>9,} parameters {result.seconds:7.2f} s"
        + (f"\n{'':12} {result.reason}" if result.reason else "")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if any model was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.model_runner", description=__doc__)
    parser.add_argument("--models", default="core", help="names separated by commas, or core (default), or all")
    parser.add_argument("--modes", default=",".join(MODES), help="train, eval or both")
    parser.add_argument("--compiler", choices=sorted(COMPILERS), default="dovetail")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one model")
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--here", action="store_true", help="in this process, for a debugger")
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    names = {"core": list(CORE), "all": list(FACTORIES)}.get(chosen.models) or chosen.models.split(",")
    modes = chosen.modes.split(",")
    unknown = [name for name in names if name not in FACTORIES] + [mode for mode in modes if mode not in MODES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; models are {', '.join(FACTORIES)}; modes are {', '.join(MODES)}")
    results: list[ModelResult] = []
    if chosen.here:
        results = run_here(names, modes, COMPILERS[chosen.compiler])
        if not chosen.quiet:
            print("\n".join(_line(result) for result in results))
    else:
        with ThreadPoolExecutor(max(1, chosen.jobs)) as pool:
            for batch in pool.map(lambda name: _run_apart(name, modes, chosen.compiler, chosen.timeout), names):
                results += batch
                print("\n".join(_line(result) for result in batch), flush=True)
    if chosen.json:
        payload = {
            "compiler": chosen.compiler,
            "torch": torch.__version__,
            "results": [asdict(result) for result in results],
        }
        chosen.json.write_text(json.dumps(payload, indent=1))
    if not chosen.quiet:
        counts = {
            verdict: sum(result.verdict == verdict for result in results)
            for verdict in ("passed", "refused", "wrong", "error", "eager cannot")
        }
        print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(any(result.verdict == "wrong" for result in results))


if __name__ == "__main__":
    sys.exit(main())
