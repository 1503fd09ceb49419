"""Tangents as they lie in memory: a backward that may be given them in any layout, for the backend that is bitwise.

What follows the call decides how a tangent lies: ``sum()`` hands back one number expanded, a transposition a transposed tensor.
Eager's kernels add up in another order then. A backward is captured for tangents that lie as the results do. Others are copied into
that layout, unless all operators on their way take any: these are called by eager's formulas with the gradient as it is.
"""

from __future__ import annotations

import dataclasses
import operator

import torch

from dovetail.aot.backward_graphs import ANY_LAYOUT
from dovetail.aot.nodes import BY_USER_BACKWARD, depending_on
from dovetail.aot.steps import Lowering, after_partition
from dovetail.passes.editing import copy_graph

_aten = torch.ops.aten
#: Whether the result is a view depends on the layout.
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
#: Eager's formulas call these with the gradient as it lies: bitwise over torch's own samples of them, with tangents expanded,
#: reversed and with gaps. Not native_group_norm_backward and _cdist_backward: their formulas make the gradient contiguous first.
_NAMES = """
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _conj _embedding_bag_backward
    _embedding_bag_per_sample_weights_backward _fft_c2c _fft_r2c _linalg_solve_ex _log_softmax_backward_data
    _pdist_backward _prelu_kernel_backward _scaled_dot_product_flash_attention_for_cpu_backward
    _segment_reduce_backward _softmax_backward_data _to_copy _trilinear _unsafe_masked_index
    _unsafe_masked_index_put_accumulate _unsafe_view _upsample_bilinear2d_aa_backward
    _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward
    adaptive_max_pool2d_backward adaptive_max_pool3d_backward addmm addmv alias amax avg_pool2d_backward
    avg_pool3d_backward baddbmm batch_norm_backward binary_cross_entropy_backward bmm cat channel_shuffle
    cholesky_solve clone col2im constant_pad_nd convolution_backward copy cumsum detach diag_embed diagonal
    diagonal_backward diagonal_scatter elu_backward embedding_dense_backward expand flip
    fractional_max_pool2d_backward fractional_max_pool3d_backward gather glu_backward grid_sampler_2d_backward
    grid_sampler_3d_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    huber_loss_backward index.Tensor index_add index_fill.int_Scalar index_fill.int_Tensor index_put index_select
    leaky_relu_backward linalg_cross linalg_lu_solve linalg_matrix_exp linalg_solve_triangular log_sigmoid_backward
    logcumsumexp masked_scatter masked_scatter_backward max_pool2d_with_indices_backward
    max_pool3d_with_indices_backward mean mean.dim mish_backward mm mse_loss_backward multi_margin_loss_backward
    multilabel_margin_loss_backward mv native_batch_norm_backward native_layer_norm_backward new_empty_strided
    new_zeros nll_loss2d_backward nll_loss_backward ones_like ormqr permute pixel_shuffle pixel_unshuffle put
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward repeat replication_pad1d_backward
    replication_pad2d_backward replication_pad3d_backward reshape roll rot90 rrelu_with_noise_backward scatter.src
    scatter.value scatter_add select.int select_backward select_scatter slice.Tensor slice_backward slice_scatter
    smooth_l1_loss_backward soft_margin_loss_backward softplus_backward softshrink_backward split_with_sizes
    squeeze squeeze.dim squeeze.dims stack sum sum.dim_IntList t take transpose.int triangular_solve tril triu
    unbind.int unfold_backward unsqueeze upsample_bicubic2d_backward upsample_bilinear2d_backward
    upsample_linear1d_backward upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
    upsample_trilinear3d_backward view view_as_real where.self zeros_like
"""
_TAKING_ANY = frozenset(
    getattr(getattr(_aten, name), overload or "default")
    for name, _, overload in (item.partition(".") for item in _NAMES.split())
)


@after_partition
def take_any_layout(lowering: Lowering) -> Lowering:
    """Mark the tangents that the backward may be given as they are, and reshape where it takes views of them."""
    parts, tangents = lowering.parts, lowering.joint.tangents
    for node in tangents:
        # The graph may have been compiled for another backend before.
        node.meta.pop(ANY_LAYOUT, None)
    if lowering.backend.name != "aten" or parts is None or parts.backward is None:
        return lowering
    if not all(map(_takes_any, _called_with_tangents(parts.backward, len(tangents)))):
        return lowering
    copied = copy_graph(parts.backward)
    for node in _called_with_tangents(copied, len(tangents)):
        if node.target in _VIEWS:
            node.target = _aten.reshape.default
    for node in tangents:
        node.meta[ANY_LAYOUT] = True
    return lowering.with_(parts=dataclasses.replace(parts, backward=copied))


def _called_with_tangents(backward: torch.fx.GraphModule, count: int) -> list[torch.fx.Node]:
    """The operators that the last so many inputs reach."""
    placeholders = backward.graph.find_nodes(op="placeholder")
    reached = depending_on(backward.graph.nodes, placeholders[len(placeholders) - count :])
    return [node for node in reached if node.op == "call_function"]


def _takes_any(node: torch.fx.Node) -> bool:
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    known = node.target in _TAKING_ANY or is_pointwise or node.target is operator.getitem
    return known and not node.meta.get(BY_USER_BACKWARD)
