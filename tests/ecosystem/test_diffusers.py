"""Diffusers: an autoencoder with one image, a conditional network with checkpointed blocks, a pipeline that is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ecosystem.training import Wrap, compare, train

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
pytestmark = pytest.mark.usefixtures("quiet")


def test_an_autoencoder_with_one_image() -> None:
    def run(wrap: Wrap) -> tuple[Any, Any]:
        blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
        model = diffusers.AutoencoderKL(**blocks, block_out_channels=(8, 16), norm_num_groups=4, sample_size=16)
        call = wrap(model)

        def loss(call: Any, index: int) -> torch.Tensor:
            image = torch.randn(1, 3, 16, 16)
            return (call(image, sample_posterior=True).sample - image).square().mean()

        return train(model, call, loss), call

    compare(run, captures=1)


def test_a_conditional_network_with_checkpoints() -> None:
    def run(wrap: Wrap) -> tuple[Any, Any]:
        model = diffusers.UNet2DConditionModel(
            sample_size=8,
            layers_per_block=1,
            block_out_channels=(16, 32),
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=4,
            cross_attention_dim=16,
        )
        model.enable_gradient_checkpointing()
        schedule = diffusers.DDPMScheduler(num_train_timesteps=50)
        call = wrap(model)

        def loss(call: Any, index: int) -> torch.Tensor:
            image, noise, when = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8), torch.randint(0, 50, (2,))
            noisy = schedule.add_noise(image, noise, when)
            found = call(noisy, when, encoder_hidden_states=torch.randn(2, 5, 16)).sample
            return torch.nn.functional.mse_loss(found, noise)

        return train(model, call, loss), call

    compare(run, captures=1)


def test_a_pipeline_is_saved_and_loaded(tmp_path: Path) -> None:
    def images(pipeline: Any) -> torch.Tensor:
        pipeline.set_progress_bar_config(disable=True)
        made = pipeline(
            batch_size=1, num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np"
        )
        return torch.tensor(made.images)

    def run(wrap: Wrap) -> tuple[Any, Any]:
        model = diffusers.UNet2DModel(
            sample_size=8,
            layers_per_block=1,
            block_out_channels=(16, 32),
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8,
        )
        call = wrap(model)
        pipeline = diffusers.DDPMPipeline(unet=call, scheduler=diffusers.DDPMScheduler(num_train_timesteps=10))
        first = images(pipeline)
        pipeline.save_pretrained(tmp_path)
        return [first, images(diffusers.DDPMPipeline.from_pretrained(tmp_path))], call

    compare(run, captures=1)
