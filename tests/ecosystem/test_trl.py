"""TRL: supervised fine-tuning of a compiled model, and compiled by the trainer itself, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.differential import CLOSE, same
from tests.ecosystem.training import Wrap, compare, eager

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.usefixtures("quiet")

TEXTS = ("the cat sat on the mat .", "a dog ran fast .", "the dog sat ?", "no cat ran slow .")
MARKS = ("<pad>", "<s>", "</s>", "<unk>")


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*MARKS, *dict.fromkeys(" ".join(TEXTS).split())]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), MARKS, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def fine_tuned(wrap: Wrap, folder: Path, **options: Any) -> tuple[list[Any], Any]:
    """Losses and the state that the trainer leaves, and the model that it was given."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=18, **sizes, **heads, **ids))
    call = wrap(model)
    arguments = trl.SFTConfig(
        str(folder),
        **{"max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1, **options},
        **{"report_to": [], "save_strategy": "no", "disable_tqdm": True},
        **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False},
    )
    data = datasets.Dataset.from_list([{"text": text} for text in TEXTS])
    trainer = trl.SFTTrainer(call, arguments, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return [losses, dict(model.state_dict())], call


def test_supervised_fine_tuning_of_a_compiled_model(tmp_path: Path) -> None:
    # Two lengths of text, with one graph break each: TRL multiplies into a part of a buffer.
    compare(lambda wrap: fine_tuned(wrap, tmp_path), captures=6)


@pytest.mark.slow
def test_compiled_by_the_trainer(tmp_path: Path) -> None:
    (expected, _), _ = fine_tuned(eager, tmp_path, max_steps=1)
    by_name = {"torch_compile": True, "torch_compile_backend": "dovetail"}
    (found, _), _ = fine_tuned(eager, tmp_path, max_steps=1, **by_name)
    torch._dynamo.reset()
    same(torch.tensor(expected), torch.tensor(found), exact=CLOSE)
