"""The authors' parameter names and weights, mapped onto ours."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from bishop_ray.data.table import TableSpec, TaskType

_RENAMES: list[tuple[str, str]] = [
    (r"^BAModel\.PatchEmb\.linear\.", "patches.projection."),
    (r"^BAModel\.pos_enc_encoder$", "patches.position"),
    (r"^BAModel\.pre_norm\.", "patches.norm."),
    (r"^BAModel\.encoder\.encoder_blocks\.", "encoder.levels."),
    (r"^BAModel\.decoder\.decode_layers\.", "decoder.levels."),
    (r"^BAModel\.pos_enc_decoder$", "decoder.position"),
    (r"^BAModel\.decoder\.(weight|bias)$", r"decoder.linear.\1"),
    (r"\.merge\.pre_norm\.", ".merge.norm."),
    (r"\.BAModule\.feat_attn\.", ".block.column.association."),
    (r"\.BAModule\.emb_pooling\.", ".block.row.pool.association."),
    (r"\.BAModule\.emb_attn\.", ".block.row.association."),
    (r"\.BAModule\.pooling$", ".block.row.pool.prototypes"),
    (r"\.BAModule\.norm1\.", ".block.column.tail.norm_in."),
    (r"\.BAModule\.norm2\.", ".block.column.tail.norm_out."),
    (r"\.BAModule\.norm3\.", ".block.row.tail.norm_in."),
    (r"\.BAModule\.norm4\.", ".block.row.tail.norm_out."),
    (r"\.BAModule\.MLP1\.", ".block.column.tail.feed_forward."),
    (r"\.BAModule\.MLP2\.", ".block.row.tail.feed_forward."),
    (r"\.GSHLayer\.", ".cross."),
    (r"^(decoder\.levels\.\d+)\.norm1\.", r"\1.norm_in."),
    (r"^(decoder\.levels\.\d+)\.norm2\.", r"\1.norm_out."),
    (r"^(decoder\.levels\.\d+)\.mlp\.", r"\1.feed_forward."),
    (r"^(decoder\.levels\.\d+)\.linear\.", r"\1.emit."),
    (r"\.(query|key|value)_projection\.", r".\1."),
    (r"\.out_projection\.", ".output."),
    (r"\.inner_attention\.softmax\.alpha_chooser$", ".activation.raw"),
    (r"^MLP\.mlp\.", "head."),
]
_ALIAS = ".inner_attention.softmax.alpha"
_WITHOUT_LEADING_AXIS = ("patches.position", "decoder.position")


def reference_spec(config: dict[str, Any]) -> TableSpec:
    """The table their arguments describe: every categorical column has ``n_class`` codes."""
    n_out = int(config["n_out"])
    task = {1: TaskType.REGRESSION, 2: TaskType.BINARY}.get(n_out, TaskType.MULTICLASS)
    return TableSpec(task, int(config["n_num"]), (int(config["n_class"]),) * int(config["n_cat"]), n_out)


def reference_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `BiSHop` that give their network.

    Raises:
        ValueError: A number of decoder levels that is neither 0 nor one more than the encoder's (or above, which their
            code lowers to that).
    """
    n_levels, n_decoder = int(config["e_layer"]), int(config["d_layer"])
    if n_decoder != 0 and n_decoder <= n_levels:
        raise ValueError(f"d_layer must be 0 or >= e_layer + 1 = {n_levels + 1}; found {n_decoder}")
    return {
        "d_embedding": config["emb_dim"],
        "stride": config["patch_dim"],
        "n_pool": config["factor"],
        "n_merge": config["n_agg"],
        "d_model": config["d_model"],
        "d_ff": config["d_ff"],
        "n_heads": config["n_heads"],
        "n_encoder_levels": n_levels,
        "decoder": n_decoder > 0,
        "n_decoded": config["out_dim"],
        "activation": config["actv"],
        "hopfield_values": config["hopfield"],
    }


def reference_state(config: dict[str, Any], state: dict[str, Tensor], quantiles: Tensor | None) -> dict[str, Tensor]:
    """Their tensors under our names; per-column tables are packed. Gradients translate in the same way."""
    ours: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith(_ALIAS) or name.startswith("CatEmb."):
            continue
        for pattern, replacement in _RENAMES:
            name = re.sub(pattern, replacement, name)
        tensor = tensor[0] if name in _WITHOUT_LEADING_AXIS else tensor
        ours[name] = tensor.reshape(()) if name.endswith(".activation.raw") else tensor
    columns = [f"CatEmb.embeddings.{index}." for index in range(int(config["n_cat"]))]
    if columns:
        ours["categories.weight"] = torch.cat([state[f"{column}embed.weight"] for column in columns])
        shared = [state[f"{column}share"].reshape(1, -1) for column in columns]
        ours["categories.shared"] = torch.cat(shared)
    if quantiles is not None:
        ours["numbers.edges"] = quantiles
    return ours
