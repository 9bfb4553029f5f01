"""Visual question answering with Context Broadcasting in ViLT: ``python examples/vilt_context_broadcast/main.py``.

A small ViLT of transformers learns two kinds of questions about drawn pictures. From there it is fine-tuned on four
kinds: as it is, and with CB_S on the tokens of the image, of the question, and of both (Hyeon-Woo et al. 2023,
Table 10).
"""

import argparse
from pathlib import Path

import torch
from answering import AnswerObjective, QuestionStream, accuracy, logits
from context import TOKENS, ContextVilt
from data import ANSWERS, CELL, LENGTH, SIZE, WORDS, Questions, questions
from torch import nn
from transformers import ViltConfig, ViltForQuestionAnswering
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

import vtk
from vtk.files import prepare_output
from vtk.training.engine import fit
from vtk.training.engine.precision import make_precision

WIDTH = 64
CONFIG = {
    "vocab_size": len(WORDS), "max_position_embeddings": LENGTH, "pad_token_id": 0, "num_labels": len(ANSWERS),
    "image_size": SIZE, "patch_size": CELL, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH, "layer_norm_eps": 1e-6,
    "initializer_range": WIDTH**-0.5,  # 0.02 is for a width of 768: at 64 such a model learns for long without success
}  # fmt: skip


def train(model: nn.Module, data: Questions, out: Path, epochs: int, lr: float, seed: int) -> None:
    """Train all weights in place."""
    config = vtk.FinetuneConfig(
        data=out, epochs=epochs, lr=lr, head_lr_mult=1.0, weight_decay=0.01, warmup=0.1, schedule="linear",
        clip_grad=1.0, seed=seed, device="cpu",
    )  # fmt: skip
    torch.manual_seed(seed)
    stream = QuestionStream(data, len(ANSWERS), 32, seed)
    fit(model, AnswerObjective(), [stream], config, make_precision("fp32", torch.device("cpu")), show_progress=False)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the example, and return the accuracy of each fine-tuned model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/vilt"), help="folder for the models")
    parser.add_argument("--epochs", type=int, default=5, help="of each fine-tuning")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    out = args.out
    prepare_output(out, overwrite=False)
    disable_progress_bar()
    set_verbosity_error()  # of Λ, which ViLT's files do not have

    held = questions(400, args.seed + 1)
    torch.manual_seed(args.seed)
    base = ViltForQuestionAnswering(ViltConfig(**CONFIG))
    train(base, questions(2400, args.seed, ("color", "shape")), out, 3, 1e-3, args.seed)
    base.save_pretrained(out / "base")
    before = logits(base, held)
    print(f"base: {describe(accuracy(before, held))}")

    scores: dict[str, float] = {}
    for tokens in (None, *TOKENS):
        name = "ViLT" if tokens is None else f"ViLT + CB_S ({tokens})"
        if tokens is None:
            model = ViltForQuestionAnswering.from_pretrained(out / "base")
        else:
            model = ContextVilt.from_pretrained(out / "base", tokens=tokens)
            added = sum(value.numel() for key, value in model.named_parameters() if key.endswith("cb.scale"))
            share = added / sum(p.numel() for p in base.parameters())
            same = torch.equal(logits(model, held), before)
            print(f"{name}: {added} weights more ({share:.2%}); the base's logits with Λ = 0, bit by bit: {same}")
        train(model, questions(1000, args.seed + 2), out, args.epochs, 1.5e-3, args.seed)
        after = logits(model, held)
        model.save_pretrained(out / (tokens or "none"))
        again = type(model).from_pretrained(out / (tokens or "none"))
        assert torch.equal(logits(again, held), after), "the files compute something else than the model"
        found = accuracy(after, held)
        print(f"{name}: {describe(found)}")
        if tokens is not None:
            sizes = [float(layer.output.cb.scale.abs().mean()) for layer in model.vilt.encoder.layer]
            print(f"{name}: mean |Λ| from the first layer to the last {', '.join(f'{size:.3f}' for size in sizes)}")
        scores[tokens or "none"] = found["all"]
    print(f"{len(held)} questions about pictures never trained on; no verdict: one seed of a toy")
    return scores


def describe(shares: dict[str, float]) -> str:
    """Return accuracies in one line."""
    whole, *kinds = shares.items()
    return f"{whole[1]:.1%} of the answers right (" + ", ".join(f"{kind} {v:.1%}" for kind, v in kinds) + ")"


if __name__ == "__main__":
    main()
