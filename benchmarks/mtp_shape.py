"""Writes a Qwen3.5 shape with an MTP layer, random weights, and a known share of correct drafts.

    python -m benchmarks.mtp_shape FOLDER --correct 0.8 [--shape qwen3.5-0.8b]

All layers compute as those of a trained model, but add next to nothing: each token alone determines the next one, by
the random weights of the output layer. Noise in the projection of the MTP layer makes the other drafts wrong. All next
tokens are of the first 65,536, which an MTP layer drafts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.result import command_parser
from benchmarks.shapes import SHAPES, write_folder
from engine.draft.loading import FREQUENT_TOKENS

# Random tokens of the measured share, and the halvings of the noise.
SAMPLE, HALVINGS = 512, 12
SMALL = 1e-4


def main(arguments: list[str] | None = None) -> int:
    """Write the folder, and print the share of correct drafts."""
    parser = command_parser("mtp_shape", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=[name for name in sorted(SHAPES) if "3.5" in name], default="qwen3.5-0.8b")
    parser.add_argument("--correct", type=float, default=0.8, metavar="SHARE", help="of drafts (default 0.8)")
    options = parser.parse_args(arguments)
    write_folder(SHAPES[options.shape] | {"tie_word_embeddings": False}, options.folder)
    file = options.folder / "model.safetensors"
    weights = load_file(file)
    torch.manual_seed(1)
    weights |= mtp_layer(weights)
    determine_next_tokens(weights)
    print(f"{set_share(weights, options.correct):.1%} of the drafts are correct")
    save_file(weights, file, metadata={"format": "pt"})
    return 0


def mtp_layer(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """An MTP layer of the model's last layer, by the names of Qwen's checkpoints."""
    last = max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    prefix = f"model.layers.{last}."
    norm = weights["model.norm.weight"]
    width = norm.shape[0]
    layer = {
        f"mtp.layers.0.{name.removeprefix(prefix)}": value.clone() for name, value in weights.items() if prefix in name
    }
    norms = {f"mtp.{name}.weight": norm.clone() for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return layer | norms | {"mtp.fc.weight": torch.zeros(width, 2 * width, dtype=norm.dtype)}


def determine_next_tokens(weights: dict[str, Tensor]) -> None:
    """Make the outputs of all blocks, and the logits of rare tokens, small."""
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            value.mul_(SMALL)
    weights["lm_head.weight"][FREQUENT_TOKENS:] *= SMALL


def set_share(weights: dict[str, Tensor], wanted: float) -> float:
    """Add noise to the projection until the share of correct drafts is about the wanted one; return the share."""
    output = weights["lm_head.weight"][:FREQUENT_TOKENS].float()
    tokens = torch.randint(output.shape[0], (SAMPLE,))
    embedded = weights["model.embed_tokens.weight"][tokens].float()
    embedded = embedded / embedded.square().mean(-1, keepdim=True).sqrt()
    width = embedded.shape[1]
    noise = torch.randn(width, width) / width**0.5
    expected = (embedded @ output.T).argmax(-1)

    def share(scale: float) -> float:
        drafted = ((embedded + scale * embedded @ noise.T) @ output.T).argmax(-1)
        return float((drafted == expected).float().mean())

    low, high = 0.0, 4.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) > wanted else (low, middle)
    projection = torch.eye(width) + low * noise
    weights["mtp.fc.weight"][:, :width] = projection.to(weights["mtp.fc.weight"].dtype)
    return share(low)


if __name__ == "__main__":
    sys.exit(main())
