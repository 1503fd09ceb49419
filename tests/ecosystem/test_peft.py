"""PEFT: adapters of several kinds around a compiled or compilable model; switched off, saved, merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ecosystem.training import Wrap, compare, train

peft = pytest.importorskip("peft", reason="PEFT is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.usefixtures("quiet")

TOKENS = torch.randint(2, 64, (4, 9), generator=torch.Generator().manual_seed(1))
KINDS = {
    "lora": lambda: peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    "dora": lambda: peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


def base() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            bos_token_id=0,
            eos_token_id=1,
        )
    )


def loss(call: Any, index: int) -> torch.Tensor:
    return call(input_ids=TOKENS, labels=TOKENS).loss


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train(kind: str) -> None:
    def run(wrap: Wrap) -> tuple[Any, Any]:
        model = peft.get_peft_model(base(), KINDS[kind]())
        call = wrap(model)
        return train(model, call, loss), call

    compare(run, captures=2)


def test_switched_off_saved_and_merged(tmp_path: Path) -> None:
    def run(wrap: Wrap) -> tuple[Any, Any]:
        model = peft.get_peft_model(base(), KINDS["lora"]())
        call = wrap(model)
        left = train(model, call, loss)
        call.save_pretrained(tmp_path)
        call.eval()
        with torch.no_grad():
            found = [call(input_ids=TOKENS).logits]
            with model.disable_adapter():
                found.append(call(input_ids=TOKENS).logits)
            again = wrap(peft.PeftModel.from_pretrained(base(), tmp_path).eval())
            found.append(again(input_ids=TOKENS).logits)
            found.append(wrap(call.merge_and_unload().eval())(input_ids=TOKENS).logits)
        return [left, found], call

    compare(run)


def test_a_prompt_is_generated_between_steps() -> None:
    """As in reinforcement learning from preferences: sample, score, train."""

    def run(wrap: Wrap) -> tuple[Any, Any]:
        model = base()
        call = wrap(model)
        made: list[torch.Tensor] = []

        def step(call: Any, index: int) -> torch.Tensor:
            prompt = TOKENS[:2, : 4 + index % 2]
            call.eval()
            with torch.no_grad():
                options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 3, "pad_token_id": 1}
                made.append(call.generate(prompt, do_sample=index != 2, **options))
            call.train()
            return call(input_ids=made[-1], labels=made[-1]).loss

        return [train(model, call, step), made], call

    compare(run)
